//! Freezing the guest's file systems around the instant, through the guest agent.

use std::time::Duration;

use holdfast_host::{Description, Machine, MachineState, agent};

use super::watchdog::Guard;
use crate::job::{Error, Job, Result};

/// How long the guest may take to answer, and to freeze: Windows thaws by itself after ten seconds. All guests of an instant have it
/// together, since the first one waits for the last.
pub(crate) const FREEZE_DEADLINE: Duration = Duration::from_secs(5);
const THAW_DEADLINE: Duration = Duration::from_secs(5);
/// After this the watchdog thaws the guest: time to freeze, the instant, time to thaw.
const FROZEN_DEADLINE: Duration = Duration::from_secs(15);

/// Whether the guest's file systems are frozen for the instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quiesce {
    /// If that works; otherwise the snapshot is of a machine as after a power cut, and says so.
    #[default]
    Try,
    /// It must work.
    Require,
    /// No.
    Off,
}

/// What happened to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quiesced {
    /// The file systems were frozen.
    Yes {
        /// How many.
        file_system_count: u64,
        /// How long the guest took to freeze.
        freeze: Duration,
        /// From the freeze until it was thawed.
        frozen: Duration,
    },
    /// The machine has no guest agent.
    NoAgent,
    /// The agent cannot, or did not in time; why, in words.
    Failed(String),
    /// It was not requested.
    Off,
    /// The machine does not run: there is nothing to freeze.
    NotNeeded,
}

impl Quiesced {
    /// How long the file systems were frozen.
    pub(crate) fn frozen(&self) -> Duration {
        match self {
            Self::Yes { frozen, .. } => *frozen,
            _ => Duration::ZERO,
        }
    }

    /// What the snapshot says of its instant.
    pub(crate) fn consistency(&self) -> &'static str {
        match self {
            Self::Yes { .. } => "file system",
            _ => "crash",
        }
    }
}

/// The guest that is to be quiet.
#[derive(Clone, Copy)]
pub(crate) struct Guest<'a> {
    pub(crate) machine: &'a dyn Machine,
    /// What it is called where it is spoken of.
    pub(crate) shown: &'a dyn std::fmt::Display,
    pub(crate) quiesce: Quiesce,
}

/// Whether the agent of a guest can be asked to freeze its file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentAccess {
    /// The machine is not running.
    NotRunning,
    /// The machine has no agent, or its agent must not be used for this point in time.
    Unusable,
    Usable,
}

impl AgentAccess {
    pub(crate) fn of(description: &Description) -> Self {
        match description.summary.state {
            MachineState::Running if description.has_agent_channel => Self::Usable,
            MachineState::Running => Self::Unusable,
            _ => Self::NotRunning,
        }
    }

    /// For a point in time at which the file systems must not be frozen.
    pub(crate) fn denied(self) -> Self {
        match self {
            Self::NotRunning => Self::NotRunning,
            Self::Unusable | Self::Usable => Self::Unusable,
        }
    }
}

/// The state of a machine after the point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunState {
    /// The state from before.
    Restored,
    /// The machine was running, and is still paused.
    StillPaused,
}

/// A guest that may be frozen.
pub(crate) enum FreezeState {
    Frozen {
        file_system_count: u64,
        freeze: Duration,
        start: Duration,
    },
    Not(Quiesced),
    /// It may be frozen in part, though it was to be thawed again.
    HalfFrozen(Quiesced),
}

/// What is known of a guest before it is frozen.
pub(crate) enum AgentCheck {
    /// It is not to be frozen, or need not be.
    Not(Quiesced),
    /// Its agent answers, and nothing is frozen.
    Thawed,
    /// It cannot be frozen.
    Unfit(holdfast_host::Error),
}

impl AgentCheck {
    /// Asks the guest, if it is to be frozen. Nothing is changed: agents may take their time to answer that.
    pub(crate) fn of(guest: Guest<'_>, agent: AgentAccess) -> Result<Self> {
        match (guest.quiesce, agent) {
            (Quiesce::Off, _) => return Ok(Self::Not(Quiesced::Off)),
            (_, AgentAccess::NotRunning) => return Ok(Self::Not(Quiesced::NotNeeded)),
            (Quiesce::Try, AgentAccess::Unusable) => return Ok(Self::Not(Quiesced::NoAgent)),
            (Quiesce::Require, AgentAccess::Unusable) => {
                return Err(Error::NotQuiesced {
                    machine: guest.machine.name().to_owned(),
                    source: None,
                });
            }
            (Quiesce::Try | Quiesce::Require, AgentAccess::Usable) => {}
        }
        // What another process has frozen is not ours to thaw.
        Ok(match agent::is_frozen(guest.machine, FREEZE_DEADLINE) {
            Ok(false) => Self::Thawed,
            Ok(true) => Self::Unfit(holdfast_host::Error::Refused {
                action: "freeze the file systems of",
                machine: guest.machine.name().to_owned(),
                reason: "another process has frozen them".to_owned(),
            }),
            Err(error) => Self::Unfit(error),
        })
    }

