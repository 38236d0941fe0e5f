//! The administrator's hook programs, which a backup of a machine calls.
//!
//! Each is called with the event as its only argument; environment variables hold the details. They are called one
//! after another, and never while the machine's file systems are frozen: `pre-freeze` comes before, `post-thaw` after.
//! A program that was called for the event that begins something is also called for the event that ends it, even after
//! errors. If the backup is killed, its watchdog makes that call ([`Hooks::owed`]).

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_host::{Call, MachineState, MachineSummary, ProcessOutcome, why_untrusted};

use crate::job::{Error, Job, Result};

/// The programs to call, and how.
#[derive(Debug, Clone)]
pub struct Hooks {
    /// The programs, in the order of their calls.
    pub programs: Vec<PathBuf>,
    /// The timeout of each call.
    pub time_out: Duration,
    /// The effect of a failed call.
    pub on_failure: HookFailure,
    /// Environment variables that hooks must not receive.
    pub withheld: Vec<String>,
    /// The hypervisor of the machine, for [`VARIABLES`].
    pub hypervisor: String,
}

/// The effect of a failed call before anything was done to the machine. Later failures only cause warnings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HookFailure {
    /// The backup of the machine is aborted.
    #[default]
    Abort,
    /// The backup continues, with a warning.
    Warn,
}

/// The events that programs are called for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HookEvent {
    /// Before anything else.
    JobStart,
    /// Before the file systems of a running machine are frozen and the machine is paused.
    PreFreeze,
    /// The machine runs again.
    PostThaw,
    /// The snapshot is committed.
    JobEnd,
    /// The backup of the machine has failed.
    JobAbort,
}

/// The environment variables of calls, and their meaning.
pub const VARIABLES: [(&str, &str); 11] = [
    (MACHINE, "the name that the snapshot is listed under"),
    (NAME, "the machine's name at its hypervisor"),
    (UUID, "its UUID"),
    (
        HYPERVISOR,
        "where it is: qemu:///system, qmp:/run/web1.qmp, vbox:, xen://pool",
    ),
    (STATE, "running, paused or \"shut off\", as the backup begins"),
    (RUN, "the number of the run"),
    (
        FROZEN_MS,
        "post-thaw: how long its file systems were frozen, 0 if they were not; not known of VirtualBox and XenServer",
    ),
    (
        PAUSED_MS,
        "post-thaw: how long it was paused; not known of VirtualBox and XenServer",
    ),
    (SNAPSHOT, "job-end: the id of the snapshot"),
    (CONSISTENCY, "job-end: \"file system\", memory, crash or \"shut off\""),
    (ERROR, "job-abort: why"),
];

const MACHINE: &str = "HOLDFAST_MACHINE";
const NAME: &str = "HOLDFAST_MACHINE_NAME";
const UUID: &str = "HOLDFAST_MACHINE_UUID";
const HYPERVISOR: &str = "HOLDFAST_HYPERVISOR";
const STATE: &str = "HOLDFAST_MACHINE_STATE";
const RUN: &str = "HOLDFAST_RUN";
const FROZEN_MS: &str = "HOLDFAST_FROZEN_MS";
const PAUSED_MS: &str = "HOLDFAST_PAUSED_MS";
const SNAPSHOT: &str = "HOLDFAST_SNAPSHOT";
const CONSISTENCY: &str = "HOLDFAST_CONSISTENCY";
const ERROR: &str = "HOLDFAST_ERROR";

impl HookEvent {
    /// All events, in their order.
    pub const ALL: [Self; 5] = [
        Self::JobStart,
        Self::PreFreeze,
        Self::PostThaw,
        Self::JobEnd,
        Self::JobAbort,
    ];

    /// The argument of a call.
    pub const fn word(self) -> &'static str {
        match self {
            Self::JobStart => "job-start",
            Self::PreFreeze => "pre-freeze",
            Self::PostThaw => "post-thaw",
            Self::JobEnd => "job-end",
            Self::JobAbort => "job-abort",
        }
    }

    /// Whether the event comes before anything was done to the machine.
    fn may_abort(self) -> bool {
        matches!(self, Self::JobStart | Self::PreFreeze)
    }
}

/// Environment variables of a call.
type Variables = Vec<(&'static str, String)>;

/// The hook calls of one machine's backup.
pub(crate) struct HookCalls<'a> {
    hooks: &'a Hooks,
    job: Job<'a>,
    common: Variables,
}

/// How long a machine was paused or its file systems frozen.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Downtime {
    pub(crate) frozen: Duration,
    pub(crate) paused: Duration,
}

