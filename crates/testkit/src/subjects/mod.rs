//! Short programs, each in a state of interest, one a file.
//!
//! A subject gets into its state, says [`Control::ready`], and then answers questions until it is
//! killed. Its file says which questions it understands.
mod aio;
mod around;
mod bpf_maps;
mod busy;
mod changing_equal_pages;
mod churn;
mod clock;
mod cow_memory;
mod creds;
mod deadlines;
mod deny_write_exec;
mod direct_reads;
mod equal_pages;
mod fds;
mod filters;
mod hostile;
mod huge_pages;
mod interrupted;
mod itimers;
mod message_queues;
mod mmaps;
mod monitor;
mod moving;
mod namespaces;
mod one_memory;
mod patchwork;
mod pending_signals;
mod perf_events;
mod posix_timers;
mod rare_sockets;
mod refused;
mod requests;
mod rings;
mod rlimits;
mod sessions;
mod sharing;
mod short_waits;
mod sigaltstack;
mod stopped;
mod storm;
mod successor;
mod task_files;
mod thread_timers;
mod threads_epoll;
mod told_queues;
mod traps;
mod tree;
mod tunnel;
mod writers;
mod zombies;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// What ends a subject: it is reported and the subject exits.
pub type Failure = Box<dyn std::error::Error>;

type Run = fn(Control, &[String]) -> Result<(), Failure>;

/// Every subject by name.
const ALL: &[(&str, Run)] = &[
    ("aio", aio::run),
    ("around", around::run),
    ("bpf-maps", bpf_maps::run),
    ("busy", busy::run),
    ("changing-equal-pages", changing_equal_pages::run),
    ("churn", churn::run),
    ("clock", clock::run),
    ("cow-memory", cow_memory::run),
    ("creds", creds::run),
    ("deadlines", deadlines::run),
    ("deny-write-exec", deny_write_exec::run),
    ("direct-reads", direct_reads::run),
    ("equal-pages", equal_pages::run),
    ("fds", fds::run),
    ("filters", filters::run),
    ("hostile", hostile::run),
    ("huge-pages", huge_pages::run),
    ("interrupted", interrupted::run),
    ("itimers", itimers::run),
    ("message-queues", message_queues::run),
    ("mmaps", mmaps::run),
    ("monitor", monitor::run),
    ("moving", moving::run),
    ("namespaces", namespaces::run),
    ("one-memory", one_memory::run),
    ("patchwork", patchwork::run),
    ("pending-signals", pending_signals::run),
    ("perf-events", perf_events::run),
    ("posix-timers", posix_timers::run),
    ("rare-sockets", rare_sockets::run),
    ("refused", refused::run),
    ("requests", requests::run),
    ("rings", rings::run),
    ("rlimits", rlimits::run),
    ("sessions", sessions::run),
    ("sharing", sharing::run),
    ("short-waits", short_waits::run),
    ("sigaltstack", sigaltstack::run),
    ("stopped", stopped::run),
    ("storm", storm::run),
    ("successor", successor::run),
    ("task-files", task_files::run),
    ("thread-timers", thread_timers::run),
    ("threads-epoll", threads_epoll::run),
    ("told-queues", told_queues::run),
    ("traps", traps::run),
    ("tree", tree::run),
    ("tunnel", tunnel::run),
    ("writers", writers::run),
    ("zombies", zombies::run),
];

/// The word in front of a subject's name that has it run in a process without a leader.
pub const WITHOUT_LEADER: &str = "without-leader";

/// What the leader of such a process ends with.
pub const LEADERS_STATUS: i32 = 7;

/// Runs the subject that the arguments name: name, folder, its own arguments. After
/// [`WITHOUT_LEADER`] it runs in another thread than the first one, which ends.
///
/// # Errors
/// When there is no such subject, or it cannot get into its state or fails on the way.
pub fn run(arguments: &[String]) -> Result<(), Failure> {
    if let [first, rest @ ..] = arguments
        && first == WITHOUT_LEADER
    {
        let rest = rest.to_vec();
        std::thread::Builder::new().spawn(move || {
            let ended = run(&rest).err().map(|error| error.to_string());
            eprintln!("subject {rest:?}: {ended:?}");
            std::process::exit(1);
        })?;
        crate::calls::end_thread(LEADERS_STATUS);
    }
    let [name, folder, own @ ..] = arguments else {
        return Err("usage: subject NAME FOLDER [ARGUMENT…]".into());
    };
    let (_, run) = ALL
        .iter()
        .find(|(known, _)| known == name)
        .ok_or_else(|| format!("no subject is called {name}"))?;
    run(Control::open(Path::new(folder))?, own)
}

/// The subject's end of the conversation with the test.
pub struct Control {
    folder: PathBuf,
    questions: BufReader<File>,
}

/// One question; to be answered.
pub struct Question {
    number: String,
    /// What is asked.
    pub verb: String,
    /// Further words.
    pub words: Vec<String>,
}

