//! A task whose memory tests arrange: a Python program that does what it is told.
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::OwnedFd;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use abi::{Addr, PAGE_BYTES, Span};
use image::{Reader, SpaceId};
use memory::scan::Area;
use pages::Extent;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use sys::process::Process;
use sys::uffd::Uffd;

/// The space of all extents here.
pub const SPACE: SpaceId = SpaceId(5);

/// A running child; dropping it kills it.
pub struct Child {
    process: std::process::Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Child {
    pub fn start() -> Self {
        let mut process = Command::new("python3")
            .args(["-c", include_str!("child.py")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let orders = process.stdin.take().expect("it is piped");
        let answers = BufReader::new(process.stdout.take().expect("it is piped")).lines();
        Self {
            process,
            orders,
            answers,
        }
    }

    pub fn process(&self) -> Process {
        Process::new(self.pid())
    }

    pub fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    pub fn pidfd(&self) -> OwnedFd {
        let pid = Pid::from_raw(self.pid()).expect("a pid");
        pidfd_open(pid, PidfdFlags::empty()).expect("it is not waited for yet")
    }

    /// Evaluates an expression in the child.
    #[track_caller]
    pub fn ask(&mut self, expression: &str) -> i64 {
        self.order(expression);
        self.answer()
    }

    /// Has the child evaluate an expression, and does not wait for it.
    pub fn order(&mut self, expression: &str) {
        writeln!(self.orders, "{expression}").expect("the child reads");
    }

    /// Reads the next line that the child prints.
    #[track_caller]
    pub fn answer(&mut self) -> i64 {
        let answer = self.answers.next().expect("an answer").expect("a line");
        answer.parse().unwrap_or_else(|_| panic!("{answer}"))
    }

    /// Maps memory in the child: the arguments of `mmap` in child.py.
    #[track_caller]
    pub fn map(&mut self, arguments: &str, pages: u64) -> Span {
        let start = self.ask(&format!("mmap({arguments})"));
        assert!(start > 0, "mmap: errno {}", -start);
        Span::new(Addr(start as u64), pages * PAGE_BYTES)
    }

    /// Fills pages of `span` with their numbers and a byte.
    #[track_caller]
    pub fn put(&mut self, span: Span, page: u64, byte: u8, pages: u64) {
        self.ask(&format!("put({}, {page}, {byte}, {pages})", span.start.0));
    }

    /// Creates a userfaultfd in the child and fetches it.
    pub fn uffd(&mut self) -> Uffd {
        let fd = self.ask("call('syscall', 323, 0o2004000)");
        assert!(fd > 0, "userfaultfd: errno {}", -fd);
        let fetched = pidfd_getfd(self.pidfd(), fd as i32, PidfdGetfdFlags::empty());
        fetched.expect("the child's descriptor").into()
    }

    /// Reads memory that can be read.
    #[track_caller]
    pub fn read(&self, span: Span) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes() as usize];
        sys::vm::read_exact(&self.process(), span.start, &mut bytes).expect("readable memory");
        bytes
    }

    pub fn kill(&mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The part of `span` from page `page` on.
pub fn part(span: Span, page: u64, pages: u64) -> Span {
    Span::new(span.start.plus(page * PAGE_BYTES), pages * PAGE_BYTES)
}

/// The extent of `span`, its pages numbered as in a task's space.
pub fn extent(span: Span) -> Extent {
    let (at, pages) = (span.start, span.pages());
    Extent {
        space: SPACE,
        first_page: at.page(),
        at,
        pages,
    }
}

/// The pages of `span` as an image has them.
pub fn stored(reader: &Reader, span: Span) -> Vec<u8> {
    let mut bytes = vec![0; span.bytes() as usize];
    let read = reader.read_pages(SPACE, span.start.page(), &mut bytes);
    read.expect("all pages");
    bytes
}

/// `span` as a part of an anonymous mapping.
pub fn anonymous(span: Span) -> Area {
    Area {
        span,
        file: false,
        apart: false,
    }
}