impl<'a> HookCalls<'a> {
    pub(crate) fn new(hooks: &'a Hooks, listed: &str, machine: &MachineSummary, run: u32, job: Job<'a>) -> Self {
        let common = [
            (MACHINE, listed.to_owned()),
            (NAME, machine.name.clone()),
            (UUID, machine.uuid.clone()),
            (HYPERVISOR, hooks.hypervisor.clone()),
            (STATE, machine.state.to_string()),
            (RUN, format!("{run:08x}")),
        ];
        Self {
            hooks,
            job,
            common: common.to_vec(),
        }
    }

    /// Runs the job between the calls for its start and its end. `result_of` returns the arguments of the last call:
    /// the snapshot, if one was created, and its consistency.
    pub(crate) fn around<T>(
        &self,
        work: impl FnOnce() -> Result<T>,
        result_of: impl FnOnce(&T) -> (Option<String>, String),
    ) -> Result<T> {
        let result = self.call(HookEvent::JobStart, Vec::new()).and_then(|()| work());
        let ended = match &result {
            Ok(report) => {
                let (snapshot, consistency) = result_of(report);
                let snapshot = snapshot.map(|id| (SNAPSHOT, id));
                self.call(
                    HookEvent::JobEnd,
                    snapshot.into_iter().chain([(CONSISTENCY, consistency)]).collect(),
                )
            }
            Err(error) => self.call(HookEvent::JobAbort, vec![(ERROR, error_text(error))]),
        };
        debug_assert!(ended.is_ok(), "what comes at the end only warns");
        result
    }

    /// Called before the point in time. Only a running machine can be prepared for it.
    pub(crate) fn pre_freeze(&self, state: MachineState) -> Result<()> {
        match state {
            MachineState::Running => self.call(HookEvent::PreFreeze, Vec::new()),
            _ => Ok(()),
        }
    }

    /// Called after the point in time. `held_up` is none if the duration is not known.
    pub(crate) fn post_thaw(&self, state: MachineState, held_up: Option<Downtime>) {
        if state == MachineState::Running {
            let millis = |duration: Duration| duration.as_millis().to_string();
            let times = |held_up: Downtime| [(FROZEN_MS, millis(held_up.frozen)), (PAUSED_MS, millis(held_up.paused))];
            let variables = held_up.map(times).into_iter().flatten().collect();
            self.call(HookEvent::PostThaw, variables).ok();
        }
    }

    /// Calls all programs. If a failure aborts the backup at this event, the first failure ends the calls; otherwise
    /// all are called.
    fn call(&self, event: HookEvent, mut variables: Variables) -> Result<()> {
        variables.extend(self.common.iter().cloned());
        for program in &self.hooks.programs {
            let Err(reason) = self.hooks.call_one(program, event, &variables, self.job) else {
                continue;
            };
            let error = Error::Hook {
                program: program.clone(),
                event: event.word(),
                reason,
            };
            if event.may_abort() && self.hooks.on_failure == HookFailure::Abort {
                return Err(error);
            }
            self.job.progress.warning(&error.to_string());
        }
        Ok(())
    }
}

impl Hooks {
    /// No hook programs.
    pub fn none() -> Self {
        Self {
            programs: Vec::new(),
            time_out: Duration::ZERO,
            on_failure: HookFailure::Abort,
            withheld: Vec::new(),
            hypervisor: String::new(),
        }
    }

    /// Makes the calls that a killed backup has left out. Failures are only reported.
    pub fn owed(&self, listed: &str, machine: &MachineSummary, run: u32, events: &[HookEvent], job: Job<'_>) {
        let calls = HookCalls::new(self, listed, machine, run, job);
        for event in events {
            let variables = match event {
                HookEvent::JobAbort => vec![(ERROR, "the backup was killed".to_owned())],
                _ => Vec::new(),
            };
            calls.call(*event, variables).ok();
        }
    }

    /// Calls one program; returns a failure as text.
    fn call_one(
        &self,
        program: &Path,
        event: HookEvent,
        variables: &Variables,
        job: Job<'_>,
    ) -> std::result::Result<(), String> {
        if let Some(why) = why_untrusted(program).map_err(|error| error.to_string())? {
            return Err(format!("it is not called: {why}; see chown root and chmod go-w"));
        }
        let was_stopped = !event.may_abort() && job.interrupt.is_requested();
        let call = Call {
            program,
            arguments: &[event.word()],
            variables,
            withheld: &self.withheld,
            input: &[],
            time_out: self.time_out,
            // A call after a request to stop undoes an earlier call, and gets its full time.
            is_stopped: &|| !was_stopped && job.interrupt.is_requested(),
        };
        let called = call.run(job.clock).map_err(|error| error.to_string())?;
        let name = program.file_name().unwrap_or(program.as_os_str()).display();
        for line in &called.lines {
            job.progress.note(&format!("{name} {}: {line}", event.word()));
        }
        match called.outcome {
            ProcessOutcome::Success => Ok(()),
            other => Err(other.to_string()),
        }
    }
}
