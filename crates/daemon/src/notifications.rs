//! Records and notifications of the scheduler: job records, journal, and notices to recipients. These must not delay
//! jobs.

use std::sync::Arc;
use std::time::Duration;

use holdfast_policy::Timestamp;
use holdfast_policy::config::{Event, Recipient};

use super::alerts::Notice;
use super::deliver::{Message, deliver};
use super::job_records::JobRecord;
use super::journal::{JournalEntry, NoticeEntry};
use super::{Daemon, DaemonEvent, FINAL_NOTICE_WAIT, RunMode, Severity};

/// Maximum number of pending notifications.
const PENDING_COUNT_MAX: usize = 64;
/// Delays before retries of a failed delivery.
const RETRY_DELAYS: [Duration; 3] = [
    Duration::from_secs(2),
    Duration::from_secs(30),
    Duration::from_secs(300),
];

/// The state of notifications and files.
#[derive(Debug, Default)]
pub(super) struct NotificationState {
    pending: usize,
    /// Whether the journal or the records cannot be written.
    cannot_write: bool,
}

impl Daemon<'_> {
    /// Saves the record of a job.
    pub(super) fn save_record(&mut self, name: &str, record: JobRecord) {
        let kept = self.records.write(name, record);
        self.report_write_error(kept.err());
    }

    /// Appends an entry to the journal.
    pub(super) fn append_entry(&mut self, entry: JournalEntry) {
        let noted = self.journal.append(entry);
        self.report_write_error(noted.err());
    }

    /// Writes records and entries that could not be written before.
    pub(super) fn write_pending(&mut self) {
        if !self.notifications.cannot_write {
            return;
        }
        if self.records.write_pending() && self.journal.write_pending().is_ok() {
            self.notifications.cannot_write = false;
            let lost = match self.journal.lost_count() {
                0 => String::new(),
                count => format!(" except for {count} entries, which were too many"),
            };
            self.log(
                Severity::Info,
                &format!("the journal can be written again, and is complete{lost}"),
            );
        }
    }

    /// Reports once that files cannot be written, and that jobs continue.
    fn report_write_error(&mut self, error: Option<holdfast_engine::Error>) {
        let Some(error) = error.filter(|_| !self.notifications.cannot_write) else {
            return;
        };
        self.notifications.cannot_write = true;
        let why = std::error::Error::source(&error)
            .map(|source| format!(": {source}"))
            .unwrap_or_default();
        let text = format!("{error}{why}");
        self.log(
            Severity::Error,
            &format!("{text}; jobs continue, and entries are kept in memory"),
        );
        let now = (self.environment.now)();
        let notice = Notice {
            event: Event::Failure,
            job: "daemon".to_owned(),
            machine: None,
            is_good: false,
            subject: "the journal of runs cannot be written".to_owned(),
            text,
            run: None,
        };
        self.notify([notice], &[], now);
    }

    /// Sends notices to the recipients that a job names, or to all recipients.
    pub(super) fn notify(&mut self, notices: impl IntoIterator<Item = Notice>, named: &[String], now: Timestamp) {
        for notice in notices {
            let wants = |recipient: &&Recipient| {
                recipient.on.contains(&notice.event) && (named.is_empty() || named.contains(&recipient.name))
            };
            let all: Vec<Recipient> = self.request.config.recipients.iter().filter(wants).cloned().collect();
            for recipient in all {
                self.send(&recipient, &notice, now);
            }
        }
    }

    fn send(&mut self, recipient: &Recipient, notice: &Notice, now: Timestamp) {
        let message = Message::new(notice, &self.request.host, &now.to_string());
        let mut entry = NoticeEntry {
            to: recipient.name.clone(),
            event: notice.event.word().to_owned(),
            job: notice.job.clone(),
            subject: notice.subject.clone(),
            time: now.to_string(),
            error: None,
        };
        if self.notifications.pending == PENDING_COUNT_MAX {
            entry.error = Some(format!("{PENDING_COUNT_MAX} notifications are pending"));
            self.record_failed_notice(entry);
            return;
        }
        let (clock, sender) = (Arc::clone(&self.environment.clock), self.environment.sender.clone());
        let (channel, withheld) = (recipient.channel.clone(), self.request.withheld.clone());
        // A manual run does not wait minutes for a retry.
        let waits = match self.request.mode {
            RunMode::Forever => &RETRY_DELAYS[..],
            RunMode::Due | RunMode::Jobs(_) => &RETRY_DELAYS[..1],
        };
        let mut sent = entry.clone();
        let deliver = move || {
            let mut answer = deliver(&channel, &message, &withheld, &*clock);
            for wait in waits {
                if answer.is_ok() {
                    break;
                }
                clock.sleep(*wait);
                answer = deliver(&channel, &message, &withheld, &*clock);
            }
            sent.error = answer.err();
            // The scheduler may have ended.
            sender.send(DaemonEvent::NoticeDone(sent)).ok();
        };
        match std::thread::Builder::new().name("notice".to_owned()).spawn(deliver) {
            Ok(_) => self.notifications.pending += 1,
            Err(error) => {
                entry.error = Some(error.to_string());
                self.record_failed_notice(entry);
            }
        }
    }

    /// Records that a notification was delivered or failed.
    pub(super) fn record_notice(&mut self, entry: NoticeEntry) {
        self.notifications.pending = self.notifications.pending.saturating_sub(1);
        if entry.error.is_some() {
            self.record_failed_notice(entry);
        } else {
            self.log(Severity::Info, &format!("notified {}: {}", entry.to, entry.subject));
            self.append_entry(JournalEntry::Notice(entry));
        }
    }

    fn record_failed_notice(&mut self, entry: NoticeEntry) {
        let error = entry.error.as_deref().unwrap_or_default();
        self.log(
            Severity::Error,
            &format!("{} could not be notified ({}): {error}", entry.to, entry.subject),
        );
        self.append_entry(JournalEntry::Notice(entry));
    }

    /// Waits a while for pending notifications.
    pub(super) fn finish_notices(&mut self) {
        self.await_notices();
        self.write_pending();
        if self.notifications.cannot_write {
            self.log(
                Severity::Error,
                "entries that could not be written to the journal are lost",
            );
        }
    }

    fn await_notices(&mut self) {
        let patience = match self.request.mode {
            RunMode::Forever => FINAL_NOTICE_WAIT,
            RunMode::Due | RunMode::Jobs(_) => FINAL_NOTICE_WAIT * 12,
        };
        let until = self.environment.clock.now() + patience;
        while self.notifications.pending > 0 {
            let left = until.saturating_sub(self.environment.clock.now());
            match self.environment.events.recv_timeout(left) {
                Ok(DaemonEvent::NoticeDone(entry)) => self.record_notice(entry),
                Ok(_) => {}
                Err(_) => {
                    let count = self.notifications.pending;
                    self.log(
                        Severity::Warning,
                        &format!("{count} notifications were not delivered in time and are dropped"),
                    );
                    return;
                }
            }
        }
    }
}
