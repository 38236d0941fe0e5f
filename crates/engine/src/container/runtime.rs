//! runc and CRIU: what a snapshot with the memory of processes needs of them.

#![deny(clippy::indexing_slicing, reason = "parses the output of other programs")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{Clock, error_text};
use holdfast_host::{Answer, Tools};
use serde::Deserialize;

use crate::job::error::{ContainerError, MemoryProblem};
use crate::job::{Error, Result};

/// The first version of CRIU that restores what it has dumped under the kernels of today.
const CRIU_MIN: (u32, u32) = (4, 1);
/// Limit of what is read of a log of CRIU, from its end.
const LOG_BYTES_MAX: u64 = 256 << 10;
/// How long a process number may stay in use after its process was killed.
const NUMBER_PATIENCE: Duration = Duration::from_secs(10);
const NUMBER_INTERVAL: Duration = Duration::from_millis(100);

/// The container of a runtime, and how to reach it.
#[derive(Clone)]
pub struct RuntimeRequest<'a> {
    /// The name of the container for runc.
    pub id: String,
    /// The folder with the state of runc, if not its default.
    pub root: Option<PathBuf>,
    /// runc: a name or a path.
    pub runc: String,
    /// CRIU: a name or a path.
    pub criu: String,
    /// Runs both.
    pub tools: &'a dyn Tools,
}

/// Versions of the programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RuntimeVersions {
    pub(super) runc: String,
    pub(super) criu: String,
}

/// The answer of `runc state`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct RuntimeState {
    pub(super) status: String,
    pub(super) bundle: PathBuf,
    pub(super) rootfs: PathBuf,
}

/// Where CRIU writes and reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct CriuFolders<'a> {
    pub(super) images: &'a Path,
    /// Its logs.
    pub(super) work: &'a Path,
}

pub(super) fn memory_error(problem: MemoryProblem, what: impl Into<String>) -> Error {
    ContainerError::Memory {
        problem,
        what: what.into(),
    }
    .into()
}

