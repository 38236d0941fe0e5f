//! Freezes the guest's file systems for the point in time, by the guest agent.

use std::time::Duration;

use holdfast_host::{Description, Machine, MachineState, agent};

use super::watchdog::Guard;
use crate::job::{Error, Job, Result};

/// How long the guest may take to answer, and to freeze: Windows thaws by itself after ten seconds. Guests that are
/// frozen together share this time, since the first one waits for the last.
pub(crate) const FREEZE_DEADLINE: Duration = Duration::from_secs(5);
const THAW_DEADLINE: Duration = Duration::from_secs(5);
/// The watchdog thaws the guest after this: time to freeze, the point in time, time to thaw.
const FROZEN_DEADLINE: Duration = Duration::from_secs(15);

/// Whether the guest's file systems are frozen for the point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quiesce {
    /// Freeze them if possible; otherwise the snapshot is as after a power cut, and says so.
    #[default]
    Try,
    /// Fail if they cannot be frozen.
    Require,
    /// Do not freeze them.
    Off,
}

/// The result of freezing the guest's file systems.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quiesced {
    /// The file systems were frozen.
    Yes {
        /// How many were frozen.
        file_system_count: u64,
        /// How long the guest took to freeze.
        freeze: Duration,
        /// The time from the freeze until they were thawed.
        frozen: Duration,
    },
    /// The machine has no guest agent.
    NoAgent,
    /// The agent cannot freeze, or did not in time; the reason as text.
    Failed(String),
    /// It was not requested.
    Off,
    /// The machine does not run, so nothing has to be frozen.
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

    /// The consistency that the snapshot records.
    pub(crate) fn consistency(&self) -> &'static str {
        match self {
            Self::Yes { .. } => "file system",
            _ => "crash",
        }
    }
}

/// The guest that is to be frozen.
#[derive(Clone, Copy)]
pub(crate) struct Guest<'a> {
    pub(crate) machine: &'a dyn Machine,
    /// Its name in messages.
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
    /// Freezing failed and the thaw after it may have failed, too: some file systems may be frozen.
    HalfFrozen(Quiesced),
}

/// The state of a guest before it is frozen.
pub(crate) enum AgentCheck {
    /// It is not to be frozen, or need not be.
    Not(Quiesced),
    /// Its agent answers, and nothing is frozen.
    Thawed,
    /// It cannot be frozen.
    Unfit(holdfast_host::Error),
}

impl AgentCheck {
    /// Asks the agent, if the guest is to be frozen. Nothing is changed: agents may take long to answer.
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
        // File systems that another process has frozen must not be thawed by this one.
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

    /// Freezes the guest, if possible, until `until`: guests that are already frozen wait for this one.
    ///
    /// If that fails, the guest may be partly frozen. Waiting for it would keep others frozen, so it is thawed by
    /// [`FreezeState::end`].
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
    /// Freezes the guest, if it is to be frozen and can be.
    pub(crate) fn begin(guest: Guest<'_>, access: AgentAccess, guard: &mut Guard, job: Job<'_>) -> Result<Self> {
        let asked = AgentCheck::of(guest, access)?;
        let until = job.clock.now() + FREEZE_DEADLINE;
        let (quiescence, error) = asked.freeze(guest, until, guard, job);
        let quiescence = match quiescence {
            // Some file systems may be frozen, and no other guest waits.
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

    /// Thaws the guest. If its machine is still paused, the watchdog waits until it runs.
    pub(crate) fn end(self, guest: Guest<'_>, guard: &mut Guard, state: RunState, job: Job<'_>) -> Quiesced {
        if state == RunState::Restored && matches!(self, Self::Frozen { .. } | Self::HalfFrozen(_)) {
            // The watchdog no longer has to resume the machine, only to thaw its file systems.
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
            // The machine may stay paused for long, if its owner paused it.
            guard.leave_the_rest();
        } else if state == RunState::Restored {
            // If the watchdog does not receive this, it has died and cannot do harm.
            guard.runs().ok();
        }
        quiesced
    }
}

/// The result for frozen file systems: those that are thawed now were frozen all the time. A guest may thaw by itself,
/// as Windows does after ten seconds, and the watchdog thaws a guest that is frozen for too long.
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

/// Thaws the guest. Returns how many file systems were frozen until now; none if the guest does not answer.
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
