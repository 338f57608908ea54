//! Steps about what has no descriptor: System V IPC, contexts, and what is shared.
use super::Generator;
use crate::storm::step::{ALL_SHARES, Action, NUMBERED};

/// How many programs of 32 bits there are at most.
const PROGRAMS: u8 = 3;

impl Generator {
    pub(super) fn change_numbered(&mut self, task: u8) {
        match self.chance.below(16) {
            0..4 => self.semaphores(task),
            4..6 if self.next_segment < NUMBERED => {
                let huge = self.chance.once_in(4);
                let pages = match huge {
                    true => self.chance.pick(&[1, 2]),
                    false => self.chance.pick(&[1, 2, 16, 17, 70]),
                };
                let doomed = self.chance.once_in(2);
                self.segment(task, pages, doomed, huge);
            }
            12..15 => self.carve(task),
            15 if self.programs < PROGRAMS => {
                self.programs += 1;
                self.step(task, Action::Program);
            }
            6..9 => self.requests(task),
            9 if self.known(task).shares != 0 => {
                let shares = 1 + self.chance.below(ALL_SHARES.into()) as u8;
                self.known(task).shares &= !shares;
                self.step(task, Action::Unshare { shares });
            }
            _ => {
                let (folder, mask) = (self.chance.below(4) as u8, self.chance.pick(&[0, 18, 63]));
                self.step(task, Action::Settle { folder, mask });
            }
        }
    }

    pub(super) fn semaphores(&mut self, task: u8) {
        let sets = self.known(task).sets.clone();
        if self.next_set < NUMBERED && (sets.is_empty() || self.chance.once_in(3)) {
            let set = self.next_set;
            self.next_set += 1;
            self.known(task).sets.push(set);
            return self.step(task, Action::Semaphores { set });
        }
        if !sets.is_empty() {
            let (set, count) = (self.chance.pick(&sets), self.chance.pick(&[1, 2, 100]));
            self.step(task, Action::Borrow { set, count });
        }
    }

    /// Attaches a new segment.
    pub(super) fn segment(&mut self, task: u8, pages: u16, doomed: bool, huge: bool) {
        let segment = self.next_segment;
        self.next_segment += 1;
        self.known(task).segments.push((segment, pages));
        let attach = Action::Segment {
            segment,
            pages,
            doomed,
            huge,
        };
        self.step(task, attach);
    }

    /// Unmaps or protects a part of a segment that the task has: its beginning, its end, any.
    pub(super) fn carve(&mut self, task: u8) {
        let segments = self.known(task).segments.clone();
        if segments.is_empty() {
            return;
        }
        let (segment, whole) = self.chance.pick(&segments);
        let pages = 1 + self.chance.below(u64::from(whole)) as u16;
        let slack = whole - pages;
        let any = self.chance.below(u64::from(slack) + 1) as u16;
        let carve = Action::Carve {
            segment,
            at: self.chance.pick(&[0, slack, any]),
            pages,
            protection: self.chance.pick(&[None, None, Some(0), Some(1), Some(3)]),
        };
        self.step(task, carve);
    }

    pub(super) fn requests(&mut self, task: u8) {
        let known = self.known(task).contexts;
        let context = self.chance.below(u64::from(known + 1).min(4)) as u8;
        self.known(task).contexts = known.max(context + 1);
        let (room, post) = (
            self.chance.pick(&[1, 8, 100, 500]),
            self.chance.pick(&[0, 1, 7, 130, 600]),
        );
        let fetch = self.chance.below(u64::from(post) + 3) as u16;
        let requests = Action::Requests {
            context,
            room,
            post,
            fetch,
        };
        self.step(task, requests);
    }

    /// Has all events fetched that there are.
    pub(super) fn fetch_all(&mut self) {
        for task in 0..self.tasks.len() as u8 {
            let known = self.known(task);
            let contexts = if known.is_alive { known.contexts } else { 0 };
            for context in 0..contexts {
                let (room, post, fetch) = (1, 0, u16::MAX);
                let requests = Action::Requests {
                    context,
                    room,
                    post,
                    fetch,
                };
                self.step(task, requests);
            }
        }
    }
}
