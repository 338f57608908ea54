//! `bench resolver`: what it takes to get pages out of an image, a few at random places and all.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use image::{CHUNK_PAGES, Cache, Compression, NewRun, PAGE_BYTES, Reader, Seal, Writer};
use serde::Serialize;
use store::Directory;

use crate::chain::{self, SPACE, failed};
use crate::error::{Error, Result, kernel_error};
use crate::machine::Machine;
use crate::record::median;
use crate::report::{self, put_between};
use crate::{runs, text};

const BEGIN: &str = "<!-- resolver:begin, written by `cargo xtask bench resolver` -->";
const END: &str = "<!-- resolver:end -->";

/// Codecs by name.
const CODECS: [(&str, Option<Compression>); 3] = [
    ("none", None),
    ("lz4", Some(Compression::Lz4)),
    ("zstd", Some(Compression::Zstd(Compression::ZSTD_LEVEL))),
];

/// Readers of one image at once, what each reads, and the cache that they share.
const CROWD: usize = 100;
const CROWD_READS: usize = 200;
const CROWD_CACHE_BYTES: usize = 16 << 20;

/// How much is read at once by who reads all.
const BLOCK_PAGES: usize = 256;

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Fewer reads, rounds and layers; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Pages of an image in MiB.
    #[arg(long, value_name = "N", default_value_t = 256)]
    mib: usize,
    /// Where the images are made.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    scratch: PathBuf,
    /// Where the table and the numbers are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// How much is measured.
struct Scale {
    rounds: usize,
    reads: usize,
    layers: u64,
}

/// The numbers of a run.
#[derive(Serialize)]
struct Numbers {
    machine: Machine,
    mib: usize,
    layers: u64,
    chunk_pages: u32,
    random: Vec<Random>,
    whole: Vec<Whole>,
}

/// Single pages at random places, a value for each round.
#[derive(Serialize)]
struct Random {
    image: String,
    cache: &'static str,
    threads: usize,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    reads_per_s: Vec<f64>,
}

/// All pages of an image in their order, a value for each round.
#[derive(Serialize)]
struct Whole {
    image: String,
    stored_mib: f64,
    open_ms: Vec<f64>,
    /// With one thread and with two.
    gib_per_s: [Vec<f64>; 2],
    /// As a restore fills memory, with as many threads as there are processors.
    filled_gib_per_s: Vec<f64>,
    /// As a dump stores what one thread has read; of images that are written here alone.
    written_gib_per_s: Vec<f64>,
}

/// An image, and the contents of its pages.
struct Subject {
    name: String,
    path: PathBuf,
    pages: usize,
    contents: Box<dyn Fn(u64) -> Vec<u8> + Sync>,
    written_gib_per_s: Vec<f64>,
}

/// Makes images of text with each codec and a long chain of layers, reads them, keeps the numbers
/// and writes the table.
///
/// # Errors
/// When anything fails that is measured, or a page is not what was stored.
pub fn run(arguments: &Arguments) -> Result<()> {
    let scale = match arguments.quick {
        true => Scale {
            rounds: 3,
            reads: 4_000,
            layers: 100,
        },
        false => Scale {
            rounds: 9,
            reads: 20_000,
            layers: 1_000,
        },
    };
    let scratch = tempfile::tempdir_in(&arguments.scratch);
    let scratch = scratch.map_err(kernel_error("make a scratch folder"))?;
    let numbers = measure_all(arguments.mib, &scale, scratch.path())?;
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    let kept = runs::keep(&folder, &numbers.machine, "resolver", &numbers)?;
    let text = format!("{}\n{}", table(&numbers), runs::link(&folder, &kept));
    println!("{text}");
    put_between(&folder.join("benchmarks.md"), (BEGIN, END), &text)
}

