//! How a command ends: its exit status, what it says on stderr, and the same as JSON.

use std::error::Error as _;
use std::fmt::Write as _;
use std::path::PathBuf;

use image::Blame;
use process::Obstacle;
use serde_json::{Value, json};

use crate::kind::Kind;
use crate::{command_line, config};

/// Exit statuses; docs/exit-codes.md explains them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The command succeeded.
    Done = 0,
    /// The system refused something; `check`: something is missing.
    Failed = 1,
    /// The command line makes no sense, or asks for an option that is not there.
    Usage = 2,
    /// The target or the image uses something that is not saved.
    Unsupported = 3,
    /// The target ended, or something that the image needs is gone.
    Gone = 4,
    /// The image is damaged.
    Corrupt = 5,
    /// The image cannot be written or read.
    Store = 6,
}

impl Status {
    /// The status with this number.
    pub fn of_number(number: i32) -> Option<Self> {
        let all = [
            Self::Done,
            Self::Failed,
            Self::Usage,
            Self::Unsupported,
            Self::Gone,
            Self::Corrupt,
            Self::Store,
        ];
        all.into_iter().find(|status| *status as i32 == number)
    }

    /// Returns the name of the status in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::Unsupported => "unsupported",
            Self::Gone => "gone",
            Self::Corrupt => "corrupt",
            Self::Store => "store",
        }
    }
}

impl From<Blame> for Status {
    fn from(blame: Blame) -> Self {
        match blame {
            Blame::Unsupported => Self::Unsupported,
            Blame::Gone => Self::Gone,
            Blame::Kernel => Self::Failed,
            Blame::Corrupt => Self::Corrupt,
            Blame::Store => Self::Store,
        }
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line or a configuration file makes no sense.
    #[error(transparent)]
    Reading(command_line::Error),
    /// A configuration file cannot be read.
    #[error(transparent)]
    Configuration(config::UnreadableFile),
    #[error("a copy with privileges of its own (set-user-id, capabilities) does not run")]
    Raised,
    #[error("there is no feature {0:?}")]
    NoSuchFeature(String),
    #[error("the image in {} is of {}", .dir.display(), .kind.words())]
    OtherKind { dir: PathBuf, kind: Kind },
    /// Options that do not go together.
    #[error("{0}")]
    Usage(String),
    #[error("cannot {action} {}", .path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot use descriptor {fd}, which {option} names")]
    Descriptor {
        fd: i32,
        option: &'static str,
        source: std::io::Error,
    },
    #[error("restored, but {command:?} cannot be executed")]
    Exec {
        command: std::ffi::OsString,
        source: std::io::Error,
    },
    #[error("{doing} failed")]
    Engine {
        doing: &'static str,
        source: Box<process::Error>,
    },
    #[error("{doing} failed")]
    Machine {
        doing: &'static str,
        source: Box<vm::Error>,
    },
    #[error("{doing} failed")]
    Volume {
        doing: &'static str,
        source: Box<volume::Error>,
    },
}

impl Failure {
    /// Says which command on a tree failed.
    pub fn engine(doing: &'static str) -> impl FnOnce(process::Error) -> Self {
        move |source| Self::Engine {
            doing,
            source: Box::new(source),
        }
    }

    /// Says which command on a machine's memory failed.
    pub fn machine(doing: &'static str) -> impl FnOnce(vm::Error) -> Self {
        move |source| Self::Machine {
            doing,
            source: Box::new(source),
        }
    }

    /// Says which command on a volume failed.
    pub fn volume(doing: &'static str) -> impl FnOnce(volume::Error) -> Self {
        move |source| Self::Volume {
            doing,
            source: Box::new(source),
        }
    }

    /// Returns the exit status of the failure.
    pub fn status(&self) -> Status {
        match self {
            Self::Reading(_) | Self::Configuration(_) | Self::Usage(_) => Status::Usage,
            Self::Descriptor { .. } => Status::Usage,
            Self::OtherKind { .. } => Status::Unsupported,
            Self::File { .. } => Status::Store,
            // The status of criu(8), whose `check` knows no other.
            Self::Exec { .. } | Self::NoSuchFeature(_) | Self::Raised => Status::Failed,
            Self::Machine { source, .. } => source.blame().into(),
            Self::Volume { source, .. } => source.blame().into(),
            Self::Engine { source, .. } => source.blame().into(),
        }
    }

