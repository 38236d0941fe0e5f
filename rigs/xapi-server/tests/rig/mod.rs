//! A server with a machine, and the client programs.

#![allow(dead_code, reason = "each test file uses a part of this")]
#![allow(clippy::disallowed_methods, reason = "tests run the peers")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use holdfast_block::SeededRandom;
use holdfast_xapi_server::{NewDisk, NewVm, Server};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A server with its folder.
pub(crate) struct Rig {
    pub(crate) server: Server,
    pub(crate) folder: TempDir,
    session: String,
}

impl Rig {
    /// Starts a server, and opens a session.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let disks = folder.path().join("disks");
        std::fs::create_dir(&disks).unwrap();
        let server = Server::start(&disks).unwrap();
        let mut rig = Self {
            server,
            folder,
            session: String::new(),
        };
        rig.log_in();
        rig
    }

    pub(crate) fn log_in(&mut self) {
        let answer = Self::ask(
            &self.server.address(),
            "session.login_with_password",
            &[json!("root"), json!("correct horse"), json!("2.3"), json!("test")],
        );
        answer["result"].as_str().unwrap().clone_into(&mut self.session);
    }

    pub(crate) fn session(&self) -> &str {
        &self.session
    }

    /// Adds a machine with a disk that contains some data and many zeroes.
    pub(crate) fn add_vm(&self, power_state: &str, size_bytes: u64) -> String {
        let vm = NewVm {
            name: "machine".to_owned(),
            disks: vec![NewDisk::new("xvda", size_bytes)],
            power_state: power_state.to_owned(),
        };
        let vm = self.server.add_vm(&vm);
        let bytes = SeededRandom::new(7).bytes(300_000);
        self.server.write_disk(&vm, "xvda", 70_000, &bytes);
        self.server.write_disk(&vm, "xvda", size_bytes - 1000, &bytes[..1000]);
        vm
    }

    /// The complete answer to a call over JSON-RPC 2.0.
    pub(crate) fn ask(address: &str, method: &str, parameters: &[Value]) -> Value {
        let call = json!({"jsonrpc": "2.0", "method": method, "params": parameters, "id": 1}).to_string();
        let url = format!("https://{address}/jsonrpc");
        let output = curl(&["-X", "POST", "--data-binary", &call, &url]);
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{method}: {error}: {}", String::from_utf8_lossy(&output.stdout)))
    }

    /// The result of a call in the session, or its error as a list.
    pub(crate) fn try_call(&self, method: &str, parameters: &[Value]) -> Result<Value, Vec<String>> {
        let mut all = vec![json!(self.session)];
        all.extend_from_slice(parameters);
        let answer = Self::ask(&self.server.address(), method, &all);
        if let Some(result) = answer.get("result") {
            return Ok(result.clone());
        }
        let error = &answer["error"];
        let parameters = error["data"].as_array().unwrap().iter();
        let words = std::iter::once(&error["message"]).chain(parameters);
        Err(words.map(|word| word.as_str().unwrap().to_owned()).collect())
    }

    pub(crate) fn call(&self, method: &str, parameters: &[Value]) -> Value {
        self.try_call(method, parameters).unwrap()
    }

    /// Takes a snapshot of a machine; returns references to it and to the snapshot of its disk.
    pub(crate) fn snapshot(&self, vm_uuid: &str) -> (Value, Value) {
        let vm = self.call("VM.get_by_uuid", &[json!(vm_uuid)]);
        let snapshot = self.call("VM.snapshot", &[vm, json!("snapshot")]);
        let disk = self.disk_of(&snapshot);
        (snapshot, disk)
    }

    /// The disk of a machine that has only one.
    pub(crate) fn disk_of(&self, vm: &Value) -> Value {
        let vbds = self.call("VM.get_VBDs", std::slice::from_ref(vm));
        let disks = vbds.as_array().unwrap().iter();
        disks
            .map(|vbd| self.call("VBD.get_VDI", std::slice::from_ref(vbd)))
            .find(|vdi| vdi != "OpaqueRef:NULL")
            .unwrap()
    }

    /// The URL of a transfer in the session.
    pub(crate) fn url(&self, address: &str, path: &str, query: &[(&str, &str)]) -> String {
        let mut url = format!("https://{address}{path}?session_id={}", self.session);
        for (name, value) in query {
            url.extend(["&", name, "=", value]);
        }
        url
    }

    /// Creates a task for a transfer.
    pub(crate) fn task(&self) -> String {
        let task = self.call("task.create", &[json!("transfer"), json!("")]);
        task.as_str().unwrap().to_owned()
    }

    /// Status and error of a task. Destroys the task.
    pub(crate) fn end_of(&self, task: &str) -> (String, Vec<String>) {
        let record = self.call("task.get_record", &[json!(task)]);
        let status = record["status"].as_str().unwrap().to_owned();
        let words = record["error_info"].as_array().unwrap().iter();
        let words = words.map(|word| word.as_str().unwrap().to_owned()).collect();
        self.call("task.destroy", &[json!(task)]);
        (status, words)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Runs curl without checking certificates; returns its output.
pub(crate) fn curl(arguments: &[&str]) -> Output {
    let output = Command::new("curl")
        .args(["--silent", "--insecure", "--max-time", "60"])
        .args(arguments)
        .output();
    output.expect("curl has to be installed: make setup")
}

/// Downloads `url` to `file`; returns the exit code of curl and the HTTP status.
pub(crate) fn download(url: &str, file: &Path) -> (i32, u16) {
    transfer(&["--output", file.to_str().unwrap(), url])
}

/// Uploads `file` to `url`.
pub(crate) fn upload(file: &Path, url: &str) -> (i32, u16) {
    transfer(&["--output", "/dev/null", "--upload-file", file.to_str().unwrap(), url])
}

fn transfer(arguments: &[&str]) -> (i32, u16) {
    let output = curl(&[&["--write-out", "%{stderr}%{http_code}"], arguments].concat());
    let status = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), status.parse().unwrap_or(0))
}

/// Runs a program, which must succeed; returns its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}: make setup installs it"));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Whether a program succeeds.
pub(crate) fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}: make setup installs it"));
    output.status.success()
}

/// A Python interpreter with the module XenAPI.
pub(crate) fn python() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let python = root.join("target/peers/bin/python");
    assert!(python.exists(), "{} is missing: make setup makes it", python.display());
    python.to_str().unwrap().to_owned()
}

/// Runs a script of `tests/peers`; returns the JSON that it prints.
pub(crate) fn peer(script: &str, arguments: &[&Path]) -> Value {
    let arguments: Vec<&str> = arguments.iter().map(|argument| argument.to_str().unwrap()).collect();
    let script = script_path(script);
    let output = run(&python(), &[&[script.as_str()], arguments.as_slice()].concat());
    serde_json::from_str(&output).unwrap()
}

pub(crate) fn script_path(script: &str) -> String {
    format!("{}/tests/peers/{script}", env!("CARGO_MANIFEST_DIR"))
}