impl Control {
    fn open(folder: &Path) -> io::Result<Self> {
        // For writing too, so that there is never an end of file between two questions.
        let fifo = File::options()
            .read(true)
            .write(true)
            .open(folder.join("control"))?;
        Ok(Self {
            folder: folder.to_owned(),
            questions: BufReader::new(fifo),
        })
    }

    /// The folder of the test for this subject.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Says that the state is reached.
    fn ready(&self) -> io::Result<()> {
        self.write_whole("ready", "")
    }

    /// Waits for the next question.
    fn next(&mut self) -> io::Result<Question> {
        let mut line = String::new();
        self.questions.read_line(&mut line)?;
        let mut words = line.split_ascii_whitespace().map(str::to_owned);
        Ok(Question {
            number: words.next().unwrap_or_default(),
            verb: words.next().unwrap_or_default(),
            words: words.collect(),
        })
    }

    /// Lets [`Control::poll`] return at once; for subjects that are busy.
    fn do_not_wait(&self) -> io::Result<()> {
        let fifo = self.questions.get_ref();
        rustix::fs::fcntl_setfl(fifo, OFlags::RDWR | OFlags::NONBLOCK)?;
        Ok(())
    }

    /// Takes a question where one waits already.
    fn poll(&mut self) -> io::Result<Option<Question>> {
        match self.next() {
            Ok(question) => Ok(Some(question)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Answers `question`.
    fn answer(&self, question: &Question, answer: impl ToString) -> io::Result<()> {
        self.write_whole(&format!("answer-{}", question.number), &answer.to_string())
    }

    /// Answers every question with what `respond` makes of it, for ever.
    pub(crate) fn serve(
        mut self,
        mut respond: impl FnMut(&Question) -> Result<String, Failure>,
    ) -> Result<(), Failure> {
        self.ready()?;
        loop {
            let question = self.next()?;
            let answer = respond(&question)?;
            self.answer(&question, answer)?;
        }
    }

    /// Writes a file that is whole as soon as it is there.
    fn write_whole(&self, name: &str, text: &str) -> io::Result<()> {
        let draft = self.folder.join(format!("{name}.draft"));
        fs::write(&draft, text)?;
        fs::rename(draft, self.folder.join(name))
    }
}

/// The failure of a subject that is asked what it does not understand.
pub(crate) fn not_understood<T>(question: &Question) -> Result<T, Failure> {
    Err(format!("{:?} is not a question for this subject", question.verb).into())
}

/// The argument at `index` as a number, or `default`.
fn number(arguments: &[String], index: usize, default: u64) -> Result<u64, Failure> {
    match arguments.get(index) {
        Some(text) => Ok(text.parse()?),
        None => Ok(default),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_on_the_list() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/subjects");
        let mut files: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter_map(|name| Some(name.strip_suffix(".rs")?.replace('_', "-")))
            .filter(|name| name != "mod")
            .collect();
        files.sort();
        let listed: Vec<&str> = ALL.iter().map(|(name, _)| *name).collect();
        assert_eq!(files, listed);
    }

    #[test]
    fn subjects_that_wait_do_not_change() {
        crate::needs_root!();
        let waiting: &[(&str, &[&str])] = &[
            ("creds", &[]),
            ("fds", &[]),
            ("mmaps", &[]),
            ("patchwork", &["1"]),
            ("pending-signals", &[]),
            ("rlimits", &[]),
            ("sessions", &[]),
            ("sigaltstack", &[]),
            ("stopped", &[]),
            ("tree", &["7", "still"]),
            ("zombies", &[]),
        ];
        for (name, arguments) in waiting {
            let subject = crate::subject::Subject::start(name, arguments);
            crate::wait::wait_until("the subject to wait", crate::wait::SOON, || {
                subject.is_waiting()
            });
            let first = crate::facts::Facts::still(subject.pid());
            let second = crate::facts::Facts::still(subject.pid());
            assert_eq!(first.diff(&second), Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn subjects_check_themselves() {
        crate::needs_root!();
        for (name, arguments) in [
            ("busy", &["1"][..]),
            ("churn", &["2", "64"]),
            ("fds", &[]),
            ("mmaps", &[]),
            ("patchwork", &["1"]),
            ("requests", &[]),
            ("rings", &[]),
            ("threads-epoll", &[]),
            ("tree", &["7"]),
        ] {
            let subject = crate::subject::Subject::start(name, arguments);
            for _ in 0..3 {
                assert_eq!(subject.ask("check"), "right", "{name}");
            }
        }
    }

    #[test]
    fn questions_are_answered() {
        let subject = crate::subject::Subject::start("busy", &[]);
        let first = subject.ask_number("count");
        crate::wait::wait_until("the counter to advance", crate::wait::SOON, || {
            subject.ask_number("count") > first
        });
        assert!(subject.try_ask("nonsense").is_err());
    }
}
