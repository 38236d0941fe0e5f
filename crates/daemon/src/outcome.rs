//! Determines the outcome of a run from the result of its program.

use holdfast_host::{ProcessOutcome, WorkerOutput};
use holdfast_policy::Timestamp;
use holdfast_policy::config::ExitCodeScheme;
use holdfast_policy::schedule::RunEnd;
use serde_json::Value;

use super::run_report::RunReport;

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The run succeeded.
    Done,
    /// The run succeeded with warnings.
    Warnings,
    /// The run failed, entirely or partly.
    Failed,
    /// The command line is invalid.
    Usage,
    /// Another process held a lock that the run needed.
    Locked,
    /// The run found damage.
    Damage,
    /// The run exceeded its timeout.
    TimedOut,
    /// The run was stopped.
    Stopped,
    /// The result is unknown: the scheduler was killed during the run.
    Unseen,
}

impl Outcome {
    /// All outcomes.
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

    /// The word for the outcome in the journal and in JSON documents.
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

    /// The outcome for a word.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|outcome| outcome.word() == word)
    }

    /// Whether the job succeeded.
    pub const fn is_done(self) -> bool {
        matches!(self, Self::Done | Self::Warnings)
    }

    /// The outcome for the schedule.
    pub(super) const fn end(self) -> RunEnd {
        match self {
            Self::Done | Self::Warnings => RunEnd::Done,
            // A retry does not change the command line or repair damage.
            Self::Usage | Self::Damage => RunEnd::FailedPermanently,
            Self::Stopped => RunEnd::Stopped,
            Self::Failed | Self::Locked | Self::TimedOut | Self::Unseen => RunEnd::Failed,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RunResult {
    pub(super) outcome: Outcome,
    pub(super) exit_code: Option<i32>,
    /// The error.
    pub(super) error: Option<String>,
    /// The last lines of the output.
    pub(super) lines: Vec<String>,
    /// The results in the JSON document of the program.
    pub(super) result: RunReport,
    /// Machines whose snapshots were checked.
    pub(super) freshness: Vec<Freshness>,
}

/// Whether a machine has a fresh snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Freshness {
    pub(super) machine: String,
    pub(super) newest: Option<Timestamp>,
    pub(super) is_fresh: bool,
}

/// Why the scheduler stopped a running program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopCause {
    TimedOut,
    Requested,
}

/// Determines the result of a run.
pub(super) fn ended(worked: &WorkerOutput, exit_codes: ExitCodeScheme, stop: Option<StopCause>) -> RunResult {
    let document: Value = serde_json::from_slice(&worked.answer).unwrap_or_default();
    let (code, killed_by) = match worked.outcome {
        ProcessOutcome::Success => (Some(0), None),
        ProcessOutcome::ExitCode(code) => (Some(code), None),
        ProcessOutcome::Signal(signal) => (None, Some(signal)),
        ProcessOutcome::TimedOut | ProcessOutcome::Stopped => (None, None),
    };
    let judged = match exit_codes {
        ExitCodeScheme::Verb => of_verb(code),
        ExitCodeScheme::Check => of_check(code),
        // A check that lists machines has succeeded, even if it reports problems of these machines.
        ExitCodeScheme::Freshness => match of_check(code) {
            Outcome::Failed if code == Some(2) && !freshness(&document["report"]["machines"]).is_empty() => {
                Outcome::Done
            }
            other => other,
        },
    };
    let outcome = match stop {
        _ if judged.is_done() => judged,
        Some(StopCause::TimedOut) => Outcome::TimedOut,
        Some(StopCause::Requested) => Outcome::Stopped,
        None => judged,
    };
    let error = (!outcome.is_done()).then(|| match outcome {
        Outcome::TimedOut => "it exceeded its timeout and was stopped".to_owned(),
        Outcome::Stopped => "it was asked to stop".to_owned(),
        _ => said(&document)
            .or_else(|| worked.lines.iter().rev().find(|line| !line.trim().is_empty()).cloned())
            .or_else(|| killed_by.map(|signal| format!("it was killed by signal {signal}")))
            .unwrap_or_else(|| worked.outcome.to_string()),
    });
    RunResult {
        outcome,
        exit_code: code,
        error,
        lines: worked.lines.clone(),
        result: RunReport::of_document(&document),
        freshness: freshness(&document["report"]["machines"]),
    }
}

