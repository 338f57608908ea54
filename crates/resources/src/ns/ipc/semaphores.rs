//! Sets of semaphores.

use sys::sem;

use super::object::{Object, ObjectKind, Row};
use crate::task::PartState;
use crate::task::semaphores::{VALUE_MAX, ValueAdjustment, adjustments_of};
use crate::{Error, Result};

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
    ObjectKind::SemaphoreSet
        .list()?
        .into_iter()
        .map(read)
        .collect()
}

impl SemaphoreSet {
    pub fn is_sound(&self) -> bool {
        let is_value = |value: &u32| i64::from(*value) <= VALUE_MAX;
        self.object.is_sound() && !self.values.is_empty() && self.values.iter().all(is_value)
    }

    /// The values that they have once the kernel has made these `adjustments`.
    fn adjusted(&self, adjustments: &[ValueAdjustment]) -> Option<Vec<u16>> {
        let values = self.values.iter().map(|value| i64::from(*value));
        let mut values = values.collect::<Vec<_>>();
        let own = adjustments.iter();
        for one in own.filter(|one| one.set == self.object.id) {
            *values.get_mut(one.semaphore)? += one.value;
        }
        let is_value = |value: &i64| (0..=VALUE_MAX).contains(value);
        let are_values = values.iter().all(is_value);
        are_values.then(|| values.into_iter().map(|value| value as u16).collect())
    }

    /// Makes it, for processes with these `parts`, which take back what the kernel has adjusted.
    pub fn restore(&self, parts: &[&dyn PartState]) -> Result<()> {
        let object = &self.object;
        let values = self.adjusted(&adjustments_of(parts));
        let values = values.ok_or_else(|| {
            let what = "adjustments of semaphores that it has not, or beyond their values";
            Error::corrupt(format!("System V semaphores {}", object.id), what)
        })?;
        let count = i32::try_from(values.len()).unwrap_or(i32::MAX);
        let make = || sem::create(object.key, count, object.mode);
        let fill = || {
            sem::set_values(object.id, &values)?;
            sem::give(object.id, object.uid, object.gid, object.mode)
        };
        ObjectKind::SemaphoreSet.restore(object, make, fill)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_adjusted_within_their_range() {
        let set = SemaphoreSet {
            object: Object {
                id: 3,
                ..Object::default()
            },
            values: vec![5, 0],
        };
        let one = |set, semaphore, value| ValueAdjustment {
            set,
            semaphore,
            value,
        };
        let back = |all: &[ValueAdjustment]| set.adjusted(all);
        assert_eq!(back(&[]), Some(vec![5, 0]));
        assert_eq!(
            back(&[one(3, 1, 2), one(4, 0, 9), one(3, 1, 1)]),
            Some(vec![5, 3])
        );
        assert_eq!(back(&[one(3, 0, -6)]), None);
        assert_eq!(back(&[one(3, 2, 1)]), None);
        assert_eq!(back(&[one(3, 0, 32_762)]), Some(vec![32_767, 0]));
        assert_eq!(back(&[one(3, 0, 32_763)]), None);
    }
}
