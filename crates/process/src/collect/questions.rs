//! What a thread is asked: the batch of calls that it makes for a dump.

use abi::{Addr, Span};
use image::Record;
use resources::script::{Answers, Layout, Script};
use resources::task::{Asked, ErasedPart, PARTS, Scope};
use tracee::{Batch, Outcome};

use super::facts::ThreadFacts;
use crate::obstacles::Obstacles;
use crate::records::{Node, TaskId, record};
use crate::{Error, Result};

/// The questions for one thread.
pub(super) struct Questions {
    pub script: Script,
    asked: Vec<(&'static dyn ErasedPart, Asked)>,
}

impl Questions {
    /// Those about what the process `node` has as its own, or first.
    pub fn new(facts: &ThreadFacts<'_>, node: &Node) -> Result<Self> {
        let mut questions = Self {
            script: Script::default(),
            asked: Vec::new(),
        };
        let speaks = facts.speaks_for_all();
        for part in PARTS
            .iter()
            .filter(|part| speaks || part.scope() == Scope::Thread)
            .filter(|part| node.has_own(**part))
        {
            let asked = part.ask(facts, &mut questions.script)?;
            questions.asked.push((*part, asked));
        }
        Ok(questions)
    }

    pub fn answers(&self, tid: i32, outcome: Outcome) -> Result<Answers> {
        if let Some(failed) = outcome.failed {
            let call = self.script.line(failed).to_string();
            let errno = i32::try_from(-outcome.results[failed]).unwrap_or(0);
            let source = std::io::Error::from_raw_os_error(errno);
            return Err(Error::Call {
                pid: tid,
                call,
                source,
            });
        }
        Ok(Answers {
            results: outcome.results,
            data: outcome.data,
        })
    }

    /// Adds the records of thread `id`, of process `process`.
    pub fn records(
        &self,
        (facts, id, process): (&ThreadFacts<'_>, TaskId, TaskId),
        answers: &Answers,
        (records, obstacles): (&mut Vec<Record>, &mut Obstacles),
    ) -> Result<()> {
        for (part, asked) in &self.asked {
            let payload = obstacles.note(part.dump(facts, asked, answers))?;
            if let Some(payload) = payload.flatten() {
                let id = match part.scope() {
                    Scope::Process => process,
                    Scope::Thread => id,
                };
                records.push(record(part.tag(), id.get(), payload));
            }
        }
        Ok(())
    }
}

/// Calls of which nothing is asked.
pub(super) struct Calls<'a>(pub &'a Script);

impl Batch for Calls<'_> {
    fn ops_bytes(&self) -> usize {
        self.0.ops_bytes()
    }

    fn data_bytes(&self) -> usize {
        self.0.data_bytes()
    }

    fn compile(&self, ops: Addr, data: Addr) -> (Vec<u8>, Vec<u8>) {
        compile(self.0, ops, data)
    }
}

impl Batch for Questions {
    fn ops_bytes(&self) -> usize {
        self.script.ops_bytes()
    }

    fn data_bytes(&self) -> usize {
        self.script.data_bytes()
    }

    fn compile(&self, ops: Addr, data: Addr) -> (Vec<u8>, Vec<u8>) {
        compile(&self.script, ops, data)
    }
}

/// Compiles what refers to nothing but its own data.
fn compile(script: &Script, ops: Addr, data: Addr) -> (Vec<u8>, Vec<u8>) {
    let area = Span::default();
    let layout = Layout {
        ops,
        data,
        words: Addr(0),
        pool: &[],
        scripts: &[],
        area,
        top: Addr(0),
    };
    script.compile(&layout)
}
