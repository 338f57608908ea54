//! Sets of semaphores.

use sys::sem;

use super::object::{File, Object, Row};
use crate::task::PartState;
use crate::task::semaphores::{Debt, debts};
use crate::{Error, Result};

/// The highest value of a semaphore (`SEMVMX`).
const VALUE_MAX: u32 = 32_767;

/// A set.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SemaphoreSet {
    #[prost(message, required, tag = "1")]
    object: Object,
    /// The values of its semaphores.
    #[prost(uint32, repeated, tag = "2")]
    values: Vec<u32>,
}

pub(super) fn read() -> Result<Vec<SemaphoreSet>> {
    let read = |row: Row| {
        let id = row.object.id;
        let count = usize::try_from(row.size).unwrap_or_default();
        let values = sem::values(id, count);
        let doing = || format!("cannot read System V semaphores {id}");
        let values = values.map_err(|error| Error::kernel(doing(), error))?;
        Ok(SemaphoreSet {
            object: row.object,
            values: values.into_iter().map(u32::from).collect(),
        })
    };
    File::Semaphores.list()?.into_iter().map(read).collect()
}

impl SemaphoreSet {
    pub fn is_sound(&self) -> bool {
        let is_value = |value: &u32| *value <= VALUE_MAX;
        self.object.is_sound() && !self.values.is_empty() && self.values.iter().all(is_value)
    }

    /// The values that they have while the processes with `debts` are away.
    fn given_back(&self, debts: &[Debt]) -> Option<Vec<u16>> {
        let values = self.values.iter().map(|value| i64::from(*value));
        let mut values = values.collect::<Vec<_>>();
        for debt in debts.iter().filter(|debt| debt.set == self.object.id) {
            *values.get_mut(debt.semaphore)? += debt.value;
        }
        let is_value = |value: i64| {
            u16::try_from(value)
                .ok()
                .filter(|it| *it <= VALUE_MAX as u16)
        };
        values.into_iter().map(is_value).collect()
    }

    /// Makes it, for processes with these `parts`.
    pub fn restore(&self, parts: &[&dyn PartState]) -> Result<()> {
        let Object {
            id,
            key,
            mode,
            uid,
            gid,
            ..
        } = self.object;
        let doing = || format!("cannot make System V semaphores {id}");
        let values = self.given_back(&debts(parts));
        let values = values.ok_or_else(|| {
            let what = "what is undone to semaphores, which are fewer or have less";
            Error::corrupt(format!("System V semaphores {id}"), what)
        })?;
        let count = i32::try_from(values.len()).unwrap_or(i32::MAX);
        let made = File::Semaphores.create(&self.object, || sem::create(key, count, mode));
        let made = made.and_then(|()| {
            sem::set_values(id, &values)?;
            sem::give(id, uid, gid, mode)
        });
        made.map_err(|error| Error::kernel(doing(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_without_who_borrowed() {
        let set = SemaphoreSet {
            object: Object {
                id: 3,
                ..Object::default()
            },
            values: vec![5, 0],
        };
        let debt = |set, semaphore, value| Debt {
            set,
            semaphore,
            value,
        };
        let back = |debts: &[Debt]| set.given_back(debts);
        assert_eq!(back(&[]), Some(vec![5, 0]));
        assert_eq!(
            back(&[debt(3, 1, 2), debt(4, 0, 9), debt(3, 1, 1)]),
            Some(vec![5, 3])
        );
        assert_eq!(back(&[debt(3, 0, -6)]), None);
        assert_eq!(back(&[debt(3, 2, 1)]), None);
        assert_eq!(back(&[debt(3, 0, 32_762)]), Some(vec![32_767, 0]));
        assert_eq!(back(&[debt(3, 0, 32_763)]), None);
    }
}
