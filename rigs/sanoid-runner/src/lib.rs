//! Debian's sanoid, unchanged, for tests that compare with its decisions.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::disallowed_methods, reason = "it runs the program that is compared with")]

use std::fs::read_to_string;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use tempfile::TempDir;

const SANOID: &str = "/usr/sbin/sanoid";
const SERVE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/serve.pl");

/// A process that runs sanoid repeatedly.
#[derive(Debug)]
pub struct Sanoid {
    process: Child,
    runs: Option<ChildStdin>,
    codes: BufReader<ChildStdout>,
    folder: TempDir,
}

/// What a run printed.
#[derive(Debug)]
pub struct SanoidRun {
    /// Standard output.
    pub output: String,
    /// Standard error.
    pub complaints: String,
    /// The exit code.
    pub code: i32,
}

impl Sanoid {
    /// Starts the process. Programs in the folder `programs` take precedence over those of the system.
    pub fn start(programs: &Path) -> Self {
        assert!(Path::new(SANOID).exists(), "sanoid is not installed: make setup");
        let folder = tempfile::tempdir().unwrap();
        let [output, errors] = files(folder.path());
        let system = std::env::var("PATH").unwrap_or_default();
        let mut process = Command::new("perl")
            .args([Path::new(SERVE), Path::new(SANOID), &output, &errors])
            .env("PATH", format!("{}:{system}", programs.display()))
            .env_remove("FIXED_TIME")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            runs: process.stdin.take(),
            codes: BufReader::new(process.stdout.take().unwrap()),
            process,
            folder,
        }
    }

    /// Runs sanoid. Arguments begin with `--`; the other words are variables of its environment, as `NAME=VALUE`.
    pub fn run(&mut self, words: &[String]) -> SanoidRun {
        let line = words.join("\t");
        assert!(!line.contains('\n'), "{line}");
        self.runs
            .as_mut()
            .unwrap()
            .write_all(format!("{line}\n").as_bytes())
            .unwrap();
        let mut code = String::new();
        self.codes.read_line(&mut code).unwrap();
        let [output, complaints] = files(self.folder.path()).map(|file| read_to_string(file).unwrap());
        SanoidRun {
            output,
            complaints,
            code: code.trim_end().parse().unwrap(),
        }
    }
}

/// Files for standard output and standard error of a run.
fn files(folder: &Path) -> [PathBuf; 2] {
    ["output", "errors"].map(|name| folder.join(name))
}

impl Drop for Sanoid {
    /// The process ends with its input.
    fn drop(&mut self) {
        drop(self.runs.take());
        self.process.wait().ok();
    }
}
