//! Rounds and warnings of a copy, as they come.

use holdfast_live_copy::{CopyObserver, CopyWarning, Forecast, RoundDecision, SenderWarning};

use crate::output::Console;
use crate::units;

/// Prints rounds and warnings.
pub(super) struct ShownEvents<'a> {
    pub(super) console: &'a Console,
    pub(super) rounds: RoundDisplay,
}

/// Whether rounds are shown. A source that is not written has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands::moving) enum RoundDisplay {
    Shown,
    Hidden,
}

impl CopyObserver for ShownEvents<'_> {
    fn round(&self, forecast: &Forecast) {
        if self.rounds == RoundDisplay::Hidden {
            return;
        }
        self.console.note(&round_text(forecast));
    }

    fn warning(&self, warning: CopyWarning) {
        self.console.warning(&warning_text(warning));
    }
}

/// A round, for people.
pub(in crate::commands::moving) fn round_text(forecast: &Forecast) -> String {
    let what = match forecast.round {
        0 => "the first pass".to_owned(),
        round => format!("round {round}"),
    };
    let next = match forecast.decision {
        RoundDecision::Freeze | RoundDecision::FreezeAtMinimum => "within the limit",
        RoundDecision::Continue => "another round follows",
        RoundDecision::Throttle { .. } => "the writes are limited from now on",
        RoundDecision::GiveUp => "it does not become less",
    };
    format!(
        "{what}: {} sent in {}, {} written meanwhile; a freeze now would take {} ({next})",
        units::bytes(forecast.measured.sent_bytes),
        units::duration(forecast.measured.took),
        units::bytes(forecast.measured.dirty_bytes),
        units::duration(forecast.frozen),
    )
}

/// A warning, for people.
pub(in crate::commands::moving) fn warning_text(warning: CopyWarning) -> String {
    match warning {
        CopyWarning::Protocol(SenderWarning::PromiseNotKept { frozen }) => format!(
            "the source was frozen for {}, longer than permitted, and was thawed; the copy continues",
            units::duration(frozen)
        ),
        CopyWarning::Protocol(SenderWarning::SyncWhileFrozen) => {
            "the receiver makes the data durable only while the source is frozen".to_owned()
        }
        CopyWarning::Protocol(SenderWarning::NoHashes) => {
            "the receiver cannot compare: after an interruption, data is sent again".to_owned()
        }
        CopyWarning::Protocol(SenderWarning::Retried(error)) => format!("the receiver failed: {}", error.text),
        CopyWarning::Protocol(SenderWarning::StillInDoubt(error)) => {
            format!("the receiver does not say whether the copy is complete: {}", error.text)
        }
        CopyWarning::ConnectionLost { reason: Some(reason) } => format!("the connection was lost: {reason}"),
        CopyWarning::ConnectionLost { reason: None } => "the connection was lost".to_owned(),
        CopyWarning::NotFrozen { reason } => format!("the source was not frozen: {reason}"),
        CopyWarning::NotThrottled => "the writes to this source cannot be limited".to_owned(),
    }
}
