//! The watchdog of a backup: a separate process that resumes a machine if the backup that paused it has died.
//!
//! It connects to the hypervisor before anything is paused. The backup announces each step and its maximum duration,
//! one per line. If the lines end without `done`, the backup has died. Then, or when a step takes too long, the
//! watchdog thaws the guest, resumes the machine, and removes the run's objects from QEMU.

use std::ffi::OsString;
use std::io::BufRead;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::qemu::memory::{cancel_held_migration, end_sending};
use holdfast_host::qemu::{RunId, remove_run};
use holdfast_host::qmp::QmpCommand;
use holdfast_host::{LineProcess, Machine, agent};

use super::hooks::HookEvent;
use crate::job::{Error, Result};

const READY: &str = "ready";
const DONE: &str = "done";
/// The run has ended, and its objects are still in QEMU.
const CLEAR: &str = "clear";
const OWES: &str = "owes";
/// How long the watchdog may take to connect and become ready.
const READY_DEADLINE: Duration = Duration::from_secs(20);
/// The timeout of each attempt to thaw.
const THAW_DEADLINE: Duration = Duration::from_secs(5);
const ATTEMPT_COUNT: u32 = 30;
const ATTEMPT_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait for a frozen guest whose machine is paused: its owner may have paused it meanwhile.
const PAUSE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Whether a process with these arguments is the watchdog of a run.
pub(crate) fn is_watchdog_of(words: &[String], run: RunId) -> bool {
    let number = run.0.to_string();
    words.iter().any(|word| word == "watchdog") && words.windows(2).any(|pair| pair[0] == "--run" && pair[1] == number)
}

/// A state of the machine that the watchdog must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum WatchdogState {
    /// Its file systems are frozen.
    Frozen,
    /// Its processors are paused.
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

static WATCHDOG_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether watchdogs resume the machines of this process if it is killed.
pub fn has_watchdog() -> bool {
    WATCHDOG_COUNT.load(Ordering::Relaxed) > 0
}

/// A watchdog of this process.
struct CountedWatchdog;