    /// Tells what to do next, where something can be done.
    pub fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::Reading(command_line::Error::OptionUnsupported { .. }) => {
                "leave the option out if the target does without it; docs/criu.md lists those \
                 that are there"
            }
            Self::Reading(command_line::Error::CommandUnsupported(_)) => {
                "`stillframe --help` lists the commands that are there"
            }
            Self::Reading(_) | Self::Usage(_) => "`stillframe COMMAND --help` lists the options",
            Self::Configuration(_) => {
                "correct the name, or leave the default files out with --no-default-config"
            }
            Self::NoSuchFeature(_) => "`stillframe check --feature list` lists those there are",
            Self::Raised => {
                "it would dump and restore for anybody: take them off the file, and run it as root"
            }
            Self::File { .. } => "look at its name, its permissions and the space left",
            Self::Descriptor { .. } => {
                "the caller has to pass it on, as a shell does with `FD<FILE`"
            }
            Self::OtherKind { kind, .. } => kind.taken_by(),
            Self::Exec { .. } => "the tree runs; nothing has to be restored again",
            Self::Machine { .. } | Self::Volume { .. } => return None,
            Self::Engine { source, .. } => return source.advice(),
        };
        Some(advice.to_owned())
    }

    /// Returns what keeps a tree from being saved, where that is why.
    pub fn obstacles(&self) -> &[Obstacle] {
        match self {
            Self::Engine { source, .. } => source.obstacles(),
            _ => &[],
        }
    }

    fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let mut error = self.source();
        while let Some(cause) = error {
            causes.push(cause.to_string());
            error = cause.source();
        }
        causes
    }

    /// Returns the failure as a line for people, with its causes on the same line.
    pub fn line(&self) -> String {
        let mut line = self.to_string();
        for cause in self.causes() {
            // Writing to a string cannot fail.
            let _ = write!(line, ": {cause}");
        }
        line
    }

    /// Returns the failure as machines read it.
    pub fn json(&self) -> Value {
        json!({"error": {
            "kind": self.status().name(),
            "status": self.status() as u8,
            "message": self.to_string(),
            "causes": self.causes(),
            "advice": self.advice(),
            "obstacles": self.obstacles().iter().map(obstacle_to_json).collect::<Vec<_>>(),
        }})
    }
}

fn obstacle_to_json(obstacle: &Obstacle) -> Value {
    json!({
        "pid": obstacle.pid,
        "name": obstacle.name,
        "what": obstacle.what,
        "why": obstacle.why,
        "allow": obstacle.allow,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failures() -> Vec<Failure> {
        let denied = || std::io::Error::from_raw_os_error(13);
        vec![
            Failure::Reading(command_line::Error::CommandUnsupported("exec")),
            Failure::Usage("--restore-sibling needs --restore-detached".to_owned()),
            Failure::Raised,
            Failure::NoSuchFeature("nope".to_owned()),
            Failure::File {
                action: "create the log file",
                path: "/x/dump.log".into(),
                source: denied(),
            },
            Failure::Descriptor {
                fd: 9,
                option: "--status-fd",
                source: denied(),
            },
            Failure::Exec {
                command: "tool".into(),
                source: denied(),
            },
        ]
    }

    #[test]
    fn failures_have_a_status_a_line_and_advice() {
        let text: Vec<String> = failures()
            .iter()
            .map(|failure| {
                let status = failure.status();
                let advice = failure.advice().unwrap();
                format!(
                    "{} {}: {}\n  {advice}",
                    status as u8,
                    status.name(),
                    failure.line()
                )
            })
            .collect();
        insta::assert_snapshot!(text.join("\n"), @r#"
        2 usage: the command exec of criu(8) is not supported yet
          `stillframe --help` lists the commands that are there
        2 usage: --restore-sibling needs --restore-detached
          `stillframe COMMAND --help` lists the options
        1 failed: a copy with privileges of its own (set-user-id, capabilities) does not run
          it would dump and restore for anybody: take them off the file, and run it as root
        1 failed: there is no feature "nope"
          `stillframe check --feature list` lists those there are
        6 store: cannot create the log file /x/dump.log: Permission denied (os error 13)
          look at its name, its permissions and the space left
        2 usage: cannot use descriptor 9, which --status-fd names: Permission denied (os error 13)
          the caller has to pass it on, as a shell does with `FD<FILE`
        1 failed: restored, but "tool" cannot be executed: Permission denied (os error 13)
          the tree runs; nothing has to be restored again
        "#);
    }

    #[test]
    fn json_tells_the_same() {
        let json = serde_json::to_string_pretty(&failures()[4].json()).unwrap();
        insta::assert_snapshot!(json, @r#"
        {
          "error": {
            "advice": "look at its name, its permissions and the space left",
            "causes": [
              "Permission denied (os error 13)"
            ],
            "kind": "store",
            "message": "cannot create the log file /x/dump.log",
            "obstacles": [],
            "status": 6
          }
        }
        "#);
    }

    #[test]
    fn every_status_is_documented() {
        let documents = [
            include_str!("../../../docs/exit-codes.md"),
            include_str!("manual.roff"),
        ];
        for status in [
            Status::Done,
            Status::Failed,
            Status::Usage,
            Status::Unsupported,
            Status::Gone,
            Status::Corrupt,
            Status::Store,
        ] {
            let number = status as u8;
            let (row, heading) = (
                format!("| {number} | `{}` |", status.name()),
                format!(".B {number}\n"),
            );
            assert!(documents[0].contains(&row), "{row}");
            assert!(documents[1].contains(&heading), "{heading}");
        }
    }
}
