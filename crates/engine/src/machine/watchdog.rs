//! The watchdog of a backup: a process of its own that lets a machine run on when the one that stopped it has died.
//!
//! It is connected to the hypervisor before anything is stopped. The backup tells it, by the line, what it is about to do and how
//! long that may take; the end of the lines without `done` means that the backup is dead. Then, or when a time is over, the
//! watchdog thaws the guest, lets the machine run on, and takes what the run has put into QEMU out again.

use std::ffi::OsString;
use std::io::BufRead;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::qemu::memory::end_sending;
use holdfast_host::qemu::{RunId, remove_run};
use holdfast_host::qmp::QmpCommand;
use holdfast_host::{LineProcess, Machine, agent};

use super::hooks::HookEvent;
use crate::job::{Error, Result};

const READY: &str = "ready";
const DONE: &str = "done";
/// The run has ended, and what it has put into QEMU is still there.
const CLEAR: &str = "clear";
const OWES: &str = "owes";
/// How long the watchdog may take to be ready: it has to connect.
const READY_DEADLINE: Duration = Duration::from_secs(20);
/// For each attempt to thaw.
const THAW_DEADLINE: Duration = Duration::from_secs(5);
const ATTEMPT_COUNT: u32 = 30;
const ATTEMPT_INTERVAL: Duration = Duration::from_secs(1);
/// How long a guest that is frozen is waited for while its machine stands still: its owner may have paused it meanwhile.
const STANDSTILL_MAX: Duration = Duration::from_secs(24 * 3600);

/// Whether a process with these words is the watchdog of a run.
pub(crate) fn is_watchdog_of(words: &[String], run: RunId) -> bool {
    let number = run.0.to_string();
    words.iter().any(|word| word == "watchdog") && words.windows(2).any(|pair| pair[0] == "--run" && pair[1] == number)
}

/// What may be the matter with a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum WatchdogState {
    /// Its file systems are frozen.
    Frozen,
    /// Its processors stand still.
    Paused,
}

impl WatchdogState {
    const ALL: [Self; 2] = [Self::Frozen, Self::Paused];

    fn word(self) -> &'static str {
        match self {
            Self::Frozen => "frozen",
            Self::Paused => "paused",
        }
    }
}

/// The backup's end of the line.
pub(crate) struct Guard {
    process: Option<LineProcess>,
    /// Whether no process waits for its end.
    has_the_rest: bool,
}

impl Guard {
    /// Starts the watchdog, and waits until it is ready. Without a command there is none: tests run without.
    pub(crate) fn start(command: Option<&[OsString]>) -> Result<Self> {
        let Some((program, arguments)) = command.and_then(<[OsString]>::split_first) else {
            return Ok(Self::nobody());
        };
        let process =
            LineProcess::start(program, arguments).map_err(|source| Error::NoWatchdog { source: Some(source) })?;
        match process.receive_line(READY_DEADLINE) {
            Some(line) if line == READY => Ok(Self {
                process: Some(process),
                has_the_rest: false,
            }),
            _ => Err(Error::NoWatchdog { source: None }),
        }
    }

    /// No watchdog, for machines that are not touched.
    pub(crate) fn nobody() -> Self {
        Self {
            process: None,
            has_the_rest: false,
        }
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        match &mut self.process {
            None => Ok(()),
            Some(process) => process
                .send_line(line)
                .map_err(|source| Error::NoWatchdog { source: Some(source) }),
        }
    }

    /// The machine's file systems are about to be frozen, for at most so long.
    pub(crate) fn about_to_freeze(&mut self, at_most: Duration) -> Result<()> {
        self.tell(&format!("{} {}", WatchdogState::Frozen.word(), at_most.as_millis()))
    }

    /// The machine is about to be stopped, for at most so long.
    pub(crate) fn about_to_pause(&mut self, at_most: Duration) -> Result<()> {
        self.tell(&format!("{} {}", WatchdogState::Paused.word(), at_most.as_millis()))
    }

    /// The machine runs, and is thawed.
    pub(crate) fn runs(&mut self) -> Result<()> {
        self.tell("runs")
    }

    /// The administrator's programs have to be called for these, should we die.
    pub(crate) fn owes(&mut self, events: &[HookEvent]) -> Result<()> {
        let words: Vec<&str> = events.iter().map(|event| event.word()).collect();
        self.tell(&format!("{OWES} {}", words.join(" ")))
    }

    /// What is not repaired by now is left to the watchdog when this ends, without waiting for it.
    pub(crate) fn leave_the_rest(&mut self) {
        self.has_the_rest = true;
    }

    /// Whether something is left to it.
    pub(crate) fn has_the_rest(&self) -> bool {
        self.has_the_rest
    }

    /// The watchdog lets the machine run and takes out of QEMU what is left of the run. The caller does not wait: the watchdog may need the
    /// monitor that the caller still has.
    pub(crate) fn hand_over(mut self) {
        self.tell(CLEAR).ok();
    }

    /// Nothing of the run is left.
    pub(crate) fn done(mut self) {
        self.tell(DONE).ok();
        if let Some(process) = self.process.take().filter(|_| !self.has_the_rest) {
            process.close().ok();
        }
    }
}

/// What a watchdog can do beside asking the hypervisor.
pub struct WatchdogTools<'a> {
    /// Takes away from the backup what is needed to let the machine run on; done where it stands still for longer than was said.
    pub evict: &'a dyn Fn(),
    /// Calls the administrator's programs for what a backup that is dead owes them.
    pub call: &'a dyn Fn(&[HookEvent]),
}