impl CountedWatchdog {
    fn new() -> Self {
        WATCHDOG_COUNT.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for CountedWatchdog {
    fn drop(&mut self) {
        WATCHDOG_COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The backup's end of the connection to its watchdog.
pub(crate) struct Guard {
    process: Option<LineProcess>,
    _counted: Option<CountedWatchdog>,
    /// Whether the watchdog finishes the cleanup by itself, so that this process does not wait for it.
    has_the_rest: bool,
}

impl Guard {
    /// Starts the watchdog, and waits until it is ready. Without a command there is none, as in tests.
    pub(crate) fn start(command: Option<&[OsString]>) -> Result<Self> {
        let Some((program, arguments)) = command.and_then(<[OsString]>::split_first) else {
            return Ok(Self::absent());
        };
        let process =
            LineProcess::start(program, arguments).map_err(|source| Error::NoWatchdog { source: Some(source) })?;
        match process.receive_line(READY_DEADLINE) {
            Some(line) if line == READY => Ok(Self {
                process: Some(process),
                _counted: Some(CountedWatchdog::new()),
                has_the_rest: false,
            }),
            _ => Err(Error::NoWatchdog { source: None }),
        }
    }

    /// No watchdog, for machines that are not changed.
    pub(crate) fn absent() -> Self {
        Self {
            process: None,
            _counted: None,
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

    /// Announces that the machine's file systems will be frozen, for at most this long.
    pub(crate) fn about_to_freeze(&mut self, at_most: Duration) -> Result<()> {
        self.tell(&format!("{} {}", WatchdogState::Frozen.word(), at_most.as_millis()))
    }

    /// Announces that the machine will be paused, for at most this long.
    pub(crate) fn about_to_pause(&mut self, at_most: Duration) -> Result<()> {
        self.tell(&format!("{} {}", WatchdogState::Paused.word(), at_most.as_millis()))
    }

    /// Announces that the machine runs and is thawed.
    pub(crate) fn runs(&mut self) -> Result<()> {
        self.tell("runs")
    }

    /// Announces the events for which hooks must be called if this process dies.
    pub(crate) fn owes(&mut self, events: &[HookEvent]) -> Result<()> {
        let words: Vec<&str> = events.iter().map(|event| event.word()).collect();
        self.tell(&format!("{OWES} {}", words.join(" ")))
    }

    /// Leaves the remaining cleanup to the watchdog, without waiting for it.
    pub(crate) fn leave_the_rest(&mut self) {
        self.has_the_rest = true;
    }

    /// Whether cleanup is left to the watchdog.
    pub(crate) fn has_the_rest(&self) -> bool {
        self.has_the_rest
    }

    /// Has the watchdog resume the machine and remove what is left of the run from QEMU. The caller does not wait: the
    /// watchdog may need the monitor that the caller still uses.
    pub(crate) fn hand_over(mut self) {
        self.tell(CLEAR).ok();
    }

    /// Announces that nothing of the run is left.
    pub(crate) fn done(mut self) {
        self.tell(DONE).ok();
        if let Some(process) = self.process.take().filter(|_| !self.has_the_rest) {
            process.close().ok();
        }
    }
}

/// What a watchdog can do besides requests to the hypervisor.
pub struct WatchdogTools<'a> {
    /// Takes the connections that are needed to resume the machine away from the backup; called if the pause is longer
    /// than announced.
    pub evict: &'a dyn Fn(),
    /// Calls the hooks that a dead backup has not called.
    pub call: &'a dyn Fn(&[HookEvent]),
}

/// Watches a machine until the backup is done or has died. Returns its repairs as text.
///
/// `lines` are the backup's announcements; `ready` is called when the watchdog is watching.
pub fn watch_over(
    machine: &dyn Machine,
    run: u32,
    lines: impl BufRead + Send + 'static,
    clock: &dyn Clock,
    tools: &WatchdogTools<'_>,
    ready: impl FnOnce(&str),
) -> Vec<String> {
    let (send, received) = channel();
    // The thread ends when its input ends; the process does not wait for it.
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
        repaired: Vec::new(),
    };
    loop {
        let line = match watch.until {
            None => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => received.recv_timeout(until.saturating_sub(clock.now())),
        };
        match line {
            Ok(line) if line == DONE => {
                // Repair what the backup could not undo itself.
                watch.repair();
                return watch.repaired;
            }
            Ok(line) if line == CLEAR => {
                watch.repair();
                watch.clear();
                return watch.repaired;
            }
            Ok(line) => watch.hear(&line),
            Err(RecvTimeoutError::Timeout) => {
                if watch.states.contains(&WatchdogState::Paused) {
                    (tools.evict)();
                }
                watch.repair();
            }
            Err(RecvTimeoutError::Disconnected) => {
                watch.repair();
                watch.clear();
                (tools.call)(&watch.owed);
                return watch.repaired;
            }
        }
    }
}

struct WatchedMachine<'a> {
    machine: &'a dyn Machine,
    clock: &'a dyn Clock,
    run: RunId,
    /// When the present state has lasted too long.
    until: Option<Duration>,
    states: Vec<WatchdogState>,
    /// The events for which hooks must be called if the backup dies.
    owed: Vec<HookEvent>,
    repaired: Vec<String>,
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
                // Repeating an announcement restarts its time; another announcement does not shorten the time of
                // earlier ones.
                let is_only_one = self.states.iter().all(|known| *known == state);
                let others = self.until.filter(|_| !is_only_one);
                self.until = Some(others.map_or(until, |earlier| earlier.min(until)));
                if !self.states.contains(&state) {
                    self.states.push(state);
                }
            }
        }
    }

