//! `bench chain`: what a long chain of layers costs its readers, before and after a merge.
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use image::{Link, NewRun, PAGE_BYTES, Reader, Seal, SpaceId, Writer};
use pages::{Extent, sink};
use rustix::fs::MemfdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use store::Directory;

use crate::error::{Error, Result, kernel_error};
use crate::machine::Machine;
use crate::record::median;
use crate::report::{self, put_between};

const BEGIN: &str = "<!-- chain:begin, written by `cargo xtask bench chain` -->";
const END: &str = "<!-- chain:end -->";

/// Layers of a full and of a quick measurement.
const LAYERS: u64 = 1000;
const QUICK_LAYERS: u64 = 100;

/// How often each is measured.
const ROUNDS: usize = 15;
const QUICK_ROUNDS: usize = 5;

/// One page in a hundred is written between two layers.
const WRITTEN: u64 = 100;

/// The space of all images here.
pub const SPACE: SpaceId = SpaceId(1);

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Fewer layers and rounds; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Layers of the chain.
    #[arg(long, value_name = "N")]
    layers: Option<u64>,
    /// Memory of the target in MiB.
    #[arg(long, value_name = "N", default_value_t = 64)]
    mib: u64,
    /// Where the images are made.
    #[arg(long, value_name = "FOLDER", default_value = "/var/tmp")]
    scratch: PathBuf,
    /// Where the table is written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// What reading an image takes.
struct Cost {
    what: String,
    open_ms: f64,
    restore_ms: f64,
    files: u64,
    reads: u64,
    read_mib: f64,
}

/// Makes a chain, reads its newest image, merges it and reads it again; writes the results.
///
/// # Errors
/// When anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    let layers = arguments.layers.unwrap_or(if arguments.quick {
        QUICK_LAYERS
    } else {
        LAYERS
    });
    if layers < 2 || arguments.mib == 0 {
        let what = "a chain has two layers or more, and they have pages".into();
        return Err(Error::Nothing { what });
    }
    let rounds = if arguments.quick {
        QUICK_ROUNDS
    } else {
        ROUNDS
    };
    allow_files(layers)?;
    let scratch = tempfile::tempdir_in(&arguments.scratch);
    let scratch = scratch.map_err(kernel_error("make a scratch folder"))?;
    let dir = scratch.path();
    let pages = arguments.mib * (1 << 20) / PAGE_BYTES as u64;
    let expected = make(dir, layers, pages)?;
    let newest = layer(dir, layers - 1);
    let mut costs = vec![measure(
        "one image, all written",
        &layer(dir, 0),
        pages,
        rounds,
        None,
    )?];
    let told = format!("{layers} layers");
    costs.push(measure(&told, &newest, pages, rounds, Some(&expected))?);
    let begun = Instant::now();
    merge(&newest, &newest)?;
    let merge_ms = begun.elapsed().as_secs_f64() * 1e3;
    costs.push(measure(
        "the same, merged",
        &newest,
        pages,
        rounds,
        Some(&expected),
    )?);
    let table = table(&Machine::this(dir), arguments.mib, rounds, merge_ms, &costs);
    println!("{table}");
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    put_between(&folder.join("benchmarks.md"), (BEGIN, END), &table)
}

/// Every layer has a file that is open at the same time as the others.
///
/// # Errors
/// When the kernel refuses that.
pub fn allow_files(layers: u64) -> Result<()> {
    let now = getrlimit(Resource::Nofile);
    let current = now.current.map(|current| current.max(4 * layers + 256));
    let maximum = now.maximum.max(current);
    setrlimit(Resource::Nofile, Rlimit { current, maximum })
        .map_err(kernel_error("raise the limit of open files"))
}

/// The folder of a layer.
pub fn layer(dir: &Path, number: u64) -> PathBuf {
    dir.join(number.to_string())
}

/// Returns an error about what failed, to be given to `map_err`.
pub fn failed<E: std::error::Error + Send + Sync + 'static>(
    doing: &'static str,
) -> impl Fn(E) -> Error {
    move |error| Error::Kernel {
        doing,
        source: std::io::Error::other(error),
    }
}

