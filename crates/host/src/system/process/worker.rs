//! A long-running program that can be stopped.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::secrets::command_with_secrets;
use super::{ProcessOutcome, outcome_of};

/// Limit on the bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// How many of the last lines of standard error are kept.
const LINES_KEPT: usize = 20;
/// Limit on the bytes of a line; a longer one is split.
const LINE_BYTES_MAX: u64 = 4096;
/// How long to wait for the rest of the output after the exit: a child process that is still running may keep the
/// pipe open.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);

/// The command of a worker, with its environment.
pub struct WorkerRequest<'a> {
    /// The program.
    pub program: &'a Path,
    /// The arguments.
    pub arguments: &'a [String],
    /// Additional environment variables.
    pub variables: &'a [(&'static str, String)],
    /// Environment variables to remove.
    pub withheld: &'a [String],
    /// A locked file that becomes the standard input, so that the lock is held until the program ends.
    pub lock: File,
}

/// A running program in a separate process group.
///
/// Dropping this does not end the program.
pub struct Worker {
    child: Child,
    answer: Receiver<Vec<u8>>,
    last_lines: Arc<Mutex<VecDeque<String>>>,
    said_all: Receiver<()>,
}

/// How a worker ended, and its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerOutput {
    /// How the program ended.
    pub outcome: ProcessOutcome,
    /// The text that the program wrote on standard output.
    pub answer: Vec<u8>,
    /// The last lines that the program wrote on standard error.
    pub lines: Vec<String>,
}

