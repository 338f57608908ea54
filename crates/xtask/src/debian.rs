//! Debian's packages, looked up and downloaded with lists and caches of our own: nothing is
//! installed.
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{CWD, RenameFlags};

use crate::error::{Error, Result};
use crate::repo;

/// Where all that is fetched is kept.
pub const KEPT: &str = "/var/cache/stillframe";

/// The packages of some suites.
pub struct Lists {
    folder: tempfile::TempDir,
    options: Vec<String>,
}

impl Lists {
    /// Fetches the lists of suites into a scratch folder beside what is kept.
    ///
    /// # Errors
    /// When the folder cannot be made, or apt-get fails.
    pub fn of(suites: &[&str]) -> Result<Self> {
        Self::with(suites, &[])
    }

    /// As [`Lists::of`], of packages for another processor.
    ///
    /// # Errors
    /// As [`Lists::of`].
    pub fn for_processor(suites: &[&str], processor: &str) -> Result<Self> {
        let options = ["APT::Architecture", "APT::Architectures"];
        Self::with(suites, &options.map(|name| format!("{name}={processor}")))
    }

    fn with(suites: &[&str], more: &[String]) -> Result<Self> {
        std::fs::create_dir_all(KEPT).map_err(repo::file_error("make", Path::new(KEPT)))?;
        let folder = tempfile::tempdir_in(KEPT);
        let folder = folder.map_err(repo::file_error("make in", Path::new(KEPT)))?;
        let scratch = folder.path();
        let sources = scratch.join("sources.list");
        let key = "/usr/share/keyrings/debian-archive-keyring.gpg";
        let line = |suite: &&str| {
            format!("deb [signed-by={key}] http://deb.debian.org/debian {suite} main\n")
        };
        std::fs::write(&sources, suites.iter().map(line).collect::<String>())
            .map_err(repo::file_error("write", &sources))?;
        for name in ["lists/partial", "cache/archives/partial"] {
            let path = scratch.join(name);
            std::fs::create_dir_all(&path).map_err(repo::file_error("make", &path))?;
        }
        let options = [
            format!("Dir::Etc::SourceList={}", sources.display()),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={}", scratch.join("lists").display()),
            format!("Dir::Cache={}", scratch.join("cache").display()),
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::http::Timeout=30".to_owned(),
        ];
        let lists = Self {
            options: [&options[..], more].concat(),
            folder,
        };
        repo::run(lists.apt("apt-get").arg("update"))?;
        Ok(lists)
    }

    /// A folder for what is made of the packages, in the file system in which it is to be kept.
    pub fn scratch(&self) -> &Path {
        self.folder.path()
    }

    /// The packages that one depends on, whose names begin with `start`.
    ///
    /// # Errors
    /// When apt-cache fails.
    pub fn depends(&self, package: &str, start: &str) -> Result<Vec<String>> {
        let said = repo::output(self.apt("apt-cache").args(["depends", package]))?;
        let names = said.lines().filter_map(|line| line.split_once("Depends: "));
        let names = names.filter(|(_, name)| name.starts_with(start));
        Ok(names.map(|(_, name)| name.to_owned()).collect())
    }

    /// Downloads a package, given as `NAME` or `NAME/SUITE`; its file.
    ///
    /// # Errors
    /// When apt-get fails, or a folder cannot be listed.
    pub fn download(&self, package: &str) -> Result<PathBuf> {
        repo::run(self.apt("apt-get").args(["download", package]))?;
        let folder = self.scratch();
        let entries = std::fs::read_dir(folder).map_err(repo::file_error("list", folder))?;
        let name = package.split('/').next().unwrap_or(package);
        let is_it = |path: &PathBuf| {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            file.ends_with(".deb") && file.split('_').next() == Some(name)
        };
        let mut files = entries.filter_map(|entry| Some(entry.ok()?.path()));
        files.find(is_it).ok_or_else(|| Error::Package {
            name: package.to_owned(),
        })
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("--quiet=2").current_dir(self.scratch());
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }
}

/// Unpacks the files of a package that tar(1) is told to take by `options`, into `folder`.
///
/// # Errors
/// When a program fails.
pub fn unpack(package: &Path, folder: &Path, options: &[String]) -> Result<()> {
    let mut archive = Command::new("dpkg-deb");
    archive.arg("--fsys-tarfile").arg(package);
    archive.stdout(Stdio::piped());
    let mut running = archive
        .spawn()
        .map_err(|source| repo::start_error(&archive, source))?;
    let tar = running.stdout.take().expect("stdout was made a pipe above");
    let mut extract = Command::new("tar");
    extract.args(["-x", "--no-same-owner", "-C"]).arg(folder);
    let unpacked = repo::run(extract.args(options).stdin(tar));
    let ended = running.wait();
    ended.map_err(|source| repo::start_error(&archive, source))?;
    unpacked
}

/// Puts a folder where it is to be kept. One that is there already, perhaps in use, goes with the
/// scratch folder.
///
/// # Errors
/// When it cannot be renamed.
pub fn put(part: &Path, at: &Path) -> Result<()> {
    let flags = match at.exists() {
        true => RenameFlags::EXCHANGE,
        false => RenameFlags::NOREPLACE,
    };
    let put = rustix::fs::renameat_with(CWD, part, CWD, at, flags);
    put.map_err(|errno| repo::file_error("rename to", at)(errno.into()))
}
