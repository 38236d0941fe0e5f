//! A folder with a repository and images, and the program run in it.

use std::fs::{File, read};
use std::io::{Read, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;

use holdfast_block::SeededRandom;
use holdfast_test_kit::json_schema::violations;
use serde_json::Value;
use tempfile::TempDir;

use crate::program::{program, program_inside, stderr, stdout};

/// Deleted on drop.
pub(crate) struct Rig {
    folder: TempDir,
    /// Sockets and pipes of the program, which remain after a kill.
    runtime: TempDir,
    /// A process whose view of the file system the program gets, if not this one's.
    sees_files_of: Option<u32>,
    /// The user's folder for configurations.
    configurations: Option<PathBuf>,
    /// A folder of programs that take precedence over those of the system.
    programs: Option<PathBuf>,
}

impl Rig {
    /// A folder without a repository.
    pub(crate) fn empty() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            runtime: tempfile::tempdir().unwrap(),
            sees_files_of: None,
            configurations: None,
            programs: None,
        }
    }

    /// A folder with a repository that is not encrypted.
    pub(crate) fn new() -> Self {
        let rig = Self::empty();
        rig.ok(&["init", "--no-encryption"]);
        rig
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        File::create(path).unwrap().write_all(bytes).unwrap();
    }

    /// Creates an executable script.
    pub(crate) fn write_program(&self, name: &str, script: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        holdfast_test_kit::write_program(&path, script);
        path
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        read(self.path(name)).unwrap()
    }

    /// Names in the folder, or in one below it, without the state that the program keeps about the host.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        if folder == "." {
            names.retain(|name| name != "state");
        }
        names.sort();
        names
    }

    /// Names of sockets and pipes that the program created and did not remove.
    pub(crate) fn runtime_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.runtime.path()).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    /// From now on the program sees the file system as this process does, including `/var`.
    pub(crate) fn see_files_of(&mut self, process: u32) {
        self.sees_files_of = Some(process);
    }

    /// Sets the user's folder for configurations.
    pub(crate) fn have_configurations_in(&mut self, folder: PathBuf) {
        self.configurations = Some(folder);
    }

    /// Adds a program with this name and text, which takes precedence over that of the system.
    pub(crate) fn have_program(&mut self, name: &str, text: &str) {
        self.write_program(&format!("programs/{name}"), text);
        self.programs = Some(self.path("programs"));
    }

    /// Writes a program `hook` that records the variables of each event in `hook.EVENT`, and its calls in `hook.calls`.
    pub(crate) fn write_hook(&self) {
        let script = "#!/bin/sh\n/usr/bin/env | /usr/bin/sort | /bin/grep ^HOLDFAST_ > \"$0.$1\"\n/bin/echo \"$1\" >> \"$0.calls\"\n";
        self.write_program("hook", script);
    }

    /// The events for which the hook was called since the last query.
    pub(crate) fn take_hook_calls(&self) -> Vec<String> {
        let calls = String::from_utf8(self.read("hook.calls")).unwrap();
        std::fs::remove_file(self.path("hook.calls")).unwrap();
        calls.lines().map(str::to_owned).collect()
    }

    /// The program, to be run in the folder.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = match self.sees_files_of {
            Some(process) => program_inside(process, self.folder.path(), words),
            None => program(words),
        };
        let configurations = self.configurations.iter().map(|folder| ("XDG_CONFIG_HOME", folder));
        let system = std::env::var("PATH").unwrap_or_default();
        let programs = self.programs.iter();
        let search = programs.map(|folder| ("PATH", format!("{}:{system}", folder.display())));
        command
            .envs(configurations)
            .envs(search)
            .current_dir(self.folder.path())
            .env("HOLDFAST_REPOSITORY", self.path("repo"))
            .env("XDG_STATE_HOME", self.path("state"))
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// Runs the program with this standard input, which it need not read to the end.
    pub(crate) fn run_with(&self, words: &[&str], input: &[u8]) -> Output {
        let mut child = self.command(words).stdin(Stdio::piped()).spawn().unwrap();
        match child.stdin.take().unwrap().write_all(input) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => panic!("{error}"),
            _ => {}
        }
        child.wait_with_output().unwrap()
    }

    /// Runs the program, which must exit with this code.
    pub(crate) fn code(&self, code: i32, words: &[&str]) -> Output {
        let output = self.run(words);
        assert_code(&output, code, words);
        output
    }

    /// Runs the program, which must succeed; returns its standard output.
    pub(crate) fn ok(&self, words: &[&str]) -> String {
        stdout(&self.code(0, words))
    }

    /// Runs the program with `--json`, which must exit with this code; returns the document.
    pub(crate) fn json(&self, code: i32, words: &[&str]) -> Value {
        let words: Vec<&str> = words.iter().copied().chain(["--json"]).collect();
        let document = document_of(&stdout(&self.code(code, &words)));
        assert_eq!(document["exit_code"], code);
        document
    }

    /// Runs the program, which must succeed; returns the report.
    pub(crate) fn report(&self, words: &[&str]) -> Value {
        self.json(0, words)["report"].clone()
    }

    /// Runs the program, which must fail with this code; returns the kind of the error and its whole text.
    pub(crate) fn error(&self, code: i32, words: &[&str]) -> (String, String) {
        let document = self.json(code, words);
        let kind = document["error"]["kind"].as_str().unwrap().to_owned();
        (kind, document["error"].to_string())
    }

    /// Number of snapshots in the repository.
    pub(crate) fn snapshot_count(&self) -> usize {
        self.report(&["list"])["snapshots"].as_array().unwrap().len()
    }
}

/// The schema of all documents.
pub(crate) fn schema() -> &'static Value {
    static SCHEMA: LazyLock<Value> =
        LazyLock::new(|| serde_json::from_str(include_str!("../../../../docs/json.schema.json")).unwrap());
    &SCHEMA
}

/// Parses a document that was printed with `--json`, and checks it against the schema.
pub(crate) fn document_of(text: &str) -> Value {
    let document: Value = serde_json::from_str(text).unwrap();
    let violations = violations(schema(), &document);
    assert!(violations.is_empty(), "{violations:#?}\n{document:#}");
    document
}

pub(crate) fn assert_code(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(
        output.status.code(),
        Some(code),
        "{words:?}\n{}\n{}",
        stdout(output),
        stderr(output)
    );
}

/// Asserts that a program still runs; otherwise prints its exit status and what it printed.
#[track_caller]
pub(crate) fn assert_runs(child: &mut Child) {
    let Some(status) = child.try_wait().unwrap() else {
        return;
    };
    let mut printed = String::new();
    let outputs = [
        child.stdout.take().map(|from| Box::new(from) as Box<dyn Read>),
        child.stderr.take().map(|from| Box::new(from) as Box<dyn Read>),
    ];
    for mut output in outputs.into_iter().flatten() {
        output.read_to_string(&mut printed).unwrap();
    }
    panic!("the program ended too early, {status}:\n{printed}");
}

/// Incompressible bytes.
pub(crate) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    SeededRandom::new(seed).fill(&mut bytes);
    bytes
}