fn measure_all(mib: usize, scale: &Scale, dir: &Path) -> Result<Numbers> {
    let mut memory = vec![0; mib << 20];
    text::fill(&mut memory)?;
    let memory: Arc<[u8]> = memory.into();
    let mut numbers = Numbers {
        machine: Machine::this(dir),
        mib,
        layers: scale.layers,
        chunk_pages: CHUNK_PAGES,
        random: Vec::new(),
        whole: Vec::new(),
    };
    for (name, compression) in CODECS {
        let path = dir.join(name);
        let write = |_| write(&path, &memory, compression);
        let written_gib_per_s = (0..scale.rounds).map(write).collect::<Result<_>>()?;
        let memory = memory.clone();
        let contents = move |page: u64| {
            let at = page as usize * PAGE_BYTES;
            memory[at..at + PAGE_BYTES].to_vec()
        };
        let subject = Subject {
            name: name.into(),
            path,
            pages: mib * ((1 << 20) / PAGE_BYTES),
            contents: Box::new(contents),
            written_gib_per_s,
        };
        measure(&subject, scale, &mut numbers, 1)?;
    }
    chain::allow_files(scale.layers)?;
    let layers = dir.join("layers");
    std::fs::create_dir(&layers).map_err(kernel_error("make a folder"))?;
    let pages = mib * ((1 << 20) / PAGE_BYTES) / 4;
    let last = chain::make(&layers, scale.layers, pages as u64)?;
    let subject = Subject {
        name: format!("{} layers, none", scale.layers),
        path: chain::layer(&layers, scale.layers - 1),
        pages,
        contents: Box::new(move |page| chain::contents(last[page as usize], page)),
        written_gib_per_s: Vec::new(),
    };
    measure(&subject, scale, &mut numbers, scale.layers)?;
    Ok(numbers)
}

/// Writes an image of one space, in the place of one that was there; tells how fast.
fn write(path: &Path, memory: &[u8], compression: Option<Compression>) -> Result<f64> {
    let begun = Instant::now();
    let store = Directory::create(path).map_err(failed("make a folder"))?;
    let mut writer = Writer::create(Arc::new(store)).map_err(failed("start an image"))?;
    writer.compress(compression);
    let blocks = memory.chunks(BLOCK_PAGES * PAGE_BYTES);
    for (number, bytes) in (0..).zip(blocks) {
        let run = NewRun {
            space: SPACE,
            first_page: number * BLOCK_PAGES as u64,
            pages: (bytes.len() / PAGE_BYTES) as u32,
        };
        let written = writer.append(bytes, &[run]);
        written.map_err(failed("write an image"))?;
    }
    let sealed = writer.seal(Seal::default());
    sealed.map_err(failed("finish an image"))?;
    Ok(gib_per_s(memory.len(), begun))
}

fn gib_per_s(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / f64::from(1 << 30) / begun.elapsed().as_secs_f64()
}

/// How many of a crowd can have a reader of their own: one has a directory and a file of each
/// layer open.
fn crowd_readers(layers: u64) -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let files = files.current.unwrap_or(u64::MAX).saturating_sub(256);
    usize::try_from(files / (2 * layers)).map_or(CROWD, |readers| readers.clamp(1, CROWD))
}

fn measure(subject: &Subject, scale: &Scale, numbers: &mut Numbers, layers: u64) -> Result<()> {
    let all_bytes = 2 * subject.pages * PAGE_BYTES;
    for (cache, limit_bytes) in [("cold", 0), ("warm", all_bytes)] {
        for threads in [1, 2] {
            let reads = scale.reads / threads;
            let mut random = Random::new(subject, cache, threads);
            for round in 0..scale.rounds {
                let kept = Arc::new(Cache::new(limit_bytes));
                let reader = chain::open(&subject.path)?.with_cache(kept);
                if limit_bytes > 0 {
                    warm_up(&reader, subject)?;
                }
                random.take(&[reader], subject, (threads, reads), round)?;
            }
            numbers.random.push(random);
        }
    }
    let mut crowd = Random::new(subject, "shared", CROWD);
    for round in 0..scale.rounds {
        let kept = Arc::new(Cache::new(CROWD_CACHE_BYTES));
        let open = |_| Ok(chain::open(&subject.path)?.with_cache(kept.clone()));
        let readers = (0..crowd_readers(layers))
            .map(open)
            .collect::<Result<Vec<_>>>()?;
        crowd.take(&readers, subject, (CROWD, CROWD_READS), round)?;
    }
    numbers.random.push(crowd);
    numbers.whole.push(read_whole(subject, scale)?);
    Ok(())
}

