//! A machine that runs the scripts of a plan, and knows of the kernel what address spaces are.

use std::collections::BTreeMap;

use abi::{Addr, Kind as OpKind, Op, PAGE_BYTES, Span};
use image::{Reader, SpaceId};
use resources::map::layout::{DECODED_FILE, Place};
use resources::script::{Layout, ScriptId};
use syscalls::Sysno;

use super::super::{Outside, Plan};
use super::space::{Contents, Kind, Space};

/// Where the restore area is, in which nothing else is mapped here.
const AREA: u64 = 0x10_0000;
const WORDS_BYTES: u64 = 0x1000;
/// The number of the pool's first descriptor.
const POOL: i32 = 1000;
const TOP: Addr = Addr(0x7fff_ffff_f000);

/// Plays what a restore does.
pub struct Machine<'a> {
    plan: &'a Plan,
    reader: &'a Reader,
    /// The ops and data of all scripts.
    area: Vec<u8>,
    scripts: Vec<Addr>,
    next_frame: u64,
    /// The address spaces of those that came to the end of their scripts, by pid.
    pub ended: BTreeMap<i32, Space>,
}

impl<'a> Machine<'a> {
    pub fn new(plan: &'a Plan, reader: &'a Reader) -> Self {
        let mut at = AREA + WORDS_BYTES;
        let mut places = Vec::new();
        for planned in &plan.scripts {
            let data = (at + planned.script.ops_bytes() as u64).next_multiple_of(64);
            places.push((Addr(at), Addr(data)));
            at = (data + planned.script.data_bytes() as u64).next_multiple_of(64);
        }
        let scripts = places.iter().map(|place| place.0).collect::<Vec<_>>();
        let descriptors = plan.descriptions as usize + plan.files.len();
        let pool = (POOL..).take(descriptors).collect::<Vec<_>>();
        let mut area = vec![0; (at - AREA) as usize];
        for (planned, (ops, data)) in plan.scripts.iter().zip(places) {
            let layout = Layout {
                ops,
                data,
                words: Addr(AREA),
                pool: &pool,
                scripts: &scripts,
                area: Span {
                    start: Addr(AREA),
                    end: Addr(at),
                },
                top: TOP,
            };
            let (op_bytes, data_bytes) = planned.script.compile(&layout);
            for (at, bytes) in [(ops, op_bytes), (data, data_bytes)] {
                let at = (at.0 - AREA) as usize;
                area[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        let ended = BTreeMap::new();
        Self {
            plan,
            reader,
            area,
            scripts,
            next_frame: 1 << 32,
            ended,
        }
    }

    /// Runs all scripts, the root's first.
    pub fn run(&mut self) -> Result<(), String> {
        let root = self.plan.scripts[0].tid;
        self.task(ScriptId(0), root, Space::default())
    }

    fn word(&self, at: u64) -> u64 {
        let at = (at - AREA) as usize;
        u64::from_le_bytes(self.area[at..at + 8].try_into().expect("eight bytes"))
    }

    /// Runs a task's script to its end, or to the task's own.
    fn task(&mut self, id: ScriptId, pid: i32, mut space: Space) -> Result<(), String> {
        let start = self.scripts[id.0 as usize].0;
        for step in 0.. {
            let op = start + step * Op::BYTES as u64;
            let words: [u64; 10] = std::array::from_fn(|at| self.word(op + 8 * at as u64));
            let [kind, number, args @ .., _result, extra] = words;
            if kind == OpKind::End as u64 {
                break;
            }
            let call = Sysno::new(number as usize).expect("a system call");
            if call == Sysno::exit_group {
                return Ok(());
            }
            if kind == OpKind::Spawn as u64 {
                self.spawn(args[0], extra, &space)?;
            } else if call == Sysno::userfaultfd {
                self.fill(id, &mut space)
                    .map_err(|why| format!("filling {pid}: {why}"))?;
            } else {
                self.call(call, args, &mut space).map_err(|why| {
                    let line = self.plan.scripts[id.0 as usize].script.line(step as usize);
                    format!("{pid}: {line}: {why}")
                })?;
            }
        }
        self.ended.insert(pid, space);
        Ok(())
    }

    fn spawn(&mut self, clone_args: u64, script: u64, space: &Space) -> Result<(), String> {
        const SET_TID: u64 = 64;
        let tid = self.word(self.word(clone_args + SET_TID)) as i32;
        let child = self.scripts.iter().position(|start| start.0 == script);
        let child = child.expect("a script begins there");
        self.task(
            ScriptId(u32::try_from(child).expect("few")),
            tid,
            space.fork(),
        )
    }

    /// What the restorer does while a task waits for it.
    fn fill(&mut self, id: ScriptId, space: &mut Space) -> Result<(), String> {
        let plan = self.plan;
        let mut all = plan.outside.iter();
        let Outside {
            space: task,
            stored,
            mappings,
            ..
        } = all
            .find(|outside| outside.uffd.0 == id)
            .expect("it is to be filled");
        for map in mappings {
            let pages = space.pages_mut(*map)?;
            let first = pages[0].seen();
            if pages
                .iter()
                .any(|page| page.contents.is_some() || page.seen() != first)
            {
                return Err(format!("{map} is not one fresh mapping"));
            }
        }
        for piece in stored {
            if !mappings
                .iter()
                .any(|map| map.intersect(piece.span) == piece.span)
            {
                return Err(format!("{} is in none of its mappings", piece.span));
            }
            for page in piece.span.start.page()..piece.span.end.page() {
                let contents = self.read_page(*task, page)?;
                space.write(page, contents)?;
            }
        }
        Ok(())
    }

    /// The stored page at a place in a file.
    fn read(&mut self, at: Place) -> Result<Contents, String> {
        if at.file == DECODED_FILE {
            let mut decoded = self.plan.decoded.iter();
            let extent = decoded.find(|extent| extent.span().contains(Addr(at.offset_bytes)));
            let extent = extent.ok_or("a place behind the end of the decoded pages")?;
            let page = (at.offset_bytes - extent.at.0) / PAGE_BYTES;
            return self.read_page(extent.space, extent.first_page + page);
        }
        let mut bytes = [0; PAGE_BYTES as usize];
        let file = self.reader.file(at.file);
        let file = file.map_err(|error| error.to_string())?;
        let read = file.read_at(&mut bytes, at.offset_bytes);
        read.map_err(|error| error.to_string())?;
        Ok(self.contents_of(&bytes))
    }

    /// A page of a task as the restorer has it.
    fn read_page(&mut self, space: SpaceId, page: u64) -> Result<Contents, String> {
        let mut bytes = [0; PAGE_BYTES as usize];
        let read = self.reader.read_pages(space, page, &mut bytes);
        read.map_err(|error| error.to_string())?;
        Ok(self.contents_of(&bytes))
    }

    fn contents_of(&mut self, bytes: &[u8]) -> Contents {
        let word = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        self.contents(word)
    }

    fn contents(&mut self, word: u64) -> Contents {
        self.next_frame += 1;
        Contents {
            frame: self.next_frame,
            word,
        }
    }

    fn call(&mut self, call: Sysno, args: [u64; 6], space: &mut Space) -> Result<(), String> {
        let span = || Span::new(Addr(args[0]), args[1]);
        match call {
            Sysno::munmap => space.unmap(span()),
            Sysno::mprotect => space.protect(span(), args[2] as u32)?,
            Sysno::madvise => space.advise(span(), args[2] as u32)?,
            Sysno::mmap => {
                const MAP_FIXED: u32 = linux_raw_sys::general::MAP_FIXED;
                let flags = args[3] as u32 & !MAP_FIXED;
                let file = args[4] as i32;
                space.map(span(), args[2] as u32, 0, |number| match file {
                    -1 => Kind::Anonymous {
                        flags,
                        name: Vec::new(),
                    },
                    _ => Kind::File {
                        description: (file - POOL) as u32,
                        page: args[5] / PAGE_BYTES + number,
                        flags,
                    },
                });
            }
            Sysno::mremap => {
                space.relocate(Span::new(Addr(args[0]), args[1]), args[4] / PAGE_BYTES)?
            }
            Sysno::arch_prctl if args[0] >> 8 == 0x20 => space.map_vdso(args[1] / PAGE_BYTES)?,
            Sysno::prctl if args[0] == 0x5356_4d41 => self.name(args, space)?,
            Sysno::preadv => self.preadv(args, space)?,
            Sysno::process_vm_readv => {
                for at in 0..args[2] {
                    let [page, len, from] =
                        [args[1], args[1] + 8, args[3]].map(|list| self.word(list + 16 * at));
                    assert_eq!(
                        (len, self.word(from)),
                        (PAGE_BYTES, 0),
                        "only zeros are copied"
                    );
                    let contents = self.contents(0);
                    space.write(page / PAGE_BYTES, contents)?;
                }
            }
            Sysno::shmat | Sysno::brk | Sysno::remap_file_pages => {
                return Err("the machine cannot do that".into());
            }
            _ => {}
        }
        Ok(())
    }

    fn name(&self, args: [u64; 6], space: &mut Space) -> Result<(), String> {
        let text = &self.area[(args[4] - AREA) as usize..];
        let text = text.split(|byte| *byte == 0).next().expect("a string");
        for page in space.pages_mut(Span::new(Addr(args[2]), args[3]))? {
            if let Kind::Anonymous { name, .. } = &mut page.kind {
                *name = text.to_vec();
            }
        }
        Ok(())
    }

    fn preadv(&mut self, args: [u64; 6], space: &mut Space) -> Result<(), String> {
        let index = args[0] as i32 - POOL - self.plan.descriptions as i32;
        let mut at = Place {
            file: self.plan.files[index as usize],
            offset_bytes: args[3],
        };
        for piece in 0..args[2] {
            let [start, len] = [0, 8].map(|word| self.word(args[1] + 16 * piece + word));
            for page in start / PAGE_BYTES..(start + len) / PAGE_BYTES {
                let contents = self.read(at)?;
                space.write(page, contents)?;
                at = at.after(PAGE_BYTES);
            }
        }
        Ok(())
    }
}
