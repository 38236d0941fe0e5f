//! Decides when to notify: when a problem begins, as a reminder after a while as long as the problem lasts, and when it
//! has ended.

use std::time::Duration;

use holdfast_policy::Timestamp;
use holdfast_policy::config::Event;
use holdfast_policy::schedule::Consequence;

use super::job_records::{Alert, JobRecord};
use super::journal::RunEntry;
use super::outcome::{Outcome, RunResult};

/// A notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The event.
    pub event: Event,
    /// The job.
    pub job: String,
    /// The machine, if the notice concerns one.
    pub machine: Option<String>,
    /// Whether the notice reports an improvement.
    pub is_good: bool,
    /// A short description.
    pub subject: String,
    /// The details.
    pub text: String,
    /// The run that caused the notice.
    pub run: Option<RunEntry>,
}

impl Notice {
    /// Adds the ended run and a summary of it. A notice about a machine does not get them.
    pub(super) fn add_run(&mut self, run: &RunEntry, summary: &str) {
        if self.machine.is_some() {
            return;
        }
        let parts = [summary, self.text.trim()];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        self.text = parts.join("\n\n");
        self.run = Some(run.clone());
    }
}

/// Returns the notices after the end of a run, and updates the record with them.
pub(super) fn after_run(
    job: &str,
    record: &mut JobRecord,
    ended: &RunResult,
    consequence: Consequence,
    remind_after: Duration,
    now: Timestamp,
) -> Vec<Notice> {
    let notice = |event, is_good, subject: String, text: String| Notice {
        event,
        job: job.to_owned(),
        machine: None,
        is_good,
        subject,
        text,
        run: None,
    };
    correct_clock(record, now);
    let mut notices = Vec::new();
    let said = || {
        format!(
            "{}\n\n{}",
            ended.error.as_deref().unwrap_or_default(),
            ended.lines.join("\n")
        )
    };
    match (consequence, ended.outcome) {
        (Consequence::Succeeded, outcome) => {
            if let Some(alert) = record.failing.take() {
                let text = format!("It had been failing since {}.", alert.since);
                notices.push(notice(Event::Failure, true, format!("{job} has recovered"), text));
            }
            if outcome == Outcome::Warnings {
                let subject = format!("{job} completed with warnings");
                let text = if ended.result.warnings.is_empty() {
                    &ended.lines
                } else {
                    &ended.result.warnings
                };
                notices.push(notice(Event::Warnings, false, subject, text.join("\n")));
            }
            notices.push(notice(Event::Success, true, format!("{job} completed"), String::new()));
        }
        // The user or another job caused the end: no notice.
        (Consequence::NoMoreRetries, Outcome::Stopped) | (Consequence::Retry(_), _) => {}
        (Consequence::NoMoreRetries, outcome) => {
            let subject = match outcome {
                Outcome::Damage => format!("{job} has found damage"),
                _ => format!("{job} has failed"),
            };
            match &mut record.failing {
                Some(alert) if !alert.is_reminder_due(remind_after, now) => {}
                Some(alert) => {
                    alert.notified_at = Some(now);
                    let subject = format!("{job} is still failing, since {}", alert.since);
                    notices.push(notice(Event::Failure, false, subject, said()));
                }
                none => {
                    *none = Some(Alert::begin(now));
                    notices.push(notice(Event::Failure, false, subject, said()));
                }
            }
        }
    }
    notices.extend(of_machines(job, record, ended, remind_after, now));
    notices
}

/// The notices about machines whose snapshots were checked.
fn of_machines(
    job: &str,
    record: &mut JobRecord,
    ended: &RunResult,
    remind_after: Duration,
    now: Timestamp,
) -> Vec<Notice> {
    if !ended.outcome.is_done() || ended.freshness.is_empty() {
        return Vec::new();
    }
    // Drops machines that are no longer reported.
    record
        .silent
        .retain(|machine, _| ended.freshness.iter().any(|one| one.machine == *machine));
    let mut notices = Vec::new();
    for one in &ended.freshness {
        let newest = one.newest.map_or_else(
            || "It has no snapshot at all.".to_owned(),
            |newest| format!("Its newest snapshot is of {newest}."),
        );
        let subject = match (one.is_fresh, record.silent.get_mut(&one.machine)) {
            (true, Some(_)) => {
                record.silent.remove(&one.machine);
                format!("{} has a fresh snapshot again", one.machine)
            }
            (false, None) => {
                record.silent.insert(one.machine.clone(), Alert::begin(now));
                format!("{} has no fresh snapshot", one.machine)
            }
            (false, Some(alert)) if alert.is_reminder_due(remind_after, now) => {
                alert.notified_at = Some(now);
                format!("{} still has no fresh snapshot", one.machine)
            }
            (true, None) | (false, Some(_)) => continue,
        };
        notices.push(Notice {
            event: Event::Silence,
            job: job.to_owned(),
            machine: Some(one.machine.clone()),
            is_good: one.is_fresh,
            subject,
            text: newest,
            run: None,
        });
    }
    notices
}

