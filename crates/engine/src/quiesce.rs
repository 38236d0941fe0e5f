//! Freezing the guest's file systems around the instant, through the guest agent.

use std::time::Duration;

use holdfast_host::{Machine, agent};

use crate::error::{Error, Result};
use crate::job::Job;
use crate::watchdog::Guard;

/// How long the guest may take to freeze: Windows thaws by itself after ten seconds.
const FREEZE_DEADLINE: Duration = Duration::from_secs(5);
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

/// What became of it.
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
    /// Nobody wanted it.
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

/// A guest that may be frozen.
pub(crate) enum Quiescence {
    Frozen {
        file_system_count: u64,
        freeze: Duration,
        start: Duration,
    },
    Not(Quiesced),
    /// It may be frozen in part, though it was to be thawed again.
    HalfFrozen(Quiesced),
}

impl Quiescence {
    /// Freezes the guest, if it is to be and can be.
    pub(crate) fn begin(
        guest: Guest<'_>,
        (is_running, can_quiesce): (bool, bool),
        guard: &mut Guard,
        job: Job<'_>,
    ) -> Result<Self> {
        let machine = || guest.machine.name().to_owned();
        match (guest.quiesce, is_running, can_quiesce) {
            (Quiesce::Off, ..) => return Ok(Self::Not(Quiesced::Off)),
            (_, false, _) => return Ok(Self::Not(Quiesced::NotNeeded)),
            (Quiesce::Try, true, false) => return Ok(Self::Not(Quiesced::NoAgent)),
            (Quiesce::Require, true, false) => {
                return Err(Error::NotQuiesced {
                    machine: machine(),
                    source: None,
                });
            }
            (Quiesce::Try | Quiesce::Require, true, true) => {}
        }
        // What somebody else has frozen is not ours to thaw.
        let before = agent::is_frozen(guest.machine, FREEZE_DEADLINE);
        let is_frozen_before = !matches!(before, Ok(false));
        let start = job.clock.now();
        let frozen = match before {
            Ok(true) => Err(holdfast_host::Error::Refused {
                action: "freeze the file systems of",
                machine: machine(),
                reason: "somebody else has frozen them".to_owned(),
            }),
            Ok(false) => {
                guard.about_to_freeze(FROZEN_DEADLINE)?;
                agent::freeze(guest.machine, FREEZE_DEADLINE)
            }
            Err(error) => Err(error),
        };
        match frozen {
            Ok(file_system_count) => Ok(Self::Frozen {
                file_system_count,
                freeze: job.clock.now().saturating_sub(start),
                start,
            }),
            Err(error) => {
                // It may have come half the way.
                let thawed = is_frozen_before || thaw(guest, job).is_some();
                if thawed && !is_frozen_before {
                    guard.runs()?;
                }
                if guest.quiesce == Quiesce::Require {
                    return Err(Error::NotQuiesced {
                        machine: machine(),
                        source: Some(Box::new(error)),
                    });
                }
                job.progress.warning(&format!(
                    "the file systems of {} could not be frozen: {error}; the snapshot is as after a power cut",
                    guest.shown
                ));
                let failed = Quiesced::Failed(error.to_string());
                Ok(if thawed {
                    Self::Not(failed)
                } else {
                    Self::HalfFrozen(failed)
                })
            }
        }
    }

    /// Thaws the guest. `runs` tells whether its machine runs, or is to stand still: until it does, the watchdog watches on.
    pub(crate) fn end(self, guest: Guest<'_>, guard: &mut Guard, (runs, job): (bool, Job<'_>)) -> Quiesced {
        if runs && matches!(self, Self::Frozen { .. } | Self::HalfFrozen(_)) {
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
                    (end_of_frozen((file_system_count, count), freeze, frozen), true)
                }
                None => (Quiesced::Failed("the guest did not thaw".to_owned()), false),
            },
        };
        if !is_thawed {
            job.progress.warning(&format!(
                "{} does not say that it has thawed; the watchdog tries on",
                guest.shown
            ));
        } else if runs {
            // Who does not hear it is dead, and cannot do harm.
            guard.runs().ok();
        }
        quiesced
    }
}

/// What became of file systems that were frozen: as many as were thawed have been so all the time. A guest may thaw by itself, as
/// Windows does after ten seconds, and the watchdog thaws one that is frozen for too long.
fn end_of_frozen((frozen_count, thawed_count): (u64, u64), freeze: Duration, frozen: Duration) -> Quiesced {
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
        let end = |counts, frozen| matches!(end_of_frozen(counts, Duration::ZERO, frozen), Quiesced::Yes { .. });
        let moment = Duration::from_millis(100);
        assert!(end((2, 2), moment) && end((2, 1), moment));
        assert!(!end((2, 0), moment) && !end((0, 0), moment));
        assert!(!end((2, 2), FROZEN_DEADLINE));
    }
}
