//! Programs of the administrator's own, which a backup of a machine calls on its way.
//!
//! Each is called with the event as its only argument, and with variables that tell the rest. They are called one after another, none
//! of them while the machine's file systems are frozen: `pre-freeze` comes before, `post-thaw` after. A program that was called for an event
//! that begins something is also called for the one that ends it, after errors too; where the backup is killed, its watchdog
//! does it ([`Hooks::owed`]).

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_host::{Call, MachineState, MachineSummary, ProcessOutcome, why_untrusted};

use crate::job::{Error, Job, Result};

/// Programs to call, and how.
#[derive(Debug, Clone)]
pub struct Hooks {
    /// The programs, in their order.
    pub programs: Vec<PathBuf>,
    /// How long each call may take.
    pub time_out: Duration,
    /// What a call that fails means.
    pub on_failure: HookFailure,
    /// Variables of the environment that hooks do not get.
    pub withheld: Vec<String>,
    /// Where the machine is, for [`VARIABLES`].
    pub hypervisor: String,
}

/// What a failing call means before anything has happened to the machine; later ones only warn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HookFailure {
    /// The backup of the machine is given up.
    #[default]
    Abort,
    /// It goes on, with a warning.
    Warn,
}

/// When programs are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HookEvent {
    /// Before anything else.
    JobStart,
    /// Before the file systems of a running machine are frozen, and it is stopped.
    PreFreeze,
    /// The machine runs on.
    PostThaw,
    /// The snapshot is committed.
    JobEnd,
    /// The backup of the machine has failed.
    JobAbort,
}

/// The variables that calls may get, with what is in them.
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
    /// All of them, in the order in which they come.
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

    /// Whether nothing has happened to the machine yet.
    fn may_abort(self) -> bool {
        matches!(self, Self::JobStart | Self::PreFreeze)
    }
}

/// Variables of a call.
type Variables = Vec<(&'static str, String)>;

/// The calls of one backup of a machine.
pub(crate) struct HookCalls<'a> {
    hooks: &'a Hooks,
    job: Job<'a>,
    common: Variables,
}

/// How long a machine was held up.
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

    /// Does the job between the calls for its start and its end. `result_of` gives what the call for the end gets: the snapshot, where one
    /// was made, and its consistency.
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

    /// The instant is near. Only a running machine has one that can be prepared for.
    pub(crate) fn pre_freeze(&self, state: MachineState) -> Result<()> {
        match state {
            MachineState::Running => self.call(HookEvent::PreFreeze, Vec::new()),
            _ => Ok(()),
        }
    }

    /// The instant is over. `held_up` is none where it is not known.
    pub(crate) fn post_thaw(&self, state: MachineState, held_up: Option<Downtime>) {
        if state == MachineState::Running {
            let millis = |duration: Duration| duration.as_millis().to_string();
            let times = |held_up: Downtime| [(FROZEN_MS, millis(held_up.frozen)), (PAUSED_MS, millis(held_up.paused))];
            let variables = held_up.map(times).into_iter().flatten().collect();
            self.call(HookEvent::PostThaw, variables).ok();
        }
    }

    /// Calls all programs; the first that fails ends it where that matters, and the others are called where it does not.
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
    /// None.
    pub fn none() -> Self {
        Self {
            programs: Vec::new(),
            time_out: Duration::ZERO,
            on_failure: HookFailure::Abort,
            withheld: Vec::new(),
            hypervisor: String::new(),
        }
    }

    /// Calls the programs for what a backup that was killed owes them. What goes wrong is only said.
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

    /// Calls one program; what is wrong with it, in words.
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
            // What is called after the request undoes what was called before, and needs its time.
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