    /// Resumes the machine. The processors come first: without them no agent answers.
    fn repair(&mut self) {
        self.until = None;
        let states = std::mem::take(&mut self.states);
        if states.contains(&WatchdogState::Paused) {
            let (clock, run) = (self.clock, self.run);
            let resume = || {
                // A machine that does not respond cannot be resumed either.
                end_sending(self.machine.monitor(), clock, run).map_err(|error| error.to_string())?;
                let command = QmpCommand::new("cont", serde_json::Value::Null);
                self.machine
                    .monitor()
                    .execute(&command)
                    .map(drop)
                    .map_err(|error| error.to_string())
            };
            self.attempt("resumed the machine", resume);
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

    /// The guest agent of a paused machine does not respond. A machine that its owner has paused is not resumed here;
    /// it is thawed when it runs again.
    fn wait_until_it_runs(&self) {
        let until = self.clock.now() + PAUSE_MAX;
        let status = QmpCommand::new("query-status", serde_json::Value::Null);
        loop {
            let monitor = self.machine.monitor();
            monitor.wake().ok();
            let is_paused = monitor.execute(&status).is_ok_and(|status| status["running"] == false);
            if !is_paused || self.clock.now() >= until {
                return;
            }
            self.clock.sleep(ATTEMPT_INTERVAL);
        }
    }

    /// Removes the run's objects from QEMU. A migration that the command has left would hold its machine forever.
    fn clear(&mut self) {
        let (machine, clock, run) = (self.machine, self.clock, self.run);
        let clear = || {
            let monitor = machine.monitor();
            cancel_held_migration(monitor, clock)
                .and_then(|()| remove_run(monitor, clock, run))
                .map_err(|error| error.to_string())
        };
        self.attempt("removed what the command had left in QEMU", clear);
    }

    fn attempt(&mut self, what: &str, act: impl Fn() -> std::result::Result<(), String>) {
        let mut last = String::new();
        for _ in 0..ATTEMPT_COUNT {
            // The connection may have been closed while idle. If this fails, the next step fails, too, with a more
            // useful error.
            self.machine.monitor().wake().ok();
            match act() {
                Ok(()) => {
                    self.repaired.push(what.to_owned());
                    return;
                }
                Err(error) => last = error,
            }
            // The run's objects in QEMU have ended with it, and nothing is paused or frozen.
            if self.machine.ended().is_some() {
                return;
            }
            self.clock.sleep(ATTEMPT_INTERVAL);
        }
        self.repaired.push(format!("NOT {what}: {last}"));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_block::{Clock as _, ManualClock};
    use holdfast_host::qmp::{Monitor, MonitorError, QmpCommand, Result as QmpResult};
    use holdfast_host::{Description, Error as HostError, Machine, MachineDisk, MachineEnd, Result as HostResult};

    use super::{CLEAR, WatchdogTools, watch_over};

    /// A machine whose QEMU has ended.
    struct EndedMachine;

    impl Monitor for EndedMachine {
        fn execute(&self, _command: &QmpCommand) -> QmpResult<serde_json::Value> {
            Err(MonitorError::Gone {
                during: "a test".to_owned(),
                source: None,
            })
        }
    }

    impl Machine for EndedMachine {
        fn name(&self) -> &'static str {
            "ended"
        }

        fn describe(&self) -> HostResult<Description> {
            Err(HostError::NoSuchMachine {
                name: "ended".to_owned(),
                hypervisor: "test".to_owned(),
            })
        }

        fn size_of(&self, _disk: &MachineDisk) -> Option<u64> {
            None
        }

        fn ended(&self) -> Option<MachineEnd> {
            Some(MachineEnd::SwitchedOff)
        }

        fn configuration(&self) -> HostResult<Vec<(String, Vec<u8>)>> {
            Ok(Vec::new())
        }

        fn monitor(&self) -> &dyn Monitor {
            self
        }

        fn ask_agent(&self, _command: &str, _deadline: Duration) -> HostResult<String> {
            Err(HostError::NoSuchMachine {
                name: "ended".to_owned(),
                hypervisor: "test".to_owned(),
            })
        }
    }

    /// The watchdog holds the standard error of the backup open. A minute of retries would delay every program that
    /// reads it to the end.
    #[test]
    fn ends_at_once_when_the_machine_has_ended() {
        for lines in [
            format!("paused 0\nfrozen 0\n{CLEAR}\n"),
            "paused 60000\nfrozen 60000\n".to_owned(),
        ] {
            let clock = ManualClock::new();
            let tools = WatchdogTools {
                evict: &|| (),
                call: &|_| (),
            };
            let lines = std::io::Cursor::new(lines.into_bytes());
            let repaired = watch_over(&EndedMachine, 1, lines, &clock, &tools, |_| ());
            assert!(repaired.is_empty(), "{repaired:?}");
            assert_eq!(clock.now(), Duration::ZERO);
        }
    }
}