/// Opens an image.
///
/// # Errors
/// When it is none.
pub fn open(path: &Path) -> Result<Reader> {
    let store = Directory::open(path).map_err(failed("open an image's folder"))?;
    Reader::open(&store).map_err(failed("open an image"))
}

/// Writes the layers; tells by page which layer wrote it last.
///
/// # Errors
/// When a layer cannot be written.
pub fn make(dir: &Path, layers: u64, pages: u64) -> Result<Vec<u64>> {
    let mut last = vec![0; pages as usize];
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for number in 0..layers {
        let store = Directory::create(layer(dir, number)).map_err(failed("make a folder"))?;
        let store = Arc::new(store);
        let writer = match number.checked_sub(1) {
            None => Writer::create(store),
            Some(parent) => {
                let link = Link {
                    to_parent: format!("../{parent}"),
                    to_child: format!("../{number}"),
                };
                Writer::create_layer(store, Arc::new(open(&layer(dir, parent))?), link)
            }
        };
        let writer = writer.map_err(failed("start an image"))?;
        let mut written: Vec<u64> = if number == 0 {
            (0..pages).collect()
        } else {
            let draw = |_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % pages
            };
            (0..(pages / WRITTEN).max(1)).map(draw).collect()
        };
        written.sort_unstable();
        written.dedup();
        write(&writer, number, pages, &written).map_err(failed("write an image"))?;
        writer
            .seal(Seal::default())
            .map_err(failed("finish an image"))?;
        written
            .iter()
            .for_each(|page| last[*page as usize] = number);
    }
    Ok(last)
}

fn write(writer: &Writer, number: u64, pages: u64, written: &[u64]) -> image::Result<()> {
    let follow = |one: &u64, next: &u64| next - one == 1;
    let mut page = 0;
    for first in written.chunk_by(follow).flat_map(|run| run.chunks(256)) {
        if first[0] > page {
            writer.inherit(SPACE, page, first[0] - page)?;
        }
        let bytes: Vec<u8> = first
            .iter()
            .flat_map(|page| contents(number, *page))
            .collect();
        let run = NewRun {
            space: SPACE,
            first_page: first[0],
            pages: first.len() as u32,
        };
        writer.append(&bytes, &[run])?;
        page = first[0] + first.len() as u64;
    }
    if page < pages {
        writer.inherit(SPACE, page, pages - page)?;
    }
    Ok(())
}

/// What a layer writes to a page: different from all others, and not zero.
pub fn contents(number: u64, page: u64) -> Vec<u8> {
    let word = (number << 32 | page).to_le_bytes();
    word.repeat(PAGE_BYTES / word.len() - 1)
        .into_iter()
        .chain([0xff; 8])
        .collect()
}

fn merge(from: &Path, to: &Path) -> Result<()> {
    let reader = open(from)?;
    let store = Directory::create(to).map_err(failed("open an image's folder"))?;
    let writer = Writer::create(Arc::new(store)).map_err(failed("start an image"))?;
    image::merge(&reader, &writer).map_err(failed("merge a chain"))?;
    let sealed = writer.seal(Seal::default());
    sealed.map(drop).map_err(failed("finish an image"))
}