/// Watches over a machine until the backup says that it is done, or is dead. Returns what had to be repaired, in words.
///
/// `lines` are the backup's; `ready` is called when the watchdog watches.
pub fn watch_over(
    machine: &dyn Machine,
    run: u32,
    lines: impl BufRead + Send + 'static,
    clock: &dyn Clock,
    means: &WatchdogTools<'_>,
    ready: impl FnOnce(&str),
) -> Vec<String> {
    let (send, received) = channel();
    // It ends with its input; the process ends without it.
    std::thread::spawn(move || {
        for line in lines.lines().map_while(std::io::Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    ready(READY);
    let mut watch = WatchedMachine {
        machine,
        clock,
        run: RunId(run),
        until: None,
        states: Vec::new(),
        owed: Vec::new(),
        mended: Vec::new(),
    };
    loop {
        let line = match watch.until {
            None => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => received.recv_timeout(until.saturating_sub(clock.now())),
        };
        match line {
            Ok(line) if line == DONE => {
                // What the backup itself could not undo it has left to us.
                watch.mend();
                return watch.mended;
            }
            Ok(line) if line == CLEAR => {
                watch.mend();
                watch.clear();
                return watch.mended;
            }
            Ok(line) => watch.hear(&line),
            Err(RecvTimeoutError::Timeout) => {
                if watch.states.contains(&WatchdogState::Paused) {
                    (means.evict)();
                }
                watch.mend();
            }
            Err(RecvTimeoutError::Disconnected) => {
                watch.mend();
                watch.clear();
                (means.call)(&watch.owed);
                return watch.mended;
            }
        }
    }
}

struct WatchedMachine<'a> {
    machine: &'a dyn Machine,
    clock: &'a dyn Clock,
    run: RunId,
    /// When what the machine is in has lasted too long.
    until: Option<Duration>,
    states: Vec<WatchdogState>,
    /// What the administrator's programs have to be called for if the backup dies.
    owed: Vec<HookEvent>,
    mended: Vec<String>,
}

impl WatchedMachine<'_> {
    fn hear(&mut self, line: &str) {
        let (word, time) = line.split_once(' ').unwrap_or((line, ""));
        if word == OWES {
            let events = HookEvent::ALL.into_iter();
            self.owed = events
                .filter(|event| time.split(' ').any(|word| word == event.word()))
                .collect();
            return;
        }
        match WatchdogState::ALL.into_iter().find(|state| state.word() == word) {
            None => {
                self.states.clear();
                self.until = None;
            }
            Some(state) => {
                let at_most = Duration::from_millis(time.parse().unwrap_or_default());
                let until = self.clock.now() + at_most;
                // Said again, it begins anew; what is said of something else ends no earlier for that.
                let is_only_one = self.states.iter().all(|known| *known == state);
                let others = self.until.filter(|_| !is_only_one);
                self.until = Some(others.map_or(until, |earlier| earlier.min(until)));
                if !self.states.contains(&state) {
                    self.states.push(state);
                }
            }
        }
    }

    /// Lets the machine run: first the processors, without which no agent answers.
    fn mend(&mut self) {
        self.until = None;
        let states = std::mem::take(&mut self.states);
        if states.contains(&WatchdogState::Paused) {
            let (clock, run) = (self.clock, self.run);
            let resume = || {
                // What cannot be asked cannot be told to run on either.
                end_sending(self.machine.monitor(), clock, run).map_err(|error| error.to_string())?;
                let command = QmpCommand::new("cont", serde_json::Value::Null);
                self.machine
                    .monitor()
                    .execute(&command)
                    .map(drop)
                    .map_err(|error| error.to_string())
            };
            self.attempt("let the machine run on", resume);
        }
        if states.contains(&WatchdogState::Frozen) {
            self.wait_until_it_runs();
            let thaw = || {
                agent::thaw(self.machine, THAW_DEADLINE)
                    .map(drop)
                    .map_err(|error| error.to_string())
            };
            self.attempt("thawed the guest", thaw);
        }
    }

    /// No agent answers in a machine that stands still. One that its owner has paused is his to resume, and thawed when it is.
    fn wait_until_it_runs(&self) {
        let until = self.clock.now() + STANDSTILL_MAX;
        let status = QmpCommand::new("query-status", serde_json::Value::Null);
        loop {
            let monitor = self.machine.monitor();
            monitor.wake().ok();
            let stands_still = monitor.execute(&status).is_ok_and(|status| status["running"] == false);
            if !stands_still || self.clock.now() >= until {
                return;
            }
            self.clock.sleep(ATTEMPT_INTERVAL);
        }
    }

    /// Takes out what the run has put into QEMU.
    fn clear(&mut self) {
        let (machine, clock, run) = (self.machine, self.clock, self.run);
        let clear = || remove_run(machine.monitor(), clock, run).map_err(|error| error.to_string());
        self.attempt("took what the backup had put into QEMU out again", clear);
    }

    fn attempt(&mut self, what: &str, act: impl Fn() -> std::result::Result<(), String>) {
        let mut last = String::new();
        for _ in 0..ATTEMPT_COUNT {
            // Its way may have been closed while nothing was to be done; then what is tried fails, and says more.
            self.machine.monitor().wake().ok();
            match act() {
                Ok(()) => {
                    self.mended.push(what.to_owned());
                    return;
                }
                Err(error) => last = error,
            }
            self.clock.sleep(ATTEMPT_INTERVAL);
        }
        self.mended.push(format!("NOT {what}: {last}"));
    }
}
