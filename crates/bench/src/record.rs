//! The kept numbers: every run's, with what was measured, on which machine, by which programs.
use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, file_error};
use crate::machine::Machine;
use crate::workload::{Cache, Medium};

/// All numbers of one suite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Where it was measured.
    pub machine: Machine,
    /// The programs, ours last.
    pub tools: Vec<Program>,
    /// Samples of each program in each cell.
    pub rounds: usize,
    /// One cell a workload, medium and cache.
    pub cells: Vec<Cell>,
}

/// A program that was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its name in the tables.
    pub name: String,
    /// What it says about itself.
    pub version: String,
}

/// The samples of one workload on one medium.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The workload's name.
    pub workload: String,
    /// Where images were put.
    pub medium: Medium,
    /// True if the peer found its cache.
    pub cache: Cache,
    /// The samples of each program, in the order of [`Record::tools`].
    pub series: Vec<Series>,
}

/// The samples of one program in the order in which they were taken; and its system calls.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// From the start of a dump that kills its target until the program ended.
    pub dump_ms: Vec<f64>,
    /// How long the target could not run when it was left running, as it saw itself.
    pub frozen_ms: Vec<f64>,
    /// How long a dump that kills its target planned the restore before; of those that do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub plan_ms: Vec<f64>,
    /// From the start of a detached restore until the program ended.
    pub restore_ms: Vec<f64>,
    /// From the start of a restore until the target looked at the clock.
    pub runs_again_ms: Vec<f64>,
    /// What the image takes on its medium.
    pub image_bytes: Vec<u64>,
    /// The system calls of one dump and one restore, where the kernel lets them be counted.
    pub calls: Option<Calls>,
}

/// System calls by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// Of a dump that kills its target, with those that it lets the target make.
    pub dump: BTreeMap<String, u64>,
    /// Of a detached restore, with those that restored tasks make until it is done.
    pub restore: BTreeMap<String, u64>,
}

impl Record {
    /// Reads kept numbers.
    ///
    /// # Errors
    /// When the file cannot be read or holds something else.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(file_error("read", path))?;
        serde_json::from_slice(&text).map_err(|source| Error::Numbers {
            path: path.to_path_buf(),
            source,
        })
    }

    /// Keeps the numbers.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self).map_err(|source| Error::Numbers {
            path: path.to_path_buf(),
            source,
        })?;
        text.push('\n');
        std::fs::write(path, text).map_err(file_error("write", path))
    }
}

/// Returns the middle of some numbers, or the mean of the two in the middle; nothing of none.
pub fn median(numbers: &[f64]) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_ignores_outliers() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1000.0, 1.0]), Some(3.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 1000.0]), Some(3.0));
    }
}
