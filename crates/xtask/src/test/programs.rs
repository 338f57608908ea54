//! The test programs of the workspace: they are built, and what each is and may do is told.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::schedule::TestList;
use crate::error::{Error, Result};
use crate::repo;

/// The package that starts subjects, real programs and the command itself.
const STARTER: &str = "testkit";

/// A program of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its package, and its own name where that is not the package's library.
    pub name: String,
    /// The package.
    pub package: String,
    /// The built file.
    executable: PathBuf,
    /// The package's folder, in which cargo runs it, too.
    folder: PathBuf,
    /// True if it stands in `tests/` of a package that starts subjects: all of its tests are
    /// end-to-end tests.
    pub is_end_to_end: bool,
}

/// A package of the workspace, as cargo describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    id: String,
    name: String,
    /// True if it has a library, which may have doc tests.
    has_library: bool,
    /// True if it uses the package that starts subjects.
    starts_subjects: bool,
}

/// Builds the test programs of these packages, or of all, and gives them in cargo's order.
///
/// # Errors
/// When something cannot be built.
pub fn build(packages: &[String], known: &[Package]) -> Result<Vec<Program>> {
    let mut command = repo::cargo(&["test", "--locked", "--no-run"]);
    command.arg("--message-format=json-render-diagnostics");
    select(&mut command, packages);
    let text = repo::output(&mut command)?;
    Ok(built(&text, known))
}

/// The packages of the workspace.
///
/// # Errors
/// When cargo cannot tell them.
pub fn packages() -> Result<Vec<Package>> {
    let arguments = ["metadata", "--locked", "--no-deps", "--format-version=1"];
    let text = repo::output(&mut repo::cargo(&arguments))?;
    Ok(described(&text))
}

/// The command that runs the doc tests of these packages, or of all; none where there are none.
pub fn doc_tests(packages: &[String], known: &[Package]) -> Option<Command> {
    let mut command = repo::cargo(&["test", "--locked", "--no-fail-fast", "--doc"]);
    let has_library = |name: &&String| {
        let mut named = known.iter().filter(|package| package.name == **name);
        named.any(|package| package.has_library)
    };
    let some = packages
        .iter()
        .filter(has_library)
        .cloned()
        .collect::<Vec<_>>();
    select(&mut command, &some);
    (packages.is_empty() || !some.is_empty()).then_some(command)
}

fn select(command: &mut Command, packages: &[String]) {
    if packages.is_empty() {
        command.arg("--workspace");
    }
    for package in packages {
        command.args(["--package", package]);
    }
}

impl Program {
    /// A command that runs it as cargo does.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env("CARGO_PKG_NAME", &self.package)
            .stdin(Stdio::null());
        command
    }

    /// A program that is not there, of the package that `name` begins with.
    #[cfg(test)]
    pub fn named(name: &str, is_end_to_end: bool) -> Self {
        let package = name.split('/').next().unwrap_or(name);
        Self {
            name: name.to_owned(),
            package: package.to_owned(),
            executable: PathBuf::new(),
            folder: PathBuf::new(),
            is_end_to_end,
        }
    }

    /// The path of the file, for messages.
    pub fn executable(&self) -> &Path {
        &self.executable
    }
}

/// The programs among cargo's messages, a line of JSON each.
fn built(messages: &str, packages: &[Package]) -> Vec<Program> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let programs = messages.filter_map(|message| program(&message, packages));
    // Cargo's own order; a file may be told of twice.
    let programs = programs.collect::<BTreeMap<_, _>>();
    programs.into_values().collect()
}