/// Has all chunks in the cache.
fn warm_up(reader: &Reader, subject: &Subject) -> Result<()> {
    let mut page = [0; PAGE_BYTES];
    for number in 0..subject.pages as u64 {
        let read = reader.read_pages(SPACE, number, &mut page);
        read.map_err(failed("read a page"))?;
    }
    Ok(())
}

impl Random {
    fn new(subject: &Subject, cache: &'static str, threads: usize) -> Self {
        Self {
            image: subject.name.clone(),
            cache,
            threads,
            p50_us: Vec::new(),
            p99_us: Vec::new(),
            reads_per_s: Vec::new(),
        }
    }

    /// Reads so many pages with each of so many threads, which have the readers in turn.
    fn take(
        &mut self,
        readers: &[Reader],
        subject: &Subject,
        (threads, reads): (usize, usize),
        round: usize,
    ) -> Result<()> {
        let begun = Instant::now();
        let of_each = std::thread::scope(|scope| {
            let start = |thread: usize| {
                let reader = &readers[thread % readers.len()];
                let seed = (round * CROWD + thread) as u64;
                scope.spawn(move || read_some(reader, subject, reads, seed))
            };
            let threads = (0..threads).map(start).collect::<Vec<_>>();
            let join = threads.into_iter().map(|thread| thread.join());
            join.map(|joined| joined.expect("a reader does not panic"))
                .collect::<Result<Vec<_>>>()
        });
        let seconds = begun.elapsed().as_secs_f64();
        let mut ns = of_each?.concat();
        ns.sort_unstable();
        let us = |share: usize| ns[(ns.len() - 1) * share / 100] as f64 / 1e3;
        self.p50_us.push(us(50));
        self.p99_us.push(us(99));
        self.reads_per_s.push(ns.len() as f64 / seconds);
        Ok(())
    }
}

/// Reads single pages at random places, and compares them; returns how long each read took, in ns.
fn read_some(reader: &Reader, subject: &Subject, reads: usize, seed: u64) -> Result<Vec<u64>> {
    let mut word = 0x9e37_79b9_7f4a_7c15_u64 ^ seed << 17;
    let mut page = [0; PAGE_BYTES];
    let mut took = Vec::with_capacity(reads);
    for _ in 0..reads {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        let number = word % subject.pages as u64;
        let begun = Instant::now();
        let read = reader.read_pages(SPACE, number, &mut page);
        took.push(begun.elapsed().as_nanos() as u64);
        read.map_err(failed("read a page"))?;
        if page[..] != (subject.contents)(number) {
            let what = format!("page {number} is not what was stored");
            return Err(Error::Nothing { what });
        }
    }
    Ok(took)
}