/// The outcome for an exit code as in `docs/exit-codes.md`.
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

/// The error in a document with its causes, or the line of a check.
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
    use holdfast_host::{ProcessOutcome, WorkerOutput};
    use holdfast_policy::config::ExitCodeScheme;

    use super::{Outcome, StopCause, ended};

    fn worked(outcome: ProcessOutcome, answer: &str, lines: &[&str]) -> WorkerOutput {
        WorkerOutput {
            outcome,
            answer: answer.as_bytes().to_vec(),
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
        }
    }

    #[test]
    fn exit_codes_and_messages_are_as_documented() {
        let error = r#"{"error":{"message":"open x","causes":["gone"],"hint":"look"}}"#;
        for (ending, answer, lines, stop, outcome, words) in [
            (ProcessOutcome::Success, "", &[][..], None, Outcome::Done, None),
            (
                ProcessOutcome::ExitCode(3),
                "{}",
                &["odd"],
                None,
                Outcome::Warnings,
                None,
            ),
            (
                ProcessOutcome::ExitCode(1),
                error,
                &["x"],
                None,
                Outcome::Failed,
                Some("open x: gone (look)"),
            ),
            (
                ProcessOutcome::ExitCode(2),
                "",
                &["no such option", ""],
                None,
                Outcome::Usage,
                Some("no such option"),
            ),
            (
                ProcessOutcome::ExitCode(4),
                error,
                &[],
                None,
                Outcome::Locked,
                Some("open x: gone (look)"),
            ),
            (
                ProcessOutcome::ExitCode(5),
                "",
                &[],
                None,
                Outcome::Damage,
                Some("it ended with code 5"),
            ),
            (
                ProcessOutcome::Signal(9),
                "",
                &[],
                None,
                Outcome::Failed,
                Some("it was killed by signal 9"),
            ),
            (
                ProcessOutcome::Signal(15),
                error,
                &[],
                Some(StopCause::TimedOut),
                Outcome::TimedOut,
                Some("it exceeded its timeout and was stopped"),
            ),
            (
                ProcessOutcome::ExitCode(1),
                "",
                &[],
                Some(StopCause::Requested),
                Outcome::Stopped,
                Some("it was asked to stop"),
            ),
            // The program completed before it received the request to stop.
            (
                ProcessOutcome::Success,
                "",
                &[],
                Some(StopCause::Requested),
                Outcome::Done,
                None,
            ),
        ] {
            let found = ended(&worked(ending, answer, lines), ExitCodeScheme::Verb, stop);
            assert_eq!((found.outcome, found.error.as_deref()), (outcome, words));
        }
        assert!(
            Outcome::ALL
                .iter()
                .all(|outcome| Outcome::from_word(outcome.word()) == Some(*outcome))
        );
    }

    #[test]
    fn checks_have_codes_of_their_own_and_old_snapshots_are_no_failure_of_the_check() {
        let check = |code, exit_codes, answer: &str| {
            ended(&worked(ProcessOutcome::ExitCode(code), answer, &[]), exit_codes, None)
        };
        let line = r#"{"report":{"line":"CRITICAL: tank"}}"#;
        assert_eq!(check(1, ExitCodeScheme::Check, line).outcome, Outcome::Warnings);
        let critical = check(2, ExitCodeScheme::Check, line);
        assert_eq!(
            (critical.outcome, critical.error.as_deref()),
            (Outcome::Failed, Some("CRITICAL: tank"))
        );
        let old = r#"{"report":{"line":"CRITICAL","machines":[{"machine":"a","newest":null,"is_fresh":false},
            {"machine":"b","newest":"2026-11-20T10:00:00Z","is_fresh":true},{"x":1}]}}"#;
        let found = check(2, ExitCodeScheme::Freshness, old);
        assert_eq!((found.outcome, found.freshness.len()), (Outcome::Done, 2));
        assert!(found.freshness[0].newest.is_none() && found.freshness[1].newest.is_some());
        assert_eq!(check(3, ExitCodeScheme::Freshness, line).outcome, Outcome::Failed);
    }
}
