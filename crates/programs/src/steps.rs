//! Programs that write a line `NUMBER VALUE` to the file `steps` for each thing that they did, and
//! end when there is a file `stop`: every line must be that of an undisturbed run.
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, WaitOptions};
use testkit::program::{Program, Spawned};
use testkit::wait;

use crate::Work;
use crate::error::{Result, failure, file_error};

/// How long the undisturbed run, or the last step, may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// How a program is started that works in steps.
#[derive(Clone, Copy)]
pub struct Recipe {
    /// The files that it finds in its folder.
    pub files: &'static [(&'static str, &'static str)],
    /// The command line.
    pub command: &'static [&'static str],
    /// Every step has the same value.
    pub alike: bool,
    /// It knows nothing of the file `stop`, and is killed in the end.
    pub endless: bool,
}

/// A program that works in steps.
pub struct Steps {
    recipe: Recipe,
    folder: PathBuf,
    spawned: Spawned,
    rewound: usize,
}

impl Recipe {
    /// A program whose steps are all different.
    pub const fn new(
        files: &'static [(&'static str, &'static str)],
        command: &'static [&'static str],
    ) -> Self {
        Self {
            files,
            command,
            alike: false,
            endless: false,
        }
    }

    /// One that does the same over and over.
    pub const fn repeated(
        files: &'static [(&'static str, &'static str)],
        command: &'static [&'static str],
    ) -> Self {
        Self {
            alike: true,
            ..Self::new(files, command)
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// When its files cannot be written.
    pub fn start(self, folder: &Path) -> Result<Box<dyn Work>> {
        let steps = Steps::start(self, folder)?;
        Ok(Box::new(steps))
    }
}

impl Steps {
    /// Starts a program in `folder`.
    ///
    /// # Errors
    /// When its files cannot be written.
    pub fn start(recipe: Recipe, folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(file_error("make", folder))?;
        for (name, text) in recipe.files {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(file_error("write", &path))?;
        }
        let spawned = Program::new(recipe.command[0])
            .args(&recipe.command[1..])
            .env("HOME", folder)
            .folder(folder)
            .output(&folder.join("log"))
            .spawn();
        Ok(Self {
            recipe,
            folder: folder.to_owned(),
            spawned,
            rewound: 0,
        })
    }

    /// Lets it end by itself, with success.
    fn end(&self) -> Result<()> {
        if self.recipe.endless {
            self.spawned.kill();
            return Ok(());
        }
        let stop = self.folder.join("stop");
        std::fs::write(&stop, "").map_err(file_error("write", &stop))?;
        let pid = i32::try_from(self.spawned.pid())
            .ok()
            .and_then(Pid::from_raw);
        let ended = wait::try_wait_for(PATIENCE, || {
            rustix::process::waitpid(pid, WaitOptions::NOHANG)
                .ok()
                .flatten()
        });
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        match ended {
            Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
            Some((_, status)) => Err(failure(format!("it ended with {status:?}: {log}"))),
            None => Err(failure(format!("it does not end: {log}"))),
        }
    }

    /// The steps of an undisturbed run, at least `count` of them.
    fn undisturbed(&self, count: usize) -> Result<Vec<String>> {
        let count = if self.recipe.alike { 1 } else { count };
        let folder = self.folder.with_file_name("undisturbed");
        let reference = Self::start(self.recipe, &folder)?;
        let ran = wait::try_wait_for(PATIENCE, || {
            let ended = !reference.spawned.is_alive();
            let done = lines(&folder).map_or(0, |lines| lines.len());
            (ended || done >= count).then_some(())
        });
        if ran.is_none() {
            return Err(failure("the undisturbed run is slower than the other"));
        }
        reference.end()?;
        lines(&folder)
    }
}

impl Work for Steps {
    fn spawned(&self) -> &Spawned {
        &self.spawned
    }

    fn progress(&mut self) -> Result<u64> {
        Ok(lines(&self.folder)?.len() as u64)
    }

    fn rewound(&mut self) {
        self.rewound += 1;
    }

    fn finish(&mut self) -> Result<()> {
        self.end()?;
        let done = lines(&self.folder)?;
        let reference = self.undisturbed(highest(&done))?;
        let mut again = 0;
        compare(&done, &reference, self.recipe.alike, &mut again)?;
        if again > self.rewound {
            let rewound = self.rewound;
            return Err(failure(format!(
                "it went back {again} times, not {rewound}"
            )));
        }
        Ok(())
    }
}

/// The whole lines that were written.
fn lines(folder: &Path) -> Result<Vec<String>> {
    let path = folder.join("steps");
    let bytes = match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        read => read.map_err(file_error("read", &path))?,
    };
    let text = String::from_utf8_lossy(&bytes);
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    Ok(whole
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect())
}

/// The number that a line begins with.
fn number(line: &str) -> Option<usize> {
    line.split(' ').next()?.parse().ok()
}

fn highest(lines: &[String]) -> usize {
    lines
        .iter()
        .filter_map(|line| number(line))
        .max()
        .unwrap_or(0)
}

/// Insists that the lines are those of an undisturbed run, one after the other, and counts how
/// often steps were done again: by what was restored from a live image, older than the last of
/// them.
fn compare(done: &[String], reference: &[String], alike: bool, again: &mut usize) -> Result<()> {
    let mut last = 0;
    for line in done {
        let Some(number) = number(line).filter(|&number| number > 0 && number <= last + 1) else {
            return Err(failure(format!("step {line:?} after step {last}")));
        };
        *again += usize::from(number <= last);
        last = number;
        let (_, value) = line.split_once(' ').unwrap_or_default();
        let wanted = reference.get(if alike { 0 } else { number - 1 });
        let wanted = wanted
            .and_then(|line| line.split_once(' '))
            .unwrap_or_default()
            .1;
        if value != wanted || value.is_empty() {
            let what = format!("step {number} is {value:?}, and {wanted:?} undisturbed");
            return Err(failure(what));
        }
    }
    if done.is_empty() {
        return Err(failure("it has done nothing"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(text: &str) -> Vec<String> {
        text.split(';').map(str::to_owned).collect()
    }

    #[test]
    fn steps_are_those_of_an_undisturbed_run() {
        let reference = steps("1 a;2 b;3 c;4 d");
        let again = |text: &str, alike| {
            let mut again = 0;
            let compared = compare(&steps(text), &reference, alike, &mut again);
            compared.ok().map(|()| again)
        };
        assert_eq!(again("1 a;2 b;3 c", false), Some(0));
        assert_eq!(again("1 a;2 b;2 b;3 c;1 a", false), Some(2));
        for wrong in [
            "1 a;3 c",
            "1 a;2 c",
            "1 a;2",
            "2 b",
            "",
            "1 a;2 b;3 c;4 d;5 e",
        ] {
            assert_eq!(again(wrong, false), None, "{wrong}");
        }
        assert_eq!(again("1 a;2 a;3 a", true), Some(0));
        assert_eq!(again("1 a;2 b", true), None);
    }
}
