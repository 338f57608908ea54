//! Threads that do nothing but change and tell what each has of its own.
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use crate::samples::Sample;

use super::told::of_thread;

/// The size of a helper's stack.
const STACK_BYTES: usize = 256 << 10;

/// A thread that was started.
pub(super) struct Helper {
    orders: Sender<Order>,
    answers: Receiver<Vec<String>>,
}

/// What a helper is told.
enum Order {
    Change(&'static Sample, usize),
    /// What its filters let it tell.
    Describe {
        is_filtered: bool,
    },
}

impl Helper {
    /// Starts one.
    pub fn start(number: u8) -> io::Result<Self> {
        let (orders, hears) = mpsc::channel();
        let (tells, answers) = mpsc::channel();
        thread::Builder::new()
            .name(format!("helper-{number}"))
            .stack_size(STACK_BYTES)
            .spawn(move || {
                for order in hears {
                    let told = match order {
                        Order::Change(sample, first) => {
                            // The kernel may not have it, or no other value.
                            let _ = sample.change(first);
                            Vec::new()
                        }
                        Order::Describe { is_filtered } => of_thread(is_filtered).collect(),
                    };
                    if tells.send(told).is_err() {
                        break;
                    }
                }
                // Some of what it has lets nobody see that it has ended.
                loop {
                    rustix::event::pause();
                }
            })?;
        Ok(Self { orders, answers })
    }

    fn ask(&self, order: Order) -> io::Result<Vec<String>> {
        let is_gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        self.orders.send(order).map_err(|_| is_gone())?;
        self.answers.recv().map_err(|_| is_gone())
    }

    /// Has it change a state of its own.
    pub fn change(&self, sample: &'static Sample, first: usize) -> io::Result<()> {
        self.ask(Order::Change(sample, first)).map(drop)
    }

    /// What it has, a line each.
    pub fn describe(&self, is_filtered: bool) -> io::Result<Vec<String>> {
        self.ask(Order::Describe { is_filtered })
    }
}