impl RuntimeRequest<'_> {
    /// Checks both programs. Nothing is changed.
    pub(super) fn check_programs(&self) -> Result<RuntimeVersions> {
        if self.id.is_empty() || self.id.starts_with('-') || self.id.contains('/') {
            return Err(memory_error(
                MemoryProblem::NotRunning,
                format!("{:?} is not the name of a container", self.id),
            ));
        }
        let runc = self.version_of(&self.runc, MemoryProblem::NoRunc)?;
        let Some(version) = runc.lines().next().and_then(|line| line.strip_prefix("runc version ")) else {
            let name = runc.lines().next().unwrap_or_default();
            return Err(memory_error(
                MemoryProblem::NotRunc,
                format!("{} is not runc, but {name:?}", self.runc),
            ));
        };
        let criu = self.version_of(&self.criu, MemoryProblem::NoCriu)?;
        let number = criu_version(&criu);
        if number.is_none_or(|number| number < CRIU_MIN) {
            let found = criu.lines().next().unwrap_or_default().trim();
            return Err(memory_error(
                MemoryProblem::OldCriu,
                format!(
                    "{} is too old: it has {found:?}, and version {}.{} or later is needed",
                    self.criu, CRIU_MIN.0, CRIU_MIN.1
                ),
            ));
        }
        let answer = self.ask(&self.criu, &["check"], MemoryProblem::NoCriu)?;
        if !answer.is_success {
            let reason = last_error(&answer.stderr).or_else(|| last_error(&answer.output));
            return Err(memory_error(
                MemoryProblem::CriuCheck,
                format!(
                    "CRIU cannot work on this host: {}",
                    reason.unwrap_or_else(|| answer.stderr.trim().to_owned())
                ),
            ));
        }
        Ok(RuntimeVersions {
            runc: version.trim().to_owned(),
            criu: criu
                .lines()
                .next()
                .unwrap_or_default()
                .replace("Version:", "")
                .trim()
                .to_owned(),
        })
    }

    fn version_of(&self, program: &str, problem: MemoryProblem) -> Result<String> {
        let answer = self.ask(program, &["--version"], problem)?;
        if answer.is_success {
            return Ok(answer.output);
        }
        let reason = answer.stderr.trim().lines().next_back().unwrap_or_default().to_owned();
        Err(memory_error(problem, format!("{program} does not start: {reason}")))
    }

    fn ask(&self, program: &str, arguments: &[&str], problem: MemoryProblem) -> Result<Answer> {
        let asked = self.tools.ask(program, arguments);
        asked.map_err(|error| memory_error(problem, error_text(&error)))
    }

    /// The arguments before the verb of runc.
    fn arguments<'b>(&'b self, rest: &[&'b str]) -> Vec<String> {
        let mut words = Vec::new();
        if let Some(root) = &self.root {
            words.extend(["--root".to_owned(), root.display().to_string()]);
        }
        words.extend(["--criu".to_owned(), self.criu.clone()]);
        words.extend(rest.iter().map(|word| (*word).to_owned()));
        words
    }

    fn runc(&self, rest: &[&str]) -> Result<Answer> {
        let words = self.arguments(rest);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.ask(&self.runc, &words, MemoryProblem::NoRunc)
    }

    fn run(&self, rest: &[&str], problem: MemoryProblem) -> Result<()> {
        let answer = self.runc(rest)?;
        if answer.is_success {
            return Ok(());
        }
        Err(memory_error(
            problem,
            format!("runc {}: {}", rest.join(" "), runc_message(&answer.stderr)),
        ))
    }

    /// The state of the container; none if runc does not know it.
    pub(super) fn state(&self) -> Result<Option<RuntimeState>> {
        let answer = self.runc(&["state", &self.id])?;
        if !answer.is_success {
            if answer.stderr.contains("does not exist") {
                return Ok(None);
            }
            return Err(memory_error(MemoryProblem::NoRunc, runc_message(&answer.stderr)));
        }
        let state = serde_json::from_str(&answer.output).map_err(|error| {
            memory_error(
                MemoryProblem::NoRunc,
                format!("the answer of runc state {} is not valid: {error}", self.id),
            )
        })?;
        Ok(Some(state))
    }

    pub(super) fn pause(&self) -> Result<()> {
        self.run(&["pause", &self.id], MemoryProblem::Checkpoint)
    }

    pub(super) fn resume(&self) -> Result<()> {
        self.run(&["resume", &self.id], MemoryProblem::StaysPaused)
    }

    /// Removes what runc keeps of a container that has ended.
    pub(super) fn forget(&self) -> Result<()> {
        self.run(&["delete", &self.id], MemoryProblem::IdInUse)
    }

    /// Writes the memory of the processes, which are paused and stay so.
    pub(super) fn checkpoint(&self, folders: CriuFolders<'_>) -> Result<()> {
        let (images, work) = (folders.images.to_string_lossy(), folders.work.to_string_lossy());
        let answer = self.runc(&[
            "checkpoint",
            "--leave-running",
            "--file-locks",
            "--image-path",
            &images,
            "--work-path",
            &work,
            &self.id,
        ])?;
        if answer.is_success {
            return Ok(());
        }
        let log = folders.work.join("dump.log");
        Err(memory_error(
            MemoryProblem::Checkpoint,
            failure_text(&log, &answer.stderr),
        ))
    }

    /// Starts the processes with their memory. While a process number of theirs is still in use, it is tried again.
    pub(super) fn restore(&self, bundle: &Path, folders: CriuFolders<'_>, clock: &dyn Clock) -> Result<()> {
        let deadline = clock.now() + NUMBER_PATIENCE;
        let log = folders.work.join("restore.log");
        loop {
            let Err(text) = self.try_restore(bundle, folders)? else {
                return Ok(());
            };
            let is_number_used = tail_of(&log).is_some_and(|log| log.contains("File exists"));
            if !is_number_used || clock.now() >= deadline {
                return Err(memory_error(MemoryProblem::Restore, text));
            }
            if self.state()?.is_some() {
                self.forget().ok();
            }
            clock.sleep(NUMBER_INTERVAL);
        }
    }

    /// The standard streams of the container must not be those that this process reads.
    fn try_restore(&self, bundle: &Path, folders: CriuFolders<'_>) -> Result<std::result::Result<(), String>> {
        let (images, work) = (folders.images.to_string_lossy(), folders.work.to_string_lossy());
        let messages = folders.work.join("runc.log");
        std::fs::remove_file(&messages).ok();
        let (bundle, messages_path) = (bundle.to_string_lossy(), messages.to_string_lossy());
        let mut words: Vec<String> = [
            "-c",
            "exec \"$@\" >/dev/null 2>&1",
            "sh",
            &self.runc,
            "--log",
            &messages_path,
        ]
        .map(str::to_owned)
        .to_vec();
        words.extend(self.arguments(&[
            "restore",
            "--detach",
            "--file-locks",
            "--bundle",
            &bundle,
            "--image-path",
            &images,
            "--work-path",
            &work,
            &self.id,
        ]));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let answer = self.ask("sh", &words, MemoryProblem::NoRunc)?;
        if answer.is_success {
            return Ok(Ok(()));
        }
        let said = tail_of(&messages).unwrap_or_default();
        Ok(Err(failure_text(&folders.work.join("restore.log"), &said)))
    }
}

