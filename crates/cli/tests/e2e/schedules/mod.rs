//! The daemon as users see it: real processes, short schedules, and a receiver for its notifications.

mod files;
mod mishaps;
mod notifications;
mod running;

pub(crate) use files::reports_of_schedules;

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::rig::{Rig, noise};

/// Longer than any successful step here.
const LONG: Duration = Duration::from_secs(120);

/// Waits until `is_so`, with a timeout.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let clock = SystemClock::new();
    while !is_so() {
        assert!(clock.now() < LONG, "{what} did not happen");
        clock.sleep(Duration::from_millis(50));
    }
}

/// A running daemon, which is killed on drop.
pub(crate) struct Daemon {
    child: Child,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Daemon {
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops the daemon; returns its exit code.
    pub(crate) fn stop(mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        self.child.wait().unwrap().code()
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A folder with a repository, an image in it, and a holdfast.toml.
pub(crate) struct Host {
    pub(crate) rig: Rig,
}

impl Host {
    /// `jobs` is the end of holdfast.toml, in which `{here}` is replaced by the folder.
    pub(crate) fn new(jobs: &str) -> Self {
        let host = Self { rig: Rig::new() };
        host.rig.write("a.raw", &noise(20_000, 1));
        host.configure(jobs);
        host
    }

    pub(crate) fn configure(&self, jobs: &str) {
        let text = format!(
            "version = 1\n[daemon]\nstop_within = \"1s\"\njobs_at_once = 4\n[repositories.main]\npath = \"{{here}}/repo\"\n{jobs}"
        );
        self.rig.write("holdfast.toml", self.filled(&text).as_bytes());
    }

    pub(crate) fn filled(&self, text: &str) -> String {
        text.replace("{here}", self.rig.path("").to_str().unwrap().trim_end_matches('/'))
    }

    /// Creates an executable script in `bin`.
    pub(crate) fn program(&self, name: &str, script: &str) {
        let script = format!("#!/bin/sh\n{}\n", self.filled(script));
        self.rig.write_program(&format!("bin/{name}"), &script);
    }

    /// Starts the daemon; its output is appended to the file `log`.
    pub(crate) fn start(&self, variables: &[(&str, &str)]) -> Daemon {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.rig.path("log"))
            .unwrap();
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.rig.path("bin").display());
        let mut command = self.rig.command(&at_home(&["daemon"]));
        command.env("PATH", path).envs(variables.iter().copied());
        let child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        Daemon { child }
    }

    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&self.rig.read("log")).into_owned()
    }

    /// Entries of the journal: runs, or notices.
    pub(crate) fn journal(&self, entry: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.rig.path("state/runs.jsonl")).unwrap_or_default();
        let values = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        values.filter(|value| value["entry"] == entry).collect()
    }

    /// The outcomes of a job's runs.
    pub(crate) fn outcomes(&self, job: &str) -> Vec<String> {
        let runs = self.journal("run").into_iter().filter(|run| run["job"] == job);
        runs.map(|run| run["outcome"].as_str().unwrap().to_owned()).collect()
    }

    pub(crate) fn wait_for(&self, job: &str, outcomes: &[&str]) {
        let is_so = || {
            self.outcomes(job)
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .starts_with(outcomes)
        };
        let clock = SystemClock::new();
        while !is_so() {
            assert!(clock.now() < LONG, "{job}: {:?}\n{}", self.outcomes(job), self.log());
            clock.sleep(Duration::from_millis(50));
        }
    }
}

/// Arguments with which the program finds the files of a [`Host`].
pub(crate) fn at_home<'w>(words: &[&'w str]) -> Vec<&'w str> {
    let more: &[&str] = match words[0] {
        "runs" => &["--state", "state"],
        "notify" => &["--config", "holdfast.toml"],
        _ => &["--config", "holdfast.toml", "--state", "state"],
    };
    words.iter().chain(more).copied().collect()
}

/// A server on a port of this host that receives posts, and rejects the first few.
pub(crate) struct Receiver {
    pub(crate) url: String,
    received: Arc<Mutex<Vec<(String, String)>>>,
}

impl Receiver {
    pub(crate) fn new(refused_count: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let received = Arc::new(Mutex::new(Vec::new()));
        let writer = Arc::clone(&received);
        std::thread::spawn(move || {
            for (index, stream) in listener.incoming().enumerate() {
                let mut stream = BufReader::new(stream.unwrap());
                let (mut head, mut length) = (String::new(), 0);
                loop {
                    let mut line = String::new();
                    if stream.read_line(&mut line).unwrap() == 0 || line == "\r\n" {
                        break;
                    }
                    if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap();
                    }
                    head.push_str(&line);
                }
                let mut body = vec![0; length];
                stream.read_exact(&mut body).unwrap();
                let answer = if index < refused_count { "500 Not now" } else { "200 OK" };
                let answer = format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
                if index >= refused_count {
                    writer.lock().unwrap().push((head, String::from_utf8(body).unwrap()));
                }
            }
        });
        Self { url, received }
    }

    /// Heads and bodies of the posts so far.
    pub(crate) fn received(&self) -> Vec<(String, String)> {
        self.received.lock().unwrap().clone()
    }

    /// The subjects of the posts in JSON.
    pub(crate) fn subjects(&self) -> Vec<String> {
        let documents = self
            .received()
            .into_iter()
            .map(|(_, body)| serde_json::from_str::<Value>(&body).unwrap());
        documents
            .map(|document| document["subject"].as_str().unwrap().to_owned())
            .collect()
    }
}
