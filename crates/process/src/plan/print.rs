//! A plan as text: who is made, what is opened for them, and every call of every script.

use std::fmt::{self, Write as _};

use image::Reader;
use resources::map::layout::DECODED_FILE;
use resources::script::Legend;

use super::{Plan, word};
use crate::Result;
use crate::describe::Descriptions;
use crate::records::{Saved, SavedThread};
use crate::text::printable;

/// The names of the words that all scripts share, by number.
const WORDS: [&str; word::FREE as usize] = ["FORKED", "GROUPED", "ALONE", "READY", "GO"];

/// Writes `plan`, the plan of `saved`, down for people.
///
/// # Errors
/// A record that does not make sense.
pub(crate) fn print(plan: &Plan, saved: &Saved<'_>, reader: &Reader) -> Result<String> {
    let descriptions = Descriptions::read(saved)?;
    let mut names = Vec::with_capacity(saved.tasks.len());
    for thread in saved.tasks.iter().flat_map(|task| &task.threads) {
        names.push((thread.tid, name(thread)));
    }
    for task in saved.tasks.iter().filter(|task| task.threads.is_empty()) {
        let name = String::from_utf8_lossy(&task.node.name);
        names.push((task.node.pid, name.into_owned()));
    }
    let mut pool = descriptions.files();
    let first_group = pool.len();
    let groups = plan.groups.iter();
    pool.extend(groups.map(|join| format!("control group {}", join.shown())));
    pool.extend(plan.restorer().map(|_| "pidfd of the restorer".to_owned()));
    let portions = 0..plan.portions.count;
    pool.extend(portions.map(|portion| format!("pidfd of the holder of portion {portion}")));
    let first_pages = pool.len();
    pool.extend(plan.files.iter().map(|file| match *file {
        DECODED_FILE => "decoded".to_owned(),
        file => reader.file_name(file),
    }));
    let printed = Printed {
        plan,
        names: &names,
        lines: descriptions.lines(),
        first_group,
        first_pages,
        pool: &pool,
    };
    Ok(printed.to_string())
}

/// The name of a thread, as in /proc/TID/comm.
fn name(thread: &SavedThread) -> String {
    let part = thread.parts.iter().find(|part| part.name() == "name");
    part.map_or_else(String::new, |part| part.describe())
}

struct Printed<'a> {
    plan: &'a Plan,
    /// The threads' names.
    names: &'a [(i32, String)],
    /// What the pool begins with, in full.
    lines: Vec<String>,
    first_group: usize,
    first_pages: usize,
    /// What is in the pool, in short.
    pool: &'a [String],
}

impl Printed<'_> {
    fn title(&self, f: &mut fmt::Formatter<'_>, index: usize) -> fmt::Result {
        let planned = &self.plan.scripts[index];
        write!(f, "script[{index}] {} {}", planned.role, planned.tid)?;
        let name = self.names.iter().find(|name| name.0 == planned.tid);
        match name {
            Some((_, name)) if !name.is_empty() => write!(f, " ({})", printable(name)),
            _ => Ok(()),
        }
    }

    fn write_pool(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nthe restorer opens, and every task inherits")?;
        for (id, line) in self.lines.iter().enumerate() {
            writeln!(f, "  pool[{id}] {}", printable(line))?;
        }
        for (id, name) in self.pool.iter().enumerate().skip(self.first_group) {
            if id < self.first_pages {
                writeln!(f, "  pool[{id}] {}", printable(name))?;
            } else {
                writeln!(f, "  pool[{id}] {name}, pages of the image")?;
            }
        }
        Ok(())
    }

    fn write_outside(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.plan;
        if plan.outside.is_empty() && plan.writes.is_empty() && plan.thread_groups.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nthe restorer does from outside")?;
        for outside in &plan.outside {
            let pages = outside.stored.iter().map(|stored| stored.span.pages());
            let (pid, pages) = (outside.pid, pages.sum::<u64>());
            writeln!(f, "  fill {pages} pages of {pid} through its userfaultfd")?;
        }
        for (tid, join) in &plan.thread_groups {
            let group = join.shown();
            writeln!(
                f,
                "  put thread {tid} into control group {}",
                printable(&group)
            )?;
        }
        for (tid, written) in &plan.writes {
            let text = written.text.escape_debug();
            writeln!(f, "  write \"{text}\" into /proc/{tid}/{}", written.file)?;
        }
        Ok(())
    }
}

