//! Locks on a machine: one backup of it at a time, and one point in time.
//!
//! | file, beside the journal of runs | locked (flock) by |
//! |---|---|
//! | `machines/UUID.backup` | a backup, from its beginning to its end |
//! | `machines/UUID.instant` | a process that freezes or pauses the machine, while it does |
//!
//! So host snapshots can be made while a backup reads, and no process freezes what another one has frozen. A lock ends
//! with its process, even if that is killed. The content of the file names the holder for users; no decision depends on
//! it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::Duration;

use holdfast_host::{MachineState, MachineSummary, command_line_of};
use jiff::Timestamp;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use super::run_journal::JournalPlace;
use crate::job::{Error, Job, Result};

/// The folder of the locks, beside the folder of the journal.
const FOLDER: &str = "machines";
/// The maximum size of a lock file's content in bytes.
const BYTES_MAX: u64 = 4096;
/// How long to wait until another process ends its pause, which takes milliseconds.
pub(crate) const INSTANT_PATIENCE: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The UUID of a QEMU that was started without one.
const NO_UUID: &str = "00000000-0000-0000-0000-000000000000";

/// Eight digits that identify the folder of locks on this host; the names of snapshots created for backups at
/// hypervisors contain them. A process that has locked a machine there knows that no other process works on objects
/// with the same digits. The lock excludes no process of another host with the same name, or of another user.
pub(crate) fn place_digits(place: Option<&JournalPlace>) -> String {
    // Not every host has a machine id; the path of the folder is always known.
    let machine_id = std::fs::read("/etc/machine-id").unwrap_or_default();
    let folder = place.map(|place| place.folder.as_os_str()).unwrap_or_default();
    digits_of(&machine_id, folder.as_encoded_bytes())
}

fn digits_of(machine_id: &[u8], folder: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(machine_id);
    hasher.update(folder);
    hasher.finalize().to_hex()[..8].to_owned()
}

/// The work that a lock protects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// A backup of the machine.
    Backup,
    /// Freezing or pausing the machine.
    Instant,
}

/// The lock on a machine: until this is dropped, no other process does the same work on it.
#[derive(Debug)]
pub(crate) struct MachineLock {
    _file: File,
}

impl MachineLock {
    /// Locks a machine, and waits up to `patience` for another holder. Returns none if runs are not noted, or if the
    /// lock cannot be created: a full disk must not prevent a backup.
    ///
    /// # Errors
    /// [`holdfast_host::Error::Busy`]: another process holds the lock; the error names it.
    pub(crate) fn take(
        place: Option<&JournalPlace>,
        summary: &MachineSummary,
        work: Work,
        patience: Duration,
        now: Timestamp,
        job: Job<'_>,
    ) -> Result<Option<Self>> {
        let Some(path) = place.and_then(|place| path(place, summary, work)) else {
            return Ok(None);
        };
        let mut file = match open(&path) {
            Ok(file) => file,
            Err(error) => {
                let message = format!(
                    "{}: others are not kept away: {}: {error}",
                    summary.name,
                    path.display()
                );
                job.progress.note(&message);
                return Ok(None);
            }
        };
        let start = job.clock.now();
        let mut has_warned = false;
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let holder = holder(&mut file, work);
            if job.clock.now().saturating_sub(start) >= patience {
                return Err(Error::from(holdfast_host::Error::Busy {
                    machine: summary.name.clone(),
                    holder,
                }));
            }
            if !has_warned {
                job.progress.note(&format!("{}: waiting for {holder}", summary.name));
                has_warned = true;
            }
            job.interrupt.check()?;
            job.clock.sleep(LOOK_INTERVAL);
        }
        // The note is only for users: the lock is valid without it.
        note(&mut file, now).ok();
        Ok(Some(Self { _file: file }))
    }

    /// Whether a process holds the lock on a machine now. Nothing is created.
    pub(crate) fn is_held(place: &JournalPlace, summary: &MachineSummary, work: Work) -> bool {
        let Some(Ok(file)) = path(place, summary, work).map(File::open) else {
            return false;
        };
        // This lock is released at once, when the file is closed.
        flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// Locks the point in time of all machines that are not shut off. All processes lock them in the same order, so
    /// that no two wait for each other.
    pub(crate) fn instants<'m>(
        machines: impl Iterator<Item = (Option<&'m JournalPlace>, &'m MachineSummary)>,
        now: Timestamp,
        job: Job<'_>,
    ) -> Result<Vec<Self>> {
        let mut machines: Vec<_> = machines
            .filter(|(_, summary)| summary.state != MachineState::ShutOff)
            .collect();
        machines.sort_by_key(|(place, summary)| place.and_then(|place| path(place, summary, Work::Instant)));
        let mut locks = Vec::new();
        for (place, summary) in machines {
            locks.extend(Self::take(place, summary, Work::Instant, INSTANT_PATIENCE, now, job)?);
        }
        Ok(locks)
    }
}

