//! A part of a task's state in an image as one value: the part, and its record, decoded and checked
//! once.
//!
//! A [`Part`] knows the type of its records; lists of parts and those who drive them do not.

use std::any::Any;
use std::fmt;

use prost::Message as _;

use super::{Asked, Facts, Holder, Part, Planned, Scope, ThreadPlan};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// A [`Part`] without the type of its records, as a list has it.
pub trait ErasedPart: Sync {
    /// See [`Part::tag`].
    fn tag(&self) -> u16;
    /// See [`Part::name`].
    fn name(&self) -> &'static str;
    /// See [`Part::scope`].
    fn scope(&self) -> Scope;
    /// See [`Part::holder`].
    fn holder(&self) -> Holder;
    /// See [`Part::ask`].
    ///
    /// # Errors
    /// Those of [`Part::ask`].
    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked>;
    /// The payload of what [`Part::dump`] gives.
    ///
    /// # Errors
    /// Those of [`Part::dump`].
    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Vec<u8>>>;
    /// Decodes what an image says of thread `tid`, and checks it ([`Part::check`]).
    ///
    /// # Errors
    /// [`Error::Corrupt`], with the part's name and `tid`.
    fn decode(&'static self, tid: i32, payload: &[u8]) -> Result<Box<dyn PartState>>;
    /// See [`Part::plan`]. `state` is of this part.
    ///
    /// # Errors
    /// Those of [`Part::plan`].
    fn plan(
        &self,
        state: Option<&dyn PartState>,
        who: Planned<'_>,
        plan: &mut ThreadPlan,
    ) -> Result<()>;
}

impl<P: Part> ErasedPart for P {
    fn tag(&self) -> u16 {
        Part::tag(self)
    }

    fn name(&self) -> &'static str {
        Part::name(self)
    }

    fn scope(&self) -> Scope {
        Part::scope(self)
    }

    fn holder(&self) -> Holder {
        Part::holder(self)
    }

    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        Part::ask(self, facts, questions)
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Vec<u8>>> {
        let record = Part::dump(self, facts, asked, answers)?;
        Ok(record.map(|record| record.encode_to_vec()))
    }

    fn decode(&'static self, tid: i32, payload: &[u8]) -> Result<Box<dyn PartState>> {
        let place = |what| Error::corrupt(format!("task {tid} {}", Part::name(self)), what);
        let record = image::strict::decode(payload).map_err(place)?;
        self.check(&record).map_err(|error| match error {
            Error::Corrupt { what, .. } => place(what),
            error => error,
        })?;
        Ok(Box::new(Decoded { part: self, record }))
    }

    fn plan(
        &self,
        state: Option<&dyn PartState>,
        who: Planned<'_>,
        plan: &mut ThreadPlan,
    ) -> Result<()> {
        let record = state.map(|state| state.record::<P>().expect("it is of this part"));
        Part::plan(self, record, who, plan)
    }
}

/// The record of a part of a thread, together with its [`Part`].
pub trait PartState: Any + Send + Sync {
    /// See [`Part::tag`].
    fn tag(&self) -> u16;
    /// See [`Part::name`].
    fn name(&self) -> &'static str;
    /// See [`Part::describe`].
    fn describe(&self) -> String;
}

impl dyn PartState {
    /// Its record, if it is of the part `P`.
    #[must_use]
    pub fn record<P: Part>(&self) -> Option<&P::Record> {
        let decoded = (self as &dyn Any).downcast_ref::<Decoded<P>>();
        decoded.map(|decoded| &decoded.record)
    }
}

impl fmt::Debug for dyn PartState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.describe())
    }
}

/// A record that was decoded and checked.
struct Decoded<P: Part> {
    part: &'static P,
    record: P::Record,
}

impl<P: Part> PartState for Decoded<P> {
    fn tag(&self) -> u16 {
        Part::tag(self.part)
    }

    fn name(&self) -> &'static str {
        Part::name(self.part)
    }

    fn describe(&self) -> String {
        Part::describe(self.part, &self.record)
    }
}
