//! How a run ended, from what its program left behind.

use holdfast_host::{Ending, Worked};
use holdfast_policy::Timestamp;
use holdfast_policy::config::Judgement;
use holdfast_policy::schedule::RunEnd;
use serde_json::Value;

use super::run_result::RunResult;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It was done.
    Done,
    /// It was done, and there is something to look at.
    Warnings,
    /// It was not done, or not all of it.
    Failed,
    /// Its command line makes no sense to the program.
    Usage,
    /// Somebody else held what it needed.
    Locked,
    /// It found damage.
    Damage,
    /// It took too long.
    TimedOut,
    /// It was told to stop.
    Stopped,
    /// Nobody saw how it ended: the scheduler was killed meanwhile.
    Unseen,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Done,
        Self::Warnings,
        Self::Failed,
        Self::Usage,
        Self::Locked,
        Self::Damage,
        Self::TimedOut,
        Self::Stopped,
        Self::Unseen,
    ];

    /// The word for it, in the journal and in documents.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Warnings => "warnings",
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::Locked => "locked",
            Self::Damage => "damage",
            Self::TimedOut => "timed-out",
            Self::Stopped => "stopped",
            Self::Unseen => "unseen",
        }
    }

    /// The one with this word.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|outcome| outcome.word() == word)
    }

    /// Whether what was wanted is done.
    pub const fn is_done(self) -> bool {
        matches!(self, Self::Done | Self::Warnings)
    }

    /// What the schedule makes of it.
    pub(super) const fn end(self) -> RunEnd {
        match self {
            Self::Done | Self::Warnings => RunEnd::Done,
            // Trying again neither changes the command line nor heals.
            Self::Usage | Self::Damage => RunEnd::FailedForGood,
            Self::Stopped => RunEnd::Stopped,
            Self::Failed | Self::Locked | Self::TimedOut | Self::Unseen => RunEnd::Failed,
        }
    }
}

/// What is known of a run that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) outcome: Outcome,
    pub(super) exit_code: Option<i32>,
    /// Why it was not done, in words.
    pub(super) error: Option<String>,
    /// What it said last.
    pub(super) lines: Vec<String>,
    /// What it has achieved.
    pub(super) result: RunResult,
    /// Machines whose snapshots were looked at.
    pub(super) freshness: Vec<Freshness>,
}

/// Whether a machine has a fresh snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Freshness {
    pub(super) machine: String,
    pub(super) newest: Option<Timestamp>,
    pub(super) is_fresh: bool,
}

/// Why a program that was at work was stopped by us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopCause {
    TimedOut,
    Asked,
}

/// Reads how a run ended.
pub(super) fn ended(worked: &Worked, judgement: Judgement, stop: Option<StopCause>) -> Ended {
    let document: Value = serde_json::from_slice(&worked.answer).unwrap_or_default();
    let (code, killed_by) = match worked.ending {
        Ending::Well => (Some(0), None),
        Ending::Code(code) => (Some(code), None),
        Ending::Killed(signal) => (None, Some(signal)),
        Ending::TimedOut | Ending::Stopped => (None, None),
    };
    let judged = match judgement {
        Judgement::Verb => of_verb(code),
        Judgement::Check => of_check(code),
        // What it says of machines is told of machines; it is done where it could say it.
        Judgement::Freshness => match of_check(code) {
            Outcome::Failed if code == Some(2) && !freshness(&document["report"]["machines"]).is_empty() => {
                Outcome::Done
            }
            other => other,
        },
    };
    let outcome = match stop {
        _ if judged.is_done() => judged,
        Some(StopCause::TimedOut) => Outcome::TimedOut,
        Some(StopCause::Asked) => Outcome::Stopped,
        None => judged,
    };
    let error = (!outcome.is_done()).then(|| match outcome {
        Outcome::TimedOut => "it took longer than its timeout, and was stopped".to_owned(),
        Outcome::Stopped => "it was told to stop".to_owned(),
        _ => said(&document)
            .or_else(|| worked.lines.iter().rev().find(|line| !line.trim().is_empty()).cloned())
            .or_else(|| killed_by.map(|signal| format!("it was killed by signal {signal}")))
            .unwrap_or_else(|| worked.ending.to_string()),
    });
    Ended {
        outcome,
        exit_code: code,
        error,
        lines: worked.lines.clone(),
        result: RunResult::of_document(&document),
        freshness: freshness(&document["report"]["machines"]),
    }
}

/// By `docs/exit-codes.md`.
fn of_verb(code: Option<i32>) -> Outcome {
    match code {
        Some(0) => Outcome::Done,
        Some(2) => Outcome::Usage,
        Some(3) => Outcome::Warnings,
        Some(4) => Outcome::Locked,
        Some(5) => Outcome::Damage,
        _ => Outcome::Failed,
    }
}