/// The program that a message is about, with its place in the order.
fn program(message: &Value, packages: &[Package]) -> Option<((String, u8, String), Program)> {
    let executable = message["executable"].as_str()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let id = message["package_id"].as_str()?;
    let package = packages.iter().find(|package| package.id == id)?;
    let kind = message["target"]["kind"][0].as_str()?;
    let target = message["target"]["name"].as_str()?;
    let (place, name) = match kind {
        "lib" => (0, package.name.clone()),
        "bin" => (1, format!("{}/{target}", package.name)),
        _ => (2, format!("{}/{target}", package.name)),
    };
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let program = Program {
        name,
        package: package.name.clone(),
        executable: executable.into(),
        folder: folder.into(),
        is_end_to_end: kind == "test" && package.starts_subjects,
    };
    Some(((package.name.clone(), place, target.to_owned()), program))
}

/// The packages in the JSON of `cargo metadata`.
fn described(metadata: &str) -> Vec<Package> {
    let metadata = serde_json::from_str::<Value>(metadata).unwrap_or_default();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let package = |package: Value| {
        let text = |name: &str| package[name].as_str().map(str::to_owned);
        let is_library = |target: &Value| target["kind"][0] == "lib";
        let is_starter = |dependency: &Value| dependency["name"] == STARTER;
        Some(Package {
            id: text("id")?,
            name: text("name")?,
            has_library: list(&package["targets"]).iter().any(is_library),
            starts_subjects: list(&package["dependencies"]).iter().any(is_starter),
        })
    };
    list(&metadata["packages"])
        .into_iter()
        .filter_map(package)
        .collect()
}

/// The tests of a program whose names contain `filter`.
///
/// # Errors
/// When it cannot be run.
pub fn list(program: &Program, filter: Option<&str>) -> Result<TestList> {
    let mut command = program.command();
    command.arg("--list").args(filter);
    let output = command.output();
    let output = output.map_err(|source| repo::start_error(&command, source))?;
    if !output.status.success() {
        return Err(Error::Status {
            command: format!("{} --list", program.executable().display()),
            status: output.status,
        });
    }
    Ok(TestList::parse(&String::from_utf8_lossy(&output.stdout)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages() -> Vec<Package> {
        described(
            r#"{"packages": [
                {"id": "path+file:///x/a#0.1.0", "name": "a", "targets": [{"kind": ["lib"]}],
                 "dependencies": [{"name": "libc"}]},
                {"id": "path+file:///x/b#0.1.0", "name": "b", "targets": [{"kind": ["bin"]}],
                 "dependencies": [{"name": "testkit"}]}
            ]}"#,
        )
    }

    fn message(package: &str, kind: &str, target: &str, is_test: bool) -> String {
        format!(
            r#"{{"reason": "compiler-artifact", "package_id": "path+file:///x/{package}#0.1.0",
            "manifest_path": "/x/{package}/Cargo.toml", "executable": "/x/target/{target}",
            "profile": {{"test": {is_test}}},
            "target": {{"kind": ["{kind}"], "name": "{target}"}}}}"#
        )
        .replace('\n', "")
    }

    #[test]
    fn programs_are_named_and_ordered() {
        let messages = [
            message("b", "test", "whole", true),
            message("b", "bin", "tool", false),
            "no JSON".to_owned(),
            message("b", "bin", "tool", true),
            message("a", "test", "plain", true),
            message("a", "lib", "a", true),
        ];
        let programs = built(&messages.join("\n"), &packages());
        let told = programs.iter().map(|one| (&*one.name, one.is_end_to_end));
        let expected = [
            ("a", false),
            ("a/plain", false),
            ("b/tool", false),
            ("b/whole", true),
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected);
        assert_eq!(programs[3].folder, Path::new("/x/b"));
    }

    #[test]
    fn doc_tests_are_asked_only_of_libraries() {
        let arguments = |names: &[&str]| {
            let names = names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>();
            let command = doc_tests(&names, &packages())?;
            let words = command.get_args().skip(4);
            Some(
                words
                    .map(|word| word.to_string_lossy().into_owned())
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(arguments(&[]), Some(vec!["--workspace".to_owned()]));
        assert_eq!(arguments(&["b"]), None);
        let expected = ["--package", "a"].map(str::to_owned).to_vec();
        assert_eq!(arguments(&["a", "b"]), Some(expected));
    }
}