/// Reads all pages in their order.
fn read_whole(subject: &Subject, scale: &Scale) -> Result<Whole> {
    let stored_bytes = crate::tool::image_bytes(&subject.path)?;
    let mut whole = Whole {
        image: subject.name.clone(),
        stored_mib: stored_bytes as f64 / f64::from(1 << 20),
        open_ms: Vec::new(),
        gib_per_s: [Vec::new(), Vec::new()],
        filled_gib_per_s: Vec::new(),
        written_gib_per_s: subject.written_gib_per_s.clone(),
    };
    let all_bytes = subject.pages * PAGE_BYTES;
    for _ in 0..scale.rounds {
        let begun = Instant::now();
        let reader = chain::open(&subject.path)?;
        whole.open_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        for threads in [1, 2] {
            let begun = Instant::now();
            read_parts(&reader, subject.pages, threads)?;
            whole.gib_per_s[threads - 1].push(gib_per_s(all_bytes, begun));
        }
        let target = rustix::fs::memfd_create("target", rustix::fs::MemfdFlags::CLOEXEC);
        let target = target.map_err(kernel_error("make memory"))?;
        let begun = Instant::now();
        chain::fill(&reader, &target, subject.pages as u64)?;
        whole.filled_gib_per_s.push(gib_per_s(all_bytes, begun));
    }
    Ok(whole)
}

/// Reads all pages, each thread an equal part.
fn read_parts(reader: &Reader, pages: usize, threads: usize) -> Result<()> {
    let part = pages / threads;
    let read = |thread: usize| {
        let mut bytes = vec![0; BLOCK_PAGES * PAGE_BYTES];
        let end = (thread + 1) * part;
        for first in (thread * part..end).step_by(BLOCK_PAGES) {
            let len = BLOCK_PAGES.min(end - first) * PAGE_BYTES;
            let read = reader.read_pages(SPACE, first as u64, &mut bytes[..len]);
            read.map_err(failed("read pages"))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let start = |thread| scope.spawn(move || read(thread));
        let threads = (0..threads).map(start).collect::<Vec<_>>();
        let mut join = threads.into_iter().map(|thread| thread.join());
        join.try_for_each(|joined| joined.expect("a reader does not panic"))
    })
}

fn table(numbers: &Numbers) -> String {
    let machine = &numbers.machine;
    let middle = |values: &[f64]| median(values).unwrap_or_default();
    let mut out = format!(
        "{} · {} core(s) · kernel {} · images on {}\n\nImages of {} MiB, chunks of {} pages; a \
         quarter of that in the chain, one page in a hundred written between two layers. {} Of a \
         hundred threads, some share a reader where more would have too many files open. \
         Medians of {} rounds.\n\n| image | chunks in the cache | readers | p50, us | p99, us | \
         reads/s |\n| --- | --- | ---: | ---: | ---: | ---: |\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.disk,
        numbers.mib,
        numbers.chunk_pages,
        text::WHAT,
        numbers.whole[0].open_ms.len(),
    );
    for random in &numbers.random {
        let cache = match random.cache {
            "cold" => "none",
            "warm" => "all",
            _ => "16 MiB for all readers",
        };
        let _ = writeln!(
            out,
            "| {} | {cache} | {} | {:.1} | {:.1} | {:.0} |",
            random.image,
            random.threads,
            middle(&random.p50_us),
            middle(&random.p99_us),
            middle(&random.reads_per_s),
        );
    }
    out.push_str(
        "\n| image | stored, MiB | open, ms | all pages, GiB/s | with two threads | filled as by a \
         restore | written by one thread |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for whole in &numbers.whole {
        let _ = writeln!(
            out,
            "| {} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
            whole.image,
            whole.stored_mib,
            middle(&whole.open_ms),
            middle(&whole.gib_per_s[0]),
            middle(&whole.gib_per_s[1]),
            middle(&whole.filled_gib_per_s),
            middle(&whole.written_gib_per_s),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_is_read_as_it_was_stored() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let scale = Scale {
            rounds: 1,
            reads: 50,
            layers: 3,
        };
        let numbers = measure_all(2, &scale, scratch.path()).expect("it is measured");
        assert_eq!(numbers.random.len(), 5 * numbers.whole.len());
        let text = table(&numbers);
        for image in ["none", "lz4", "zstd", "3 layers, none"] {
            assert!(text.contains(&format!("| {image} | all | 2 |")), "{text}");
        }
    }
}