fn path(place: &JournalPlace, summary: &MachineSummary, work: Work) -> Option<PathBuf> {
    let safe = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let name: String = if summary.uuid.is_empty() || summary.uuid == NO_UUID {
        // Without a UUID, the machine is identified by its connection.
        place.way.join(" ").chars().map(safe).take(200).collect()
    } else {
        summary.uuid.chars().map(safe).take(200).collect()
    };
    let ending = match work {
        Work::Backup => "backup",
        Work::Instant => "instant",
    };
    Some(place.folder.parent()?.join(FOLDER).join(format!("{name}.{ending}")))
}

fn open(path: &std::path::Path) -> std::io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.mode(0o600).open(path)
}

/// Writes the holder and the time into the file.
fn note(file: &mut File, now: Timestamp) -> std::io::Result<()> {
    file.set_len(0)?;
    let text = json!({ "process": std::process::id(), "since": format!("{now:.0}") });
    file.write_all(text.to_string().as_bytes())
}

/// The holder, as text.
fn holder(file: &mut File, work: Work) -> String {
    let mut text = String::new();
    let read = std::io::Seek::rewind(file).and_then(|()| file.take(BYTES_MAX).read_to_string(&mut text));
    let noted: Value = read
        .ok()
        .and_then(|_| serde_json::from_str(&text).ok())
        .unwrap_or_default();
    let process = noted["process"]
        .as_u64()
        .and_then(|process| u32::try_from(process).ok());
    let what = match work {
        Work::Backup => "another backup of it",
        Work::Instant => "another process that freezes or pauses it",
    };
    let Some(process) = process else {
        return what.to_owned();
    };
    let words = command_line_of(process);
    let verb = words.iter().skip(1).find(|word| !word.starts_with('-'));
    let verb = verb.map(|verb| format!("holdfast {verb}, ")).unwrap_or_default();
    let since = noted["since"].as_str().unwrap_or_default();
    format!("{what}: {verb}process {process}, since {since}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_block::ManualClock;
    use holdfast_host::{MachineState, MachineSummary};
    use holdfast_repo::{Processes as _, SystemProcesses};
    use jiff::Timestamp;

    use super::{INSTANT_PATIENCE, MachineLock, Work};
    use crate::job::{Interrupt, Job, NoProgress};
    use crate::machine::run_journal::JournalPlace;

    #[test]
    fn places_of_other_hosts_and_users_are_others() {
        let here = super::digits_of(b"1", b"/var/lib/holdfast/runs");
        assert!(
            here.len() == 8 && here.bytes().all(|digit| digit.is_ascii_hexdigit()),
            "{here}"
        );
        assert_ne!(here, super::digits_of(b"2", b"/var/lib/holdfast/runs"));
        assert_ne!(here, super::digits_of(b"1", b"/home/ana/.local/state/holdfast/runs"));
    }

    #[test]
    fn each_kind_of_work_has_one_lock_holder_and_an_error_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let (clock, interrupt) = (ManualClock::new(), Interrupt::new());
        let job = Job {
            progress: &NoProgress,
            interrupt: &interrupt,
            clock: &clock,
            thread_count: 1,
        };
        let place = JournalPlace {
            folder: folder.path().join("runs"),
            way: vec!["web1".to_owned()],
            process: SystemProcesses.this(),
        };
        let machine = |uuid: &str| MachineSummary {
            name: "web1".to_owned(),
            uuid: uuid.to_owned(),
            state: MachineState::Running,
        };
        let take = |uuid: &str, work, patience| {
            MachineLock::take(Some(&place), &machine(uuid), work, patience, Timestamp::UNIX_EPOCH, job)
        };
        let first = take("a", Work::Backup, Duration::ZERO).unwrap().unwrap();
        let said = take("a", Work::Backup, Duration::from_secs(2)).unwrap_err().to_string();
        let process = format!("process {}, since 1970-01-01T00:00:00Z", std::process::id());
        assert!(
            said.contains("web1 is busy: another backup of it") && said.ends_with(&process),
            "{said}"
        );
        let instants = MachineLock::instants([(Some(&place), &machine("a"))].into_iter(), Timestamp::UNIX_EPOCH, job);
        assert_eq!(instants.unwrap().len(), 1, "a backup that reads is no instant");
        assert!(take("b", Work::Backup, Duration::ZERO).unwrap().is_some());
        let is_held = |uuid, work| MachineLock::is_held(&place, &machine(uuid), work);
        assert!(is_held("a", Work::Backup) && !is_held("b", Work::Backup) && !is_held("c", Work::Backup));
        drop(first);
        assert!(!is_held("a", Work::Backup));
        assert!(take("a", Work::Backup, Duration::ZERO).unwrap().is_some());
        // Waiting can be interrupted.
        let _held = take("a", Work::Instant, INSTANT_PATIENCE).unwrap();
        interrupt.request();
        let stopped = take("a", Work::Instant, INSTANT_PATIENCE);
        assert!(matches!(stopped, Err(crate::Error::Interrupted(_))), "{stopped:?}");
        // Without a folder for locks there is no lock.
        let nowhere = MachineLock::take(
            None,
            &machine("a"),
            Work::Instant,
            Duration::ZERO,
            Timestamp::UNIX_EPOCH,
            job,
        );
        assert!(nowhere.unwrap().is_none());
    }
}