/// The reminder for a job that is not running and still fails.
pub(super) fn reminder(job: &str, record: &mut JobRecord, remind_after: Duration, now: Timestamp) -> Option<Notice> {
    correct_clock(record, now);
    let alert = record.failing.as_mut()?;
    if !alert.is_reminder_due(remind_after, now) {
        return None;
    }
    alert.notified_at = Some(now);
    Some(Notice {
        event: Event::Failure,
        job: job.to_owned(),
        machine: None,
        is_good: false,
        subject: format!("{job} is still failing, since {}", alert.since),
        text: format!("holdfast runs --job {job} shows its output."),
        run: None,
    })
}

impl Alert {
    fn begin(now: Timestamp) -> Self {
        Self {
            since: now,
            notified_at: Some(now),
        }
    }

    /// Whether another notification is due.
    fn is_reminder_due(&self, remind_after: Duration, now: Timestamp) -> bool {
        let remind_after = remind_after.try_into().unwrap_or_default();
        self.notified_at
            .is_none_or(|last| now.duration_since(last) >= remind_after)
    }

    /// After a clock was set back, the reminder must not be delayed further.
    fn correct_clock(&mut self, now: Timestamp) {
        self.notified_at = self.notified_at.map(|last| last.min(now));
    }
}

/// Corrects the effects of a wrong clock.
fn correct_clock(record: &mut JobRecord, now: Timestamp) {
    record
        .failing
        .iter_mut()
        .chain(record.silent.values_mut())
        .for_each(|alert| alert.correct_clock(now));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_policy::Timestamp;
    use holdfast_policy::config::Event;
    use holdfast_policy::schedule::Consequence;

    use super::{after_run, reminder};
    use crate::job_records::JobRecord;
    use crate::outcome::{Freshness, Outcome, RunResult};
    use crate::run_report::RunReport;

    const DAY: Duration = Duration::from_secs(86_400);

    fn hour(hour: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + hour * 3600).unwrap()
    }

    fn ended(outcome: Outcome, machines: &[(&str, bool)]) -> RunResult {
        RunResult {
            outcome,
            exit_code: None,
            error: Some("why".to_owned()),
            lines: vec!["line".to_owned()],
            result: RunReport::default(),
            freshness: machines
                .iter()
                .map(|(machine, is_fresh)| Freshness {
                    machine: (*machine).to_owned(),
                    newest: None,
                    is_fresh: *is_fresh,
                })
                .collect(),
        }
    }

    /// The subjects of the notices after a run, except for notices of success.
    fn subjects(record: &mut JobRecord, outcome: Outcome, machines: &[(&str, bool)], now: Timestamp) -> Vec<String> {
        let consequence = if outcome.is_done() {
            Consequence::Succeeded
        } else {
            Consequence::NoMoreRetries
        };
        let notices = after_run("a", record, &ended(outcome, machines), consequence, DAY, now);
        let bad = notices.into_iter().filter(|notice| notice.event != Event::Success);
        bad.map(|notice| notice.subject).collect()
    }

    #[test]
    fn a_failure_is_reported_once_again_after_a_day_and_when_it_is_over() {
        let mut record = JobRecord::new(hour(0));
        let retry = Consequence::Retry(hour(1));
        let first = after_run("a", &mut record, &ended(Outcome::Failed, &[]), retry, DAY, hour(0));
        assert!(first.is_empty() && record.failing.is_none());
        assert_eq!(subjects(&mut record, Outcome::Failed, &[], hour(1)), ["a has failed"]);
        assert_eq!(subjects(&mut record, Outcome::Failed, &[], hour(2)), [""; 0]);
        assert!(reminder("a", &mut record, DAY, hour(24)).is_none());
        assert!(reminder("a", &mut record, DAY, hour(25)).is_some());
        assert!(reminder("a", &mut record, DAY, hour(26)).is_none());
        assert_eq!(
            subjects(&mut record, Outcome::Failed, &[], hour(50))[0][..14],
            *"a is still fai"
        );
        assert_eq!(subjects(&mut record, Outcome::Done, &[], hour(51)), ["a has recovered"]);
        assert_eq!(
            subjects(&mut record, Outcome::Warnings, &[], hour(52)),
            ["a completed with warnings"]
        );
        assert_eq!(
            subjects(&mut record, Outcome::Damage, &[], hour(53)),
            ["a has found damage"]
        );
        // The clock is set back: the reminder comes a day later, as without the change.
        assert!(reminder("a", &mut record, DAY, hour(0)).is_none());
        assert!(reminder("a", &mut record, DAY, hour(24)).is_some());
    }

    #[test]
    fn silence_is_reported_once_per_machine() {
        let mut record = JobRecord::new(hour(0));
        let (both, one) = (
            &[("web", false), ("db", false)][..],
            &[("web", true), ("db", false)][..],
        );
        assert_eq!(
            subjects(&mut record, Outcome::Done, both, hour(0)),
            ["web has no fresh snapshot", "db has no fresh snapshot"]
        );
        assert_eq!(subjects(&mut record, Outcome::Done, both, hour(1)), [""; 0]);
        // A failed check does not change the state of machines.
        assert_eq!(subjects(&mut record, Outcome::Failed, &[], hour(2)), ["a has failed"]);
        assert_eq!(
            subjects(&mut record, Outcome::Done, one, hour(24)),
            [
                "a has recovered",
                "web has a fresh snapshot again",
                "db still has no fresh snapshot"
            ]
        );
        assert_eq!(subjects(&mut record, Outcome::Done, &[("x", true)], hour(25)), [""; 0]);
        assert!(record.silent.is_empty());
    }
}