fn of_check(code: Option<i32>) -> Outcome {
    match code {
        Some(0) => Outcome::Done,
        Some(1) => Outcome::Warnings,
        _ => Outcome::Failed,
    }
}

/// The error of a document, with its causes; the line of a check.
fn said(document: &Value) -> Option<String> {
    if let Some(line) = document["report"]["line"].as_str() {
        return Some(line.to_owned());
    }
    let error = &document["error"];
    let mut parts = vec![error["message"].as_str()?.to_owned()];
    let causes = error["causes"].as_array().into_iter().flatten();
    parts.extend(causes.filter_map(|cause| cause.as_str().map(str::to_owned)));
    let text = parts.join(": ");
    Some(match error["hint"].as_str() {
        Some(hint) => format!("{text} ({hint})"),
        None => text,
    })
}

fn freshness(machines: &Value) -> Vec<Freshness> {
    let machines = machines.as_array().into_iter().flatten();
    let machine = |value: &Value| {
        Some(Freshness {
            machine: value["machine"].as_str()?.to_owned(),
            newest: value["newest"].as_str().and_then(|text| text.parse().ok()),
            is_fresh: value["is_fresh"].as_bool()?,
        })
    };
    machines.filter_map(machine).collect()
}

#[cfg(test)]
mod tests {
    use holdfast_host::{Ending, Worked};
    use holdfast_policy::config::Judgement;

    use super::{Outcome, StopCause, ended};

    fn worked(ending: Ending, answer: &str, lines: &[&str]) -> Worked {
        Worked {
            ending,
            answer: answer.as_bytes().to_vec(),
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
        }
    }

    #[test]
    fn codes_mean_what_is_documented_and_words_come_from_where_they_are_best() {
        let error = r#"{"error":{"message":"open x","causes":["gone"],"hint":"look"}}"#;
        for (ending, answer, lines, stop, outcome, words) in [
            (Ending::Well, "", &[][..], None, Outcome::Done, None),
            (Ending::Code(3), "{}", &["odd"], None, Outcome::Warnings, None),
            (
                Ending::Code(1),
                error,
                &["x"],
                None,
                Outcome::Failed,
                Some("open x: gone (look)"),
            ),
            (
                Ending::Code(2),
                "",
                &["no such option", ""],
                None,
                Outcome::Usage,
                Some("no such option"),
            ),
            (
                Ending::Code(4),
                error,
                &[],
                None,
                Outcome::Locked,
                Some("open x: gone (look)"),
            ),
            (
                Ending::Code(5),
                "",
                &[],
                None,
                Outcome::Damage,
                Some("it ended with code 5"),
            ),
            (
                Ending::Killed(9),
                "",
                &[],
                None,
                Outcome::Failed,
                Some("it was killed by signal 9"),
            ),
            (
                Ending::Killed(15),
                error,
                &[],
                Some(StopCause::TimedOut),
                Outcome::TimedOut,
                Some("it took longer than its timeout, and was stopped"),
            ),
            (
                Ending::Code(1),
                "",
                &[],
                Some(StopCause::Asked),
                Outcome::Stopped,
                Some("it was told to stop"),
            ),
            // It was done all the same, before it heard.
            (Ending::Well, "", &[], Some(StopCause::Asked), Outcome::Done, None),
        ] {
            let found = ended(&worked(ending, answer, lines), Judgement::Verb, stop);
            assert_eq!((found.outcome, found.error.as_deref()), (outcome, words));
        }
        assert!(
            Outcome::ALL
                .iter()
                .all(|outcome| Outcome::of_word(outcome.word()) == Some(*outcome))
        );
    }

    #[test]
    fn checks_have_codes_of_their_own_and_old_snapshots_are_no_failure_of_the_check() {
        let check = |code, judgement, answer: &str| ended(&worked(Ending::Code(code), answer, &[]), judgement, None);
        let line = r#"{"report":{"line":"CRITICAL: tank"}}"#;
        assert_eq!(check(1, Judgement::Check, line).outcome, Outcome::Warnings);
        let critical = check(2, Judgement::Check, line);
        assert_eq!(
            (critical.outcome, critical.error.as_deref()),
            (Outcome::Failed, Some("CRITICAL: tank"))
        );
        let old = r#"{"report":{"line":"CRITICAL","machines":[{"machine":"a","newest":null,"is_fresh":false},
            {"machine":"b","newest":"2026-11-20T10:00:00Z","is_fresh":true},{"x":1}]}}"#;
        let found = check(2, Judgement::Freshness, old);
        assert_eq!((found.outcome, found.freshness.len()), (Outcome::Done, 2));
        assert!(found.freshness[0].newest.is_none() && found.freshness[1].newest.is_some());
        assert_eq!(check(3, Judgement::Freshness, line).outcome, Outcome::Failed);
    }
}
