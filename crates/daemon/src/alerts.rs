//! When somebody is told: once when something begins to be bad, again after a while as long as it is, and once when it is well again.

use std::time::Duration;

use holdfast_policy::Timestamp;
use holdfast_policy::config::Event;
use holdfast_policy::schedule::Consequence;

use super::journal::RunEntry;
use super::ledger::{Alert, JobRecord};
use super::outcome::{Ended, Outcome};

/// Something to tell somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// What it is about.
    pub event: Event,
    /// The job.
    pub job: String,
    /// The machine, where it is about one.
    pub machine: Option<String>,
    /// Whether it is good news.
    pub is_good: bool,
    /// In a few words.
    pub subject: String,
    /// In more.
    pub text: String,
    /// The run that it is about.
    pub run: Option<RunEntry>,
}

impl Notice {
    /// Adds the run that has ended, and what it has achieved in words; a notice about a machine is not about the run.
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

/// What there is to tell of a run that has ended; what was told is noted in the record.
pub(super) fn after_run(
    job: &str,
    record: &mut JobRecord,
    ended: &Ended,
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
    mend(record, now);
    let mut notices = Vec::new();
    let said = || {
        format!(
            "{}\n\n{}",
            ended.error.as_deref().unwrap_or_default(),
            ended.lines.join("\n")
        )
    };
    match (consequence, ended.outcome) {
        (Consequence::Well, outcome) => {
            if let Some(alert) = record.failing.take() {
                let text = format!("It had failed since {}.", alert.since);
                notices.push(notice(Event::Failure, true, format!("{job} is well again"), text));
            }
            if outcome == Outcome::Warnings {
                let subject = format!("{job} was done, with warnings");
                let text = if ended.result.warnings.is_empty() {
                    &ended.lines
                } else {
                    &ended.result.warnings
                };
                notices.push(notice(Event::Warnings, false, subject, text.join("\n")));
            }
            notices.push(notice(Event::Success, true, format!("{job} was done"), String::new()));
        }
        // Nobody is at fault.
        (Consequence::GivenUp, Outcome::Stopped) | (Consequence::Retry(_), _) => {}
        (Consequence::GivenUp, outcome) => {
            let subject = match outcome {
                Outcome::Damage => format!("{job} has found damage"),
                _ => format!("{job} has failed"),
            };
            match &mut record.failing {
                Some(alert) if !alert.is_to_be_told(remind_after, now) => {}
                Some(alert) => {
                    alert.told = Some(now);
                    let subject = format!("{job} fails still, since {}", alert.since);
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

/// What there is to tell of machines whose snapshots were looked at.
fn of_machines(
    job: &str,
    record: &mut JobRecord,
    ended: &Ended,
    remind_after: Duration,
    now: Timestamp,
) -> Vec<Notice> {
    if !ended.outcome.is_done() || ended.freshness.is_empty() {
        return Vec::new();
    }
    // Nobody asks for a machine any more that is not spoken of.
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
            (false, Some(alert)) if alert.is_to_be_told(remind_after, now) => {
                alert.told = Some(now);
                format!("{} has no fresh snapshot still", one.machine)
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

/// What there is to tell of a job that does not run: that it fails still.
pub(super) fn reminder(job: &str, record: &mut JobRecord, remind_after: Duration, now: Timestamp) -> Option<Notice> {
    mend(record, now);
    let alert = record.failing.as_mut()?;
    if !alert.is_to_be_told(remind_after, now) {
        return None;
    }
    alert.told = Some(now);
    Some(Notice {
        event: Event::Failure,
        job: job.to_owned(),
        machine: None,
        is_good: false,
        subject: format!("{job} fails still, since {}", alert.since),
        text: format!("holdfast runs --job {job} shows what it said."),
        run: None,
    })
}

impl Alert {
    fn begin(now: Timestamp) -> Self {
        Self {
            since: now,
            told: Some(now),
        }
    }

    /// Whether it is time to tell again.
    fn is_to_be_told(&self, remind_after: Duration, now: Timestamp) -> bool {
        let remind_after = remind_after.try_into().unwrap_or_default();
        self.told.is_none_or(|told| now.duration_since(told) >= remind_after)
    }

    /// A clock that was set back makes nobody wait longer than he would have.
    fn mend(&mut self, now: Timestamp) {
        self.told = self.told.map(|told| told.min(now));
    }
}

/// Takes back what only a clock that was wrong can have made.
fn mend(record: &mut JobRecord, now: Timestamp) {
    record
        .failing
        .iter_mut()
        .chain(record.silent.values_mut())
        .for_each(|alert| alert.mend(now));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_policy::Timestamp;
    use holdfast_policy::config::Event;
    use holdfast_policy::schedule::Consequence;

    use super::{after_run, reminder};
    use crate::ledger::JobRecord;
    use crate::outcome::{Ended, Freshness, Outcome};

    const DAY: Duration = Duration::from_secs(86_400);

    fn hour(hour: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + hour * 3600).unwrap()
    }

    fn ended(outcome: Outcome, machines: &[(&str, bool)]) -> Ended {
        Ended {
            outcome,
            exit_code: None,
            error: Some("why".to_owned()),
            lines: vec!["line".to_owned()],
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

    /// What is told after a run, but for successes.
    fn told(record: &mut JobRecord, outcome: Outcome, machines: &[(&str, bool)], now: Timestamp) -> Vec<String> {
        let consequence = if outcome.is_done() {
            Consequence::Well
        } else {
            Consequence::GivenUp
        };
        let notices = after_run("a", record, &ended(outcome, machines), consequence, DAY, now);
        let bad = notices.into_iter().filter(|notice| notice.event != Event::Success);
        bad.map(|notice| notice.subject).collect()
    }

    #[test]
    fn a_failure_is_told_once_again_after_a_day_and_when_it_is_over() {
        let mut record = JobRecord::new(hour(0));
        let retry = Consequence::Retry(hour(1));
        let first = after_run("a", &mut record, &ended(Outcome::Failed, &[]), retry, DAY, hour(0));
        assert!(first.is_empty() && record.failing.is_none());
        assert_eq!(told(&mut record, Outcome::Failed, &[], hour(1)), ["a has failed"]);
        assert_eq!(told(&mut record, Outcome::Failed, &[], hour(2)), [""; 0]);
        assert!(reminder("a", &mut record, DAY, hour(24)).is_none());
        assert!(reminder("a", &mut record, DAY, hour(25)).is_some());
        assert!(reminder("a", &mut record, DAY, hour(26)).is_none());
        assert_eq!(
            told(&mut record, Outcome::Failed, &[], hour(50))[0][..14],
            *"a fails still,"
        );
        assert_eq!(told(&mut record, Outcome::Done, &[], hour(51)), ["a is well again"]);
        assert_eq!(
            told(&mut record, Outcome::Warnings, &[], hour(52)),
            ["a was done, with warnings"]
        );
        assert_eq!(
            told(&mut record, Outcome::Damage, &[], hour(53)),
            ["a has found damage"]
        );
        // The clock goes back: the reminder comes a day later, not a day and the jump.
        assert!(reminder("a", &mut record, DAY, hour(0)).is_none());
        assert!(reminder("a", &mut record, DAY, hour(24)).is_some());
    }

    #[test]
    fn silence_is_told_of_each_machine_once() {
        let mut record = JobRecord::new(hour(0));
        let (both, one) = (
            &[("web", false), ("db", false)][..],
            &[("web", true), ("db", false)][..],
        );
        assert_eq!(
            told(&mut record, Outcome::Done, both, hour(0)),
            ["web has no fresh snapshot", "db has no fresh snapshot"]
        );
        assert_eq!(told(&mut record, Outcome::Done, both, hour(1)), [""; 0]);
        // What could not be looked at says nothing of machines.
        assert_eq!(told(&mut record, Outcome::Failed, &[], hour(2)), ["a has failed"]);
        assert_eq!(
            told(&mut record, Outcome::Done, one, hour(24)),
            [
                "a is well again",
                "web has a fresh snapshot again",
                "db has no fresh snapshot still"
            ]
        );
        assert_eq!(told(&mut record, Outcome::Done, &[("x", true)], hour(25)), [""; 0]);
        assert!(record.silent.is_empty());
    }
}
