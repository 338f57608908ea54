//! Stops that come, or end, between the freeze and the end of the questions to a task, and ends of
//! stops that its parent has not seen.

use sys::ptrace;
use tracee::Thread;

use crate::records::{Node, State, TaskId};
use crate::{Error, Result};

/// Corrects what the image says of a task's state by what its first thread is in now.
pub(super) fn see(node: &mut Node, first: &Thread) -> Result<()> {
    match (node.state(), first.group_stop) {
        (State::Stopped, None) => {
            node.set_state(State::Running);
            (node.stop_signal, node.stop_seen) = (0, false);
        }
        // Its parent, looked at before, was not told yet.
        (State::Running, Some(_)) => node.stop_comes = true,
        _ => {}
    }
    // Who waits for the root is none of the tree.
    if node.state() == State::Running && node.id() != TaskId::FIRST {
        let tid = first.tid;
        node.continued = ptrace::was_continued(tid)
            .map_err(|e| Error::kernel(format!("cannot ask whether {tid} was continued"), e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use freeze::freeze;
    use resources::fd::tcp::newcomers::Newcomers;
    use rustix::process::{Pid, Signal, kill_process};
    use testkit::program::Program;
    use testkit::wait::{SOON, wait_until};

    use crate::collect::memory_view::Fresh;
    use crate::collect::{How, collect};
    use crate::homework::Homework;
    use crate::records::{Node, State, Tree, tag};

    /// The state of `sleep` in an image, when it got `before` before the freeze and `then` after.
    #[track_caller]
    fn state(before: &[Signal], then: &[Signal]) -> Node {
        let program = Program::new("sleep").arg("1000").spawn();
        let pid = program.pid().cast_signed();
        let send = |signals: &[Signal]| {
            for signal in signals {
                kill_process(Pid::from_raw(pid).expect("a pid"), *signal).expect("it lives");
            }
        };
        send(before);
        if before.contains(&Signal::STOP) {
            let stopped = || testkit::tree::state(program.pid()) == Some('T');
            wait_until("it to be stopped", SOON, stopped);
        }
        let mut frozen = freeze(pid, None).expect("it can be stopped");
        send(then);
        let allow = resources::Allow {
            shell_job: true,
            ..resources::Allow::default()
        };
        let how = How {
            allow: &allow,
            stay: false,
            namespaces: crate::options::OwnNamespaces::default(),
            newcomers: &mut Newcomers::of(0, false, false),
            homework: &mut Homework::default(),
        };
        let inventory = collect(&mut frozen, how, &mut Fresh::default());
        let inventory = inventory.expect("collected");
        let tree = inventory.records.iter().find(|one| one.tag == tag::TREE);
        let tree = Tree::read(tree.expect("a tree")).expect("sound");
        drop(frozen);
        let stopped = matches!(then.last().or(before.last()), Some(&Signal::STOP));
        let same = || (testkit::tree::state(program.pid()) == Some('T')) == stopped;
        wait_until("the signals to take effect", SOON, same);
        tree.tasks[0].clone()
    }

    #[test]
    fn what_comes_during_a_dump_is_in_the_image() {
        testkit::needs_root!();
        let (stop, cont) = (Signal::STOP, Signal::CONT);
        let told = |node: Node| (node.state(), node.stop_signal, node.stop_comes);
        assert_eq!(told(state(&[], &[])), (State::Running, 0, false));
        assert_eq!(told(state(&[stop], &[])), (State::Stopped, 19, false));
        assert_eq!(told(state(&[], &[stop])), (State::Running, 0, true));
        assert_eq!(told(state(&[stop], &[cont])), (State::Running, 0, false));
        assert_eq!(told(state(&[], &[stop, cont])), (State::Running, 0, false));
        assert_eq!(
            told(state(&[stop], &[cont, stop])),
            (State::Stopped, 19, false)
        );
    }
}