/// Reads an image as a restore does: opens it, finds where all pages are, reads and verifies them
/// and puts them into shared memory.
fn measure(
    what: &str,
    path: &Path,
    pages: u64,
    rounds: usize,
    expected: Option<&[u64]>,
) -> Result<Cost> {
    let (mut opens, mut restores) = (Vec::new(), Vec::new());
    let (mut files, mut io) = (0, (0, 0));
    for _ in 0..=rounds {
        let before = (open_files()?, reads()?);
        let begun = Instant::now();
        let reader = open(path)?;
        let open_ms = begun.elapsed().as_secs_f64() * 1e3;
        let target = rustix::fs::memfd_create("target", MemfdFlags::CLOEXEC);
        let target = target.map_err(kernel_error("make memory"))?;
        let filled = fill(&reader, &target, pages)?;
        let all_ms = begun.elapsed().as_secs_f64() * 1e3;
        let after = reads()?;
        files = open_files()?.saturating_sub(before.0);
        io = (after.0 - before.1.0, after.1 - before.1.1);
        if filled != pages {
            let what = format!("{filled} pages of {pages} came");
            return Err(Error::Nothing { what });
        }
        if let Some(expected) = expected {
            compare(&target, expected)?;
        }
        opens.push(open_ms);
        restores.push(all_ms);
    }
    // The first one was for warming up.
    let middle = |times: &[f64]| median(&times[1..]).unwrap_or_default();
    Ok(Cost {
        what: what.into(),
        open_ms: middle(&opens),
        restore_ms: middle(&restores),
        // The target is a file, too.
        files: files.saturating_sub(1),
        reads: io.0,
        read_mib: io.1 as f64 / f64::from(1 << 20),
    })
}

/// Puts all pages into a file, as a restore does.
///
/// # Errors
/// When one cannot be read.
pub fn fill(reader: &Reader, target: &OwnedFd, pages: u64) -> Result<u64> {
    let target = target
        .try_clone()
        .map_err(kernel_error("copy a descriptor"))?;
    let extent = Extent {
        space: SPACE,
        first_page: 0,
        at: abi::Addr(0),
        pages,
    };
    let placed = pages::place(reader, &[extent]).map_err(failed("find pages"))?;
    let sink = sink::Object::new(target);
    let filled = pages::fill(reader, &placed, &sink, &|_| ()).map_err(failed("read pages"))?;
    Ok(filled.pages)
}

fn compare(target: &OwnedFd, expected: &[u64]) -> Result<()> {
    let mut bytes = vec![0; PAGE_BYTES];
    for (page, number) in (0..).zip(expected) {
        let offset_bytes = page * PAGE_BYTES as u64;
        let got = rustix::io::pread(target, &mut bytes[..], offset_bytes);
        got.map_err(kernel_error("read memory"))?;
        if bytes != contents(*number, page) {
            let what = format!("page {page} is not what layer {number} wrote");
            return Err(Error::Nothing { what });
        }
    }
    Ok(())
}

fn open_files() -> Result<u64> {
    let files = std::fs::read_dir("/proc/self/fd").map_err(kernel_error("list open files"))?;
    Ok(files.count() as u64)
}

/// How many reads this process has made, and of how many bytes.
fn reads() -> Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/self/io").map_err(kernel_error("count reads"))?;
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|value| value.trim().parse::<u64>().ok())
    };
    let counts = value("syscr:").zip(value("rchar:"));
    counts.ok_or_else(|| Error::Nothing {
        what: "the kernel does not count reads".into(),
    })
}

fn table(machine: &Machine, mib: u64, rounds: usize, merge_ms: f64, costs: &[Cost]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{} · {} core(s) · kernel {} · {}\n\n{mib} MiB, one page in {WRITTEN} written between two \
         layers, at random; medians of {rounds}. The merge took {merge_ms:.0} ms.\n\n\
         | image | open, ms | restore, ms | files | reads | MiB read |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |",
        machine.processor, machine.cores, machine.kernel, machine.disk,
    );
    for cost in costs {
        let Cost {
            what,
            open_ms,
            restore_ms,
            files,
            reads,
            read_mib,
        } = cost;
        let _ = writeln!(
            out,
            "| {what} | {open_ms:.2} | {restore_ms:.1} | {files} | {reads} | {read_mib:.1} |"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_and_its_merged_image_have_the_same_pages() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let dir = scratch.path();
        let expected = make(dir, 5, 300).expect("it is made");
        let newest = layer(dir, 4);
        measure("chain", &newest, 300, 1, Some(&expected)).expect("it is read and compared");
        let merged = dir.join("merged");
        merge(&newest, &merged).expect("it is merged");
        measure("merged", &merged, 300, 1, Some(&expected)).expect("it is read and compared");
    }
}