    /// Freezes the guest, where that can be done, until `until`: others that are frozen already wait for this one.
    ///
    /// A guest that fails may be frozen in part. Waiting for it would keep others frozen, so it is thawed by [`FreezeState::end`].
    pub(crate) fn freeze(
        self,
        guest: Guest<'_>,
        until: Duration,
        guard: &mut Guard,
        job: Job<'_>,
    ) -> (FreezeState, Option<Error>) {
        let start = job.clock.now();
        let (frozen, is_touched) = match self {
            Self::Not(quiesced) => return (FreezeState::Not(quiesced), None),
            Self::Unfit(error) => (Err(error), false),
            Self::Thawed => match (until.saturating_sub(start), guard.about_to_freeze(FROZEN_DEADLINE)) {
                (_, Err(error)) => return (FreezeState::Not(Quiesced::Failed(error.to_string())), Some(error)),
                (left, Ok(())) if left.is_zero() => (Err(too_late(guest.machine.name())), false),
                (left, Ok(())) => (agent::freeze(guest.machine, left.min(FREEZE_DEADLINE)), true),
            },
        };
        let error = match frozen {
            Ok(file_system_count) => {
                let freeze = job.clock.now().saturating_sub(start);
                let frozen = FreezeState::Frozen {
                    file_system_count,
                    freeze,
                    start,
                };
                return (frozen, None);
            }
            Err(error) => error,
        };
        let failed = Quiesced::Failed(error.to_string());
        let left = if is_touched {
            FreezeState::HalfFrozen(failed)
        } else {
            FreezeState::Not(failed)
        };
        if guest.quiesce == Quiesce::Require {
            let machine = guest.machine.name().to_owned();
            let source = Some(Box::new(error));
            return (left, Some(Error::NotQuiesced { machine, source }));
        }
        job.progress.warning(&format!(
            "the file systems of {} could not be frozen: {error}; the snapshot is as after a power cut",
            guest.shown
        ));
        (left, None)
    }
}

fn too_late(machine: &str) -> holdfast_host::Error {
    holdfast_host::Error::Refused {
        action: "freeze the file systems of",
        machine: machine.to_owned(),
        reason: "others are frozen already, and would have to wait for it too long".to_owned(),
    }
}

impl FreezeState {
    /// Freezes the guest, if it is to be and can be.
    pub(crate) fn begin(guest: Guest<'_>, access: AgentAccess, guard: &mut Guard, job: Job<'_>) -> Result<Self> {
        let asked = AgentCheck::of(guest, access)?;
        let until = job.clock.now() + FREEZE_DEADLINE;
        let (quiescence, error) = asked.freeze(guest, until, guard, job);
        let quiescence = match quiescence {
            // It may be done in part, and no process waits for it.
            Self::HalfFrozen(failed) if thaw(guest, job).is_some() => {
                guard.runs()?;
                Self::Not(failed)
            }
            other => other,
        };
        match error {
            Some(error) => Err(error),
            None => Ok(quiescence),
        }
    }

    /// Thaws the guest. Where its machine is still paused, the watchdog waits until it runs.
    pub(crate) fn end(self, guest: Guest<'_>, guard: &mut Guard, state: RunState, job: Job<'_>) -> Quiesced {
        if state == RunState::Restored && matches!(self, Self::Frozen { .. } | Self::HalfFrozen(_)) {
            // Its processors are no worry any more, only its file systems.
            guard.runs().and_then(|()| guard.about_to_freeze(FROZEN_DEADLINE)).ok();
        }
        let (quiesced, is_thawed) = match self {
            Self::Not(quiesced) => (quiesced, true),
            Self::HalfFrozen(quiesced) => (quiesced, thaw(guest, job).is_some()),
            Self::Frozen {
                file_system_count,
                freeze,
                start,
            } => match thaw(guest, job) {
                Some(count) => {
                    let frozen = job.clock.now().saturating_sub(start);
                    (end_of_frozen(file_system_count, count, freeze, frozen), true)
                }
                None => (Quiesced::Failed("the guest did not thaw".to_owned()), false),
            },
        };
        if !is_thawed {
            job.progress.warning(&format!(
                "{} does not say that it has thawed; the watchdog tries on",
                guest.shown
            ));
            // It may take long: as long as its owner keeps it paused.
            guard.leave_the_rest();
        } else if state == RunState::Restored {
            // A watchdog that does not receive this is dead, and cannot do harm.
            guard.runs().ok();
        }
        quiesced
    }
}

/// What happened to file systems that were frozen: as many as were thawed have been so all the time. A guest may thaw by itself, as
/// Windows does after ten seconds, and the watchdog thaws one that is frozen for too long.
fn end_of_frozen(frozen_count: u64, thawed_count: u64, freeze: Duration, frozen: Duration) -> Quiesced {
    if frozen_count == 0 {
        return Quiesced::Failed("it has no file system that can be frozen".to_owned());
    }
    if frozen >= FROZEN_DEADLINE || thawed_count == 0 {
        let reason = format!(
            "it was frozen too long ({} ms), and thawed before the end",
            frozen.as_millis()
        );
        return Quiesced::Failed(reason);
    }
    Quiesced::Yes {
        file_system_count: frozen_count,
        freeze,
        frozen,
    }
}

/// How many file systems were frozen until now; none where the guest does not answer.
fn thaw(guest: Guest<'_>, job: Job<'_>) -> Option<u64> {
    match agent::thaw(guest.machine, THAW_DEADLINE) {
        Ok(count) => Some(count),
        Err(error) => {
            job.progress.note(&format!("thawing {}: {error}", guest.shown));
            agent::thaw(guest.machine, THAW_DEADLINE).ok()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{FROZEN_DEADLINE, Quiesced, end_of_frozen};

    #[test]
    fn a_guest_that_has_thawed_before_was_not_frozen() {
        let end = |(frozen_count, thawed_count), frozen| {
            let quiesced = end_of_frozen(frozen_count, thawed_count, Duration::ZERO, frozen);
            matches!(quiesced, Quiesced::Yes { .. })
        };
        let moment = Duration::from_millis(100);
        assert!(end((2, 2), moment) && end((2, 1), moment));
        assert!(!end((2, 0), moment) && !end((0, 0), moment));
        assert!(!end((2, 2), FROZEN_DEADLINE));
    }
}
