//! What the scheduler writes down and tells: the ledger, the journal, and notices to people, none of which may hold up a job.

use std::sync::Arc;
use std::time::Duration;

use holdfast_policy::Timestamp;
use holdfast_policy::config::{Event, Notify};

use super::alerts::Notice;
use super::deliver::{Message, deliver};
use super::journal::{JournalEntry, NoticeEntry};
use super::ledger::JobRecord;
use super::{Asked, Daemon, DaemonEvent, LAST_NOTICES, Severity};

/// Notices that are under way at once, at most.
const UNDER_WAY_MAX: usize = 64;
/// How long to wait before a notice that could not be delivered is tried again.
const WAITS: [Duration; 3] = [
    Duration::from_secs(2),
    Duration::from_secs(30),
    Duration::from_secs(300),
];

/// How the telling is.
#[derive(Debug, Default)]
pub(super) struct Told {
    under_way: usize,
    /// Whether the journal or the ledger cannot be written.
    is_ill: bool,
}

impl Daemon<'_> {
    /// Keeps the record of a job.
    pub(super) fn keep(&mut self, name: &str, record: JobRecord) {
        let kept = self.ledger.write(name, record);
        self.note_health(kept.err());
    }

    /// Notes something in the journal.
    pub(super) fn note(&mut self, entry: JournalEntry) {
        let noted = self.journal.note(entry);
        self.note_health(noted.err());
    }

    /// Writes what could not be written before.
    pub(super) fn catch_up_with_files(&mut self) {
        if !self.told.is_ill {
            return;
        }
        if self.ledger.write_rest() && self.journal.write_rest().is_ok() {
            self.told.is_ill = false;
            let lost = match self.journal.lost_count() {
                0 => String::new(),
                count => format!(", but for {count} entries that were too many"),
            };
            self.say(
                Severity::Info,
                &format!("the journal can be written again, and is complete{lost}"),
            );
        }
    }

    /// Says once that nothing can be written, and that it goes on all the same.
    fn note_health(&mut self, error: Option<holdfast_engine::Error>) {
        let Some(error) = error.filter(|_| !self.told.is_ill) else {
            return;
        };
        self.told.is_ill = true;
        let why = std::error::Error::source(&error)
            .map(|source| format!(": {source}"))
            .unwrap_or_default();
        let text = format!("{error}{why}");
        self.say(
            Severity::Error,
            &format!("{text}; jobs go on, and what is to be written is kept in memory meanwhile"),
        );
        let now = (self.world.now)();
        let notice = Notice {
            event: Event::Failure,
            job: "daemon".to_owned(),
            machine: None,
            is_good: false,
            subject: "the journal of runs cannot be written".to_owned(),
            text,
            run: None,
        };
        self.tell([notice], &[], now);
    }

    /// Has notices delivered to those who want them: those that a job names, or all.
    pub(super) fn tell(&mut self, notices: impl IntoIterator<Item = Notice>, named: &[String], now: Timestamp) {
        for notice in notices {
            let wants = |notify: &&Notify| {
                notify.on.contains(&notice.event) && (named.is_empty() || named.contains(&notify.name))
            };
            let all: Vec<Notify> = self.request.config.notifies.iter().filter(wants).cloned().collect();
            for notify in all {
                self.send(&notify, &notice, now);
            }
        }
    }

    fn send(&mut self, notify: &Notify, notice: &Notice, now: Timestamp) {
        let message = Message::new(notice, &self.request.host, &now.to_string());
        let mut entry = NoticeEntry {
            to: notify.name.clone(),
            event: notice.event.word().to_owned(),
            job: notice.job.clone(),
            subject: notice.subject.clone(),
            time: now.to_string(),
            error: None,
        };
        if self.told.under_way == UNDER_WAY_MAX {
            entry.error = Some(format!("{UNDER_WAY_MAX} others are under way"));
            self.note_given_up(entry);
            return;
        }
        let (clock, sender) = (Arc::clone(&self.world.clock), self.world.sender.clone());
        let (channel, withheld) = (notify.channel.clone(), self.request.withheld.clone());
        // Who waits for the end of a run by hand does not wait for minutes.
        let waits = match self.request.asked {
            Asked::Forever => &WAITS[..],
            Asked::Due | Asked::Jobs(_) => &WAITS[..1],
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
            // Nobody hears it who has ended.
            sender.send(DaemonEvent::Told(sent)).ok();
        };
        match std::thread::Builder::new().name("notice".to_owned()).spawn(deliver) {
            Ok(_) => self.told.under_way += 1,
            Err(error) => {
                entry.error = Some(error.to_string());
                self.note_given_up(entry);
            }
        }
    }

    /// A notice was delivered, or given up.
    pub(super) fn note_told(&mut self, entry: NoticeEntry) {
        self.told.under_way = self.told.under_way.saturating_sub(1);
        if entry.error.is_some() {
            self.note_given_up(entry);
        } else {
            self.say(Severity::Info, &format!("{} was told: {}", entry.to, entry.subject));
            self.note(JournalEntry::Notice(entry));
        }
    }

    fn note_given_up(&mut self, entry: NoticeEntry) {
        let error = entry.error.as_deref().unwrap_or_default();
        self.say(
            Severity::Error,
            &format!("{} could not be told that {}: {error}", entry.to, entry.subject),
        );
        self.note(JournalEntry::Notice(entry));
    }

    /// Waits for notices that are under way, a while.
    pub(super) fn hear_last_notices(&mut self) {
        self.hear_notices();
        self.catch_up_with_files();
        if self.told.is_ill {
            self.say(Severity::Error, "what could not be written to the journal is lost");
        }
    }

    fn hear_notices(&mut self) {
        let patience = match self.request.asked {
            Asked::Forever => LAST_NOTICES,
            Asked::Due | Asked::Jobs(_) => LAST_NOTICES * 12,
        };
        let until = self.world.clock.now() + patience;
        while self.told.under_way > 0 {
            let left = until.saturating_sub(self.world.clock.now());
            match self.world.events.recv_timeout(left) {
                Ok(DaemonEvent::Told(entry)) => self.note_told(entry),
                Ok(_) => {}
                Err(_) => {
                    let count = self.told.under_way;
                    self.say(
                        Severity::Warning,
                        &format!("{count} notices are not delivered yet, and given up"),
                    );
                    return;
                }
            }
        }
    }
}