impl fmt::Display for Printed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tasks and threads")?;
        for index in 0..self.plan.scripts.len() {
            f.write_str("  ")?;
            self.title(f, index)?;
            f.write_char('\n')?;
        }
        self.write_pool(f)?;
        self.write_outside(f)?;
        let pool = self.pool.iter().map(|name| printable(name));
        let pool = pool.collect::<Vec<_>>();
        let legend = Legend {
            pool: &pool,
            words: &WORDS,
        };
        for (index, planned) in self.plan.scripts.iter().enumerate() {
            f.write_char('\n')?;
            self.title(f, index)?;
            f.write_char('\n')?;
            for line in planned.script.lines(legend) {
                writeln!(f, "  {line}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Setting, plan};
    use super::*;
    use crate::sample;

    #[test]
    fn a_plan_reads_like_a_trace() {
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let saved = Saved::read(&reader).expect("right records");
        let plan = plan(&reader, &saved, &Setting::default()).expect("it can be planned");
        let text = print(&plan, &saved, &reader).expect("it can be printed");
        let text = text.replace(&reader.id().to_string(), "ID");
        let mut parts = text.split("\n\n").collect::<Vec<_>>();
        // The ordinary tasks' scripts are for the tests of what they are made of.
        let scripts = parts.split_off(2);
        parts.push(scripts[2]);
        insta::assert_snapshot!(parts.join("\n\n"), @r#"
        tasks and threads
          script[0] task 100 (t100)
          script[1] task 102 (t102)
          script[2] zombie 103 (gone)
          script[3] thread 101 (t101)

        the restorer opens, and every task inherits
          pool[0] regular /usr/bin/true pos=0 flags=0o0
          pool[1] directory /srv pos=0
          pool[2] regular /srv/a pos=0 flags=0o2
          pool[3] eventfd count=3
          pool[4] decoded, pages of the image

        script[2] zombie 103 (gone)
          prctl(PR_SET_PDEATHSIG, signal=KILL)
          getppid() = 100  # the parent lives
          prctl(PR_SET_NAME, name="gone")
          futex(addr=&FORKED, FUTEX_WAKE_OP, count=2147483647, count2=0, addr2=&FORKED, op=0x10001000)
          await(&FORKED >= 3)
          setpgid(pid=0, group=100)
          futex(addr=&GROUPED, FUTEX_WAKE_OP, count=2147483647, count2=0, addr2=&GROUPED, op=0x10001000)
          await(&GROUPED >= 3)
          prctl(PR_SET_DUMPABLE, value=0)
          rt_sigprocmask(how=1, set=[KILL], old=0, set_size=8)
          kill(pid=103, signal=KILL)
          exit_group(status=0)
        "#);
        let root = scripts[0].lines().map(str::trim).collect::<Vec<_>>();
        for line in [
            "script[0] task 100 (t100)",
            "munmap(addr=0, len=AREA)",
            "clone3(args={flags=0, exit_signal=CHILD, set_tid=102}, size=88) -> script[1]  \
             # task 102",
            "madvise(addr=0x700000, len=16384, advice=14)",
            "fchdir(fd=pool[1]</srv>)  # working directory",
            "dup3(old=pool[3]<eventfd count=3>, new=5, flags=CLOEXEC) = 5",
            "await(&GO >= 1)",
        ] {
            assert!(root.contains(&line), "{line}: {text}");
        }
    }
}