/// The reason of CRIU, or else the message of runc, and where the whole log is.
fn failure_text(log: &Path, runc_stderr: &str) -> String {
    match tail_of(log).and_then(|text| last_error(&text)) {
        Some(reason) => format!("CRIU: {reason} (the whole log: {})", log.display()),
        None => format!("runc: {}", runc_message(runc_stderr)),
    }
}

/// The end of a log.
fn tail_of(log: &Path) -> Option<String> {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let mut file = std::fs::File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES_MAX))).ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The last errors in the output of CRIU that tell more than that it has failed, without their times. The cause is
/// often the first of several.
fn last_error(text: &str) -> Option<String> {
    const SHOWN_COUNT: usize = 3;
    const HARMLESS: &str = "Can't setup RLIMIT_NOFILE";
    let errors = text
        .lines()
        .filter_map(|line| line.find("Error (").and_then(|at| line.get(at..)));
    let all: Vec<&str> = errors.map(str::trim).collect();
    let telling: Vec<&str> = all
        .iter()
        .copied()
        .filter(|line| !line.contains("FAILED.") && !line.contains(HARMLESS))
        .collect();
    let first = telling.len().saturating_sub(SHOWN_COUNT);
    match telling.get(first..) {
        Some(shown) if !shown.is_empty() => Some(shown.join("; ")),
        _ => all.last().map(|line| (*line).to_owned()),
    }
}

/// The message in `time="..." level=error msg="..."`.
fn runc_message(stderr: &str) -> String {
    let line = stderr.trim().lines().next_back().unwrap_or_default();
    let message = line.split_once("msg=\"").and_then(|(_, rest)| rest.strip_suffix('"'));
    message.unwrap_or(line).replace("\\n", "; ")
}

/// The number in `Version: 4.1.1`.
fn criu_version(text: &str) -> Option<(u32, u32)> {
    let number = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
    let mut parts = number.split(['.', '-']);
    let major = parts.next()?.parse().ok()?;
    Some((major, parts.next().and_then(|minor| minor.parse().ok()).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::{criu_version, last_error, runc_message};

    #[test]
    fn versions_of_criu_are_compared_as_numbers() {
        assert_eq!(criu_version("Version: 4.1.1\nGitID: v4.1.1\n"), Some((4, 1)));
        assert_eq!(criu_version("Version: 3.17.1\n"), Some((3, 17)));
        assert_eq!(criu_version("Version: 4.10-dev\n"), Some((4, 10)));
        assert_eq!(criu_version("Version: 5\n"), Some((5, 0)));
        assert_eq!(criu_version("crun 1.8\n"), None);
    }

    #[test]
    fn the_error_that_tells_the_reason_is_found() {
        let log = "(00.1) Error (criu/mount.c:12): mnt: Can't lookup mount=24\n(00.2) Unseizing\n(00.3) Error (criu/cr-dump.c:2111): Dumping FAILED.\n";
        assert_eq!(
            last_error(log).as_deref(),
            Some("Error (criu/mount.c:12): mnt: Can't lookup mount=24")
        );
        assert_eq!(
            last_error("(0) Error (criu/cr-dump.c:2111): Dumping FAILED.").as_deref(),
            Some("Error (criu/cr-dump.c:2111): Dumping FAILED.")
        );
        assert_eq!(last_error("fine\n"), None);
    }

    #[test]
    fn messages_of_runc_are_without_their_frame() {
        let line =
            "time=\"2026-11-27T23:06:25Z\" level=error msg=\"criu failed: type NOTIFY errno 0\\nlog file: /x\"\n";
        assert_eq!(runc_message(line), "criu failed: type NOTIFY errno 0; log file: /x");
        assert_eq!(runc_message("plain\n"), "plain");
    }
}