impl Worker {
    /// Starts the program. `on_line` receives each line of its standard error. `ended` is called when the program has
    /// ended, before [`finish`](Self::finish), which must follow.
    pub fn start(
        order: WorkerRequest<'_>,
        on_line: impl Fn(&str) + Send + 'static,
        ended: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<Self> {
        let mut command = command_with_secrets(order.program);
        for name in order.withheld {
            command.env_remove(name);
        }
        let mut child = command
            .args(order.arguments)
            .envs(order.variables.iter().map(|(name, value)| (name, value)))
            .stdin(order.lock)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let (send_answer, answer) = channel();
        let (send_all, said_all) = channel();
        let last_lines = Arc::new(Mutex::new(VecDeque::new()));
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let kept = Arc::clone(&last_lines);
        let threads = start_thread("answer", move || read_answer(stdout, &send_answer))
            .and_then(|()| start_thread("lines", move || read_lines(stderr, &kept, &on_line, &send_all)))
            .and_then(|()| {
                let process = Pid::from_child(&child);
                start_thread("end", move || {
                    // The process remains a zombie until `finish`, so its process id is not reused.
                    while let Err(rustix::io::Errno::INTR) =
                        waitid(WaitId::Pid(process), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
                    {
                    }
                    ended();
                })
            });
        if let Err(error) = threads {
            child.kill()?;
            child.wait()?;
            return Err(error);
        }
        Ok(Self {
            child,
            answer,
            last_lines,
            said_all,
        })
    }

    /// The process id.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM to the process group.
    pub fn stop(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends SIGKILL to the process group.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        // The process was not waited for yet, so its process id is still valid. If it has ended, it needs no signal.
        kill_process_group(Pid::from_child(&self.child), signal).ok();
    }

    /// Waits until the program has ended.
    pub fn finish(mut self) -> std::io::Result<WorkerOutput> {
        let status = self.child.wait()?;
        let answer = self.answer.recv_timeout(OUTPUT_GRACE).unwrap_or_default();
        self.said_all.recv_timeout(OUTPUT_GRACE).ok();
        let lines = self.last_lines.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(WorkerOutput {
            outcome: outcome_of(status),
            answer,
            lines: lines.iter().cloned().collect(),
        })
    }
}

fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

fn read_answer(stdout: Option<impl Read>, send: &Sender<Vec<u8>>) {
    let Some(mut stdout) = stdout else { return };
    let mut bytes = Vec::new();
    (&mut stdout).take(ANSWER_BYTES_MAX).read_to_end(&mut bytes).ok();
    // If there is no receiver any more, the output is not needed.
    send.send(bytes).ok();
    // Reads the rest: a program that writes to a closed pipe is killed by SIGPIPE.
    std::io::copy(&mut stdout, &mut std::io::sink()).ok();
}

fn read_lines(stderr: Option<impl Read>, kept: &Mutex<VecDeque<String>>, on_line: &dyn Fn(&str), send: &Sender<()>) {
    let Some(stderr) = stderr else { return };
    let mut reader = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        match (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\r', '\n']);
        on_line(text);
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == LINES_KEPT {
            kept.pop_front();
        }
        kept.push_back(text.to_owned());
    }
    send.send(()).ok();
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::fs::{FlockOperation, flock};

    use super::{Worker, WorkerOutput, WorkerRequest};
    use crate::system::process::ProcessOutcome;

    const LONG: Duration = Duration::from_secs(30);

    fn start(script: &str, lock: File) -> (Worker, std::sync::mpsc::Receiver<()>) {
        let (send, ended) = channel();
        let order = WorkerRequest {
            program: Path::new("/bin/sh"),
            arguments: &["-c".to_owned(), script.to_owned()],
            variables: &[("SAID", "a b".to_owned())],
            withheld: &[],
            lock,
        };
        let worker = Worker::start(order, |_| {}, move || send.send(()).unwrap()).unwrap();
        (worker, ended)
    }

    fn work(script: &str) -> WorkerOutput {
        let (worker, ended) = start(script, File::open("/dev/null").unwrap());
        ended.recv_timeout(LONG).unwrap();
        worker.finish().unwrap()
    }

    #[test]
    fn output_and_exit_code_are_returned() {
        let worked = work("echo \"$SAID\"; for i in $(seq 30); do echo $i >&2; done; exit 3");
        assert_eq!(worked.outcome, ProcessOutcome::ExitCode(3));
        assert_eq!(worked.answer, b"a b\n");
        assert_eq!(worked.lines.len(), 20);
        assert_eq!((&worked.lines[0][..], &worked.lines[19][..]), ("11", "30"));
        // A child process that is still running is not waited for, and the output is bounded.
        let worked = work("sleep 20 & head -c 10000000 /dev/zero; head -c 10000000 /dev/zero >&2");
        assert_eq!(worked.outcome, ProcessOutcome::Success);
        assert!(worked.lines.iter().map(String::len).sum::<usize>() <= 20 * 4096);
    }

    #[test]
    fn a_stop_reaches_the_whole_process_group() {
        let folder = tempfile::tempdir().unwrap();
        let alive = folder.path().join("alive");
        let script = format!(
            "(sleep 5; echo > {}) & trap 'exit 7' TERM; echo >&2; while :; do wait; done",
            alive.display()
        );
        let (worker, ended) = start(&script, File::open("/dev/null").unwrap());
        while worker.last_lines.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        worker.stop();
        ended.recv_timeout(LONG).unwrap();
        assert_eq!(worker.finish().unwrap().outcome, ProcessOutcome::ExitCode(7));
        let (worker, ended) = start("trap '' TERM; sleep 100", File::open("/dev/null").unwrap());
        worker.kill();
        ended.recv_timeout(LONG).unwrap();
        assert_eq!(worker.finish().unwrap().outcome, ProcessOutcome::Signal(9));
        assert!(!alive.exists());
    }

    /// The worker also holds the lock, even after its parent was killed.
    #[test]
    fn a_worker_holds_its_lock_until_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = File::create(&path).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        let (worker, ended) = start("sleep 100", lock);
        let again = File::open(&path).unwrap();
        assert!(flock(&again, FlockOperation::NonBlockingLockExclusive).is_err());
        worker.kill();
        ended.recv_timeout(LONG).unwrap();
        worker.finish().unwrap();
        // Programs that the worker has started may end later. So does the copy of the file in a process that another test
        // has forked, and that has not executed its program yet.
        let (locked, is_locked) = channel();
        std::thread::spawn(move || locked.send(flock(&again, FlockOperation::LockExclusive)));
        is_locked.recv_timeout(LONG).unwrap().unwrap();
    }
}
