//! The watchdog of a backup: a process of its own that lets a machine run on when the one that stopped it has died.
//!
//! It is connected to the hypervisor before anything is stopped. The backup announces to it, line by line, what it is about to do and how
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
/// How long a guest that is frozen is waited for while its machine is paused: its owner may have paused it meanwhile.
const PAUSE_MAX: Duration = Duration::from_secs(24 * 3600);

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
            return Ok(Self::absent());
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
    pub(crate) fn absent() -> Self {
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
    /// Takes away from the backup what is needed to let the machine run on; done where it is paused for longer than was announced.
    pub evict: &'a dyn Fn(),
    /// Calls the administrator's programs for what a backup that is dead owes them.
    pub call: &'a dyn Fn(&[HookEvent]),
}

/// Watches over a machine until the backup says that it is done, or is dead. Returns what it repaired, as text.
///
/// `lines` are the backup's; `ready` is called when the watchdog watches.
pub fn watch_over(
    machine: &dyn Machine,
    run: u32,
    lines: impl BufRead + Send + 'static,
    clock: &dyn Clock,
    tools: &WatchdogTools<'_>,
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
        repaired: Vec::new(),
    };
    loop {
        let line = match watch.until {
            None => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => received.recv_timeout(until.saturating_sub(clock.now())),
        };
        match line {
            Ok(line) if line == DONE => {
                // What the backup itself could not undo it has left to us.
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
    /// When what the machine is in has lasted too long.
    until: Option<Duration>,
    states: Vec<WatchdogState>,
    /// What the administrator's programs have to be called for if the backup dies.
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
    fn repair(&mut self) {
        self.until = None;
        let states = std::mem::take(&mut self.states);
        if states.contains(&WatchdogState::Paused) {
            let (clock, run) = (self.clock, self.run);
            let resume = || {
                // A machine that does not answer cannot be resumed either.
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

    /// The guest agent of a paused machine does not answer. A machine that its owner has paused is not resumed here; it is thawed when it runs again.
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
                    self.repaired.push(what.to_owned());
                    return;
                }
                Err(error) => last = error,
            }
            // All that the run had put into its QEMU has ended with it, and no processor and no file system waits.
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

    /// The watchdog has the standard error of the backup open. A minute of attempts would delay every program that reads it to its
    /// end.
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
