//! Leftovers of backups in XenServer and XCP-ng pools: snapshots of killed backups, and disks that are kept for backups
//! that will never run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use holdfast_host::processes_named;
use holdfast_host::xapi::{BaseDisk, ListedSnapshot, Pool, XenMachine};
use holdfast_repo::Liveness;
use jiff::Timestamp;

use super::seen::{FindingKind, Repair, Seen};
use super::seen::{SeenKept, SeenPool, SeenSnapshots, SnapshotOwner};
use super::{Action, DoctorRequest, Finding};
use crate::capture::xen::{LABEL, is_of_run, purpose_of, remove_left, snapshot_prefix};
use crate::job::{Job, Result};
use crate::machine::lock::{MachineLock, Work, place_digits};
use crate::machine::run_journal::JournalPlace;

/// A pool to examine.
pub struct ExaminedPool {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The machines to examine.
    pub machines: Vec<XenMachine>,
    /// Whether the whole pool is examined; only then leftovers without a machine are searched.
    pub is_whole: bool,
}

impl ExaminedPool {
    fn machine(&self, uuid: &str) -> Option<&XenMachine> {
        self.machines.iter().find(|machine| machine.summary.uuid == uuid)
    }
}

/// Examines the pools. Repositories must be examined afterwards: they then contain everything that a backup has stored by now.
pub(super) fn look(request: &DoctorRequest<'_>) -> (Vec<SeenPool>, Vec<(String, String)>) {
    let (mut seen, mut unreachable) = (Vec::new(), Vec::new());
    for subject in &request.pools {
        match look_at(request, subject) {
            Ok(pool) => seen.push(pool),
            Err(error) => unreachable.push((subject.pool.title(), error.to_string())),
        }
    }
    (seen, unreachable)
}

fn look_at(request: &DoctorRequest<'_>, subject: &ExaminedPool) -> Result<SeenPool> {
    Ok(SeenPool {
        title: subject.pool.title(),
        kept: kept(subject)?,
        snapshots: snapshots(request, subject)?,
    })
}

fn kept(subject: &ExaminedPool) -> Result<Vec<SeenKept>> {
    let mut kept: BTreeMap<String, SeenKept> = BTreeMap::new();
    for disk in subject.pool.base_disks()? {
        let Some((repository, machine)) = purpose_of(&disk.purpose) else {
            continue;
        };
        let machine = subject.machine(machine);
        if machine.is_none() && !subject.is_whole {
            continue;
        }
        let entry = kept.entry(disk.purpose.clone()).or_insert_with(|| SeenKept {
            purpose: disk.purpose.clone(),
            repository: repository.to_owned(),
            machine: machine.map(|machine| machine.summary.name.clone()),
            disks: Vec::new(),
            used_bytes: 0,
        });
        entry.disks.push(disk.uuid);
        entry.used_bytes += disk.used_bytes;
    }
    Ok(kept.into_values().collect())
}

/// The snapshots made by backups of the examined machines, grouped by machine and owner.
fn snapshots(request: &DoctorRequest<'_>, subject: &ExaminedPool) -> Result<Vec<SeenSnapshots>> {
    let named = |subject: &ExaminedPool| subject.pool.all_snapshots_labelled(&format!("{LABEL} "));
    let first = named(subject)?;
    if first.is_empty() {
        return Ok(Vec::new());
    }
    let prefix = prefix(request);
    let processes = processes_named(request.program);
    let processes: Option<Vec<Vec<String>>> =
        processes.map(|found| found.into_iter().map(|process| process.arguments).collect());
    let life = |machine: Option<&XenMachine>| life(request, machine, processes.as_deref());
    let lives: Vec<SnapshotOwner> = first
        .iter()
        .map(|one| whose(one, &prefix, || life(owner(subject, one))))
        .collect();
    // A backup that has ended meanwhile has removed its snapshots.
    let still: BTreeSet<String> = named(subject)?.into_iter().map(|one| one.snapshot.uuid).collect();
    let mut seen: Vec<SeenSnapshots> = Vec::new();
    for (one, whose) in first.into_iter().zip(lives) {
        let machine = owner(subject, &one).map(|machine| machine.summary.name.clone());
        let is_meant = machine.is_some() || (subject.is_whole && is_of_any(&one.snapshot.label));
        if !still.contains(&one.snapshot.uuid) || !is_meant || !is_of_any(&one.snapshot.label) {
            continue;
        }
        let since_ms = time_ms(&one.time);
        let snapshot = (one.snapshot.uuid, one.snapshot.label);
        match seen
            .iter_mut()
            .find(|seen| seen.machine.is_some() && seen.machine == machine && seen.whose == whose)
        {
            Some(seen) => {
                seen.snapshots.push(snapshot);
                seen.since_ms = seen.since_ms.into_iter().chain(since_ms).min();
            }
            None => seen.push(SeenSnapshots {
                machine,
                snapshots: vec![snapshot],
                since_ms,
                whose,
            }),
        }
    }
    Ok(seen)
}

/// The machine of a snapshot, if it is examined.
fn owner<'p>(subject: &'p ExaminedPool, snapshot: &ListedSnapshot) -> Option<&'p XenMachine> {
    let mut machines = subject.machines.iter();
    machines.find(|machine| machine.reference == snapshot.machine)
}

fn whose(snapshot: &ListedSnapshot, prefix: &str, life: impl Fn() -> Liveness) -> SnapshotOwner {
    if is_of_run(&snapshot.snapshot.label, prefix) {
        SnapshotOwner::Ours(life())
    } else {
        SnapshotOwner::Another
    }
}

/// Whether a name has the form that a backup of any host uses: `holdfast HOST PLACE RUN`. A user may choose a similar name.
fn is_of_any(label: &str) -> bool {
    let words: Vec<&str> = label.split(' ').collect();
    match words[..] {
        [LABEL, host, place, _] => is_of_run(label, &snapshot_prefix(host, place)) && place.len() == 8,
        _ => false,
    }
}

/// Parses a time of the pool, in milliseconds since 1970-01-01 UTC.
fn time_ms(text: &str) -> Option<i64> {
    let digits: String = text.chars().filter(|letter| !"-:".contains(*letter)).collect();
    let time: Timestamp = digits.parse().ok()?;
    Some(time.as_millisecond()).filter(|ms| *ms > 0)
}

/// Whether a backup of the machine is running. If its lock cannot be checked, any backup of pools may be the one.
fn life(request: &DoctorRequest<'_>, machine: Option<&XenMachine>, processes: Option<&[Vec<String>]>) -> Liveness {
    let Some(place) = place(request) else {
        return Liveness::Unknown;
    };
    if machine.is_some_and(|machine| MachineLock::is_held(&place, &machine.summary, Work::Backup)) {
        return Liveness::Alive;
    }
    match processes {
        Some(processes) if !processes.iter().any(|words| backs_up_pools(words)) => Liveness::Dead,
        _ => Liveness::Unknown,
    }
}

/// Whether a command line is a backup of machines in pools.
fn backs_up_pools(words: &[String]) -> bool {
    words.iter().any(|word| word == "backup") && words.iter().any(|word| word.starts_with("xen://"))
}

fn place(request: &DoctorRequest<'_>) -> Option<JournalPlace> {
    Some(JournalPlace {
        folder: request.journal.clone()?,
        way: Vec::new(),
        process: request.process.clone(),
    })
}

fn prefix(request: &DoctorRequest<'_>) -> String {
    snapshot_prefix(&request.process.host, &place_digits(place(request).as_ref()))
}

/// The findings; remarks are added to `notes`.
pub(super) fn diagnose(seen: &Seen, pool: &SeenPool, notes: &mut Vec<String>) -> Vec<Finding> {
    let of_snapshots = pool
        .snapshots
        .iter()
        .filter_map(|snapshots| diagnose_snapshots(&pool.title, snapshots, notes));
    let mut findings: Vec<Finding> = of_snapshots.collect();
    for kept in &pool.kept {
        findings.extend(diagnose_kept(seen, &pool.title, kept, notes));
    }
    let is_kept = |id: &&String| pool.kept.iter().any(|kept| kept.repository.starts_with(id.as_str()));
    for id in seen.forgotten_repositories.iter().filter(|id| !is_kept(id)) {
        notes.push(format!("{} keeps nothing for a repository {id}", pool.title));
    }
    findings
}

fn diagnose_snapshots(title: &str, seen: &SeenSnapshots, notes: &mut Vec<String>) -> Option<Finding> {
    let machine = seen.machine.as_deref().unwrap_or("a machine that is gone");
    let names: Vec<String> = seen.snapshots.iter().map(|(_, name)| format!("{name:?}")).collect();
    let names = names.join(", ");
    match seen.whose {
        SnapshotOwner::Ours(Liveness::Dead) => {}
        SnapshotOwner::Ours(Liveness::Alive) => {
            notes.push(format!("a backup of {machine} of {title} is running"));
            return None;
        }
        SnapshotOwner::Ours(Liveness::Unknown) => {
            notes.push(format!(
                "it is not known whether the backup that made the snapshot {names} of {machine} of {title} still runs: try again when no backup runs"
            ));
            return None;
        }
        SnapshotOwner::Another => {
            notes.push(format!(
                "{title} has the snapshot {names} of {machine}, of a backup by another host or user: run holdfast doctor there; if no backups run there any more, delete it by the pool's own means"
            ));
            return None;
        }
    }
    let uuids = seen.snapshots.iter().map(|(uuid, _)| uuid.clone()).collect();
    Some(Finding {
        machine: seen.machine.clone(),
        kind: FindingKind::PoolSnapshot,
        what: format!(
            "a backup that was killed left the snapshot {names} in {title}, which takes room for all that is written since"
        ),
        since_ms: seen.since_ms,
        is_danger: false,
        remedy: Action::Repair(
            Repair::RemovePoolSnapshots {
                pool: title.to_owned(),
                uuids,
            },
            "remove it, with its disks".to_owned(),
        ),
    })
}

fn diagnose_kept(seen: &Seen, title: &str, kept: &SeenKept, notes: &mut Vec<String>) -> Option<Finding> {
    let repository = seen.repository.as_ref().filter(|own| own.id == kept.repository);
    let is_needed = |uuid: &&String| repository.is_none_or(|own| own.bases.contains(*uuid));
    let (needed, others): (Vec<_>, Vec<_>) = kept.disks.iter().partition(is_needed);
    let machine = kept.machine.as_deref().unwrap_or("a machine that is gone");
    let room = match kept.used_bytes {
        0 => String::new(),
        bytes => format!(" ({} MiB of its storage)", bytes.div_ceil(1 << 20)),
    };
    let (disks, why): (Vec<&String>, &str) = if kept.machine.is_none() {
        (kept.disks.iter().collect(), "but it does not have the machine any more")
    } else if is_forgotten(seen, &kept.repository) {
        (kept.disks.iter().collect(), "which is to be forgotten")
    } else if others.is_empty() {
        if repository.is_none() {
            notes.push(format!(
                "{title} keeps {} for the next backup of {machine} to the repository {}{room}: if that repository is gone, --forget-repository {} removes that",
                counted(needed.len()),
                kept.repository,
                kept.repository,
            ));
        }
        return None;
    } else {
        (others, "but no snapshot there can be compared with that")
    };
    Some(Finding {
        machine: kept.machine.clone(),
        kind: FindingKind::PoolBase,
        what: format!(
            "{title} keeps {} for the next backup of {machine} to the repository {}{room}, {why}",
            counted(disks.len()),
            kept.repository
        ),
        since_ms: None,
        is_danger: false,
        remedy: Action::Repair(
            Repair::RemoveKeptDisks {
                pool: title.to_owned(),
                purpose: kept.purpose.clone(),
                uuids: disks.into_iter().cloned().collect(),
            },
            "remove it from the pool".to_owned(),
        ),
    })
}

/// Whether an id, or the displayed prefix of it, is among the forgotten repositories.
fn is_forgotten(seen: &Seen, repository: &str) -> bool {
    let mut forgotten = seen.forgotten_repositories.iter();
    forgotten.any(|id| repository.starts_with(id.as_str()))
}

fn counted(disks: usize) -> String {
    match disks {
        1 => "a snapshot of a disk".to_owned(),
        count => format!("snapshots of {count} disks"),
    }
}

/// Removes snapshots of dead backups, unless another backup of their machine has started.
pub(super) fn remove_snapshots(
    request: &DoctorRequest<'_>,
    title: &str,
    uuids: &[String],
    job: Job<'_>,
) -> std::result::Result<String, String> {
    let words = |error: crate::Error| error.to_string();
    let subject = subject(request, title)?;
    let prefix = prefix(request);
    let listed = subject.pool.all_snapshots_labelled(&prefix);
    let mut removed = Vec::new();
    for one in listed.map_err(|error| error.to_string())? {
        if !uuids.contains(&one.snapshot.uuid) || !is_of_run(&one.snapshot.label, &prefix) {
            continue;
        }
        let _lock = match owner(subject, &one) {
            Some(machine) => {
                let now = Timestamp::from_millisecond((request.now_ms)()).unwrap_or(Timestamp::UNIX_EPOCH);
                let place = place(request);
                let lock = MachineLock::take(place.as_ref(), &machine.summary, Work::Backup, Duration::ZERO, now, job);
                Some(lock.map_err(words)?.ok_or("backups of it cannot be kept away")?)
            }
            // A machine that no longer exists cannot be backed up.
            None => None,
        };
        let done = remove_left(&subject.pool, &one.snapshot);
        done.map_err(|error| format!("{:?} cannot be removed: {error}", one.snapshot.label))?;
        removed.push(format!("{:?}", one.snapshot.label));
    }
    if removed.is_empty() {
        return Ok("it was gone already".to_owned());
    }
    Ok(format!("removed {}", removed.join(", ")))
}

/// Removes disks that no backup needs.
pub(super) fn remove_kept_disks(
    request: &DoctorRequest<'_>,
    title: &str,
    purpose: &str,
    uuids: &[String],
) -> std::result::Result<String, String> {
    let subject = subject(request, title)?;
    let is_it = |disk: &&BaseDisk| disk.purpose == purpose && uuids.contains(&disk.uuid);
    let kept = subject.pool.base_disks().map_err(|error| error.to_string())?;
    for disk in kept.iter().filter(is_it) {
        let removed = subject.pool.remove_disk(&disk.reference);
        removed.map_err(|error| format!("the disk {} cannot be removed: {error}", disk.uuid))?;
    }
    Ok(format!("removed {}", counted(uuids.len())))
}

fn subject<'r>(request: &'r DoctorRequest<'_>, title: &str) -> std::result::Result<&'r ExaminedPool, String> {
    let found = request.pools.iter().find(|subject| subject.pool.title() == title);
    found.ok_or_else(|| format!("{title} is not examined"))
}

#[cfg(test)]
mod tests {
    use holdfast_repo::Liveness;

    use super::{SeenKept, SeenPool, SeenSnapshots, SnapshotOwner, backs_up_pools, diagnose, is_of_any, time_ms};
    use crate::doctor::Action;
    use crate::doctor::seen::{FindingKind, Repair, Seen, SeenRepository};

    #[test]
    fn only_what_is_named_by_holdfast_is_of_a_backup() {
        assert!(is_of_any("holdfast vm 01234567 0123abcd"));
        for other in [
            "holdfast vm before upgrade",
            "holdfast vm 0123abcd",
            "holdfast  01234567 0123abc",
            "holdfast vm 0123 0123abcd",
            "nightly vm 01234567 0123abcd",
        ] {
            assert!(!is_of_any(other), "{other}");
        }
    }

    #[test]
    fn times_of_pools_are_read_in_both_of_their_forms() {
        assert_eq!(time_ms("20260102T03:04:05Z"), Some(1_767_323_045_000));
        assert_eq!(time_ms("2026-01-02T03:04:05Z"), Some(1_767_323_045_000));
        assert_eq!((time_ms("19700101T00:00:00Z"), time_ms("yesterday")), (None, None));
    }

    #[test]
    fn snapshots_go_only_where_their_backup_is_known_to_be_dead() {
        for (whose, found) in [
            (SnapshotOwner::Ours(Liveness::Dead), 1),
            (SnapshotOwner::Ours(Liveness::Alive), 0),
            (SnapshotOwner::Ours(Liveness::Unknown), 0),
            (SnapshotOwner::Another, 0),
        ] {
            let snapshots = SeenSnapshots {
                machine: Some("web1".to_owned()),
                snapshots: vec![("u".to_owned(), "holdfast vm 01234567 0123abcd".to_owned())],
                since_ms: None,
                whose,
            };
            let pool = SeenPool {
                title: "xen://xen1".to_owned(),
                snapshots: vec![snapshots],
                kept: Vec::new(),
            };
            let mut notes = Vec::new();
            let findings = diagnose(&Seen::default(), &pool, &mut notes);
            assert_eq!((findings.len(), notes.len()), (found, 1 - found), "{whose:?}");
        }
    }

    #[test]
    fn what_is_kept_goes_only_where_no_backup_can_be_compared_with_it() {
        let kept = |repository: &str, machine: Option<&str>| SeenKept {
            purpose: format!("{repository}/m"),
            repository: repository.to_owned(),
            machine: machine.map(str::to_owned),
            disks: vec!["needed".to_owned(), "older".to_owned()],
            used_bytes: 5 << 20,
        };
        let seen = Seen {
            repository: Some(SeenRepository {
                id: "own".to_owned(),
                bases: ["needed".to_owned()].into(),
                ..SeenRepository::default()
            }),
            forgotten_repositories: vec!["gone".to_owned()],
            ..Seen::default()
        };
        for (repository, machine, expected) in [
            ("own", Some("web1"), &["older"][..]),
            ("own", None, &["needed", "older"]),
            ("other", Some("web1"), &[]),
            ("other", None, &["needed", "older"]),
            ("gone", Some("web1"), &["needed", "older"]),
        ] {
            let pool = SeenPool {
                title: "xen://xen1".to_owned(),
                snapshots: Vec::new(),
                kept: vec![kept(repository, machine)],
            };
            let mut notes = Vec::new();
            let findings = diagnose(&seen, &pool, &mut notes);
            let remedies = findings.iter().map(|finding| &finding.remedy);
            let removed: Vec<&String> = remedies
                .flat_map(|remedy| match remedy {
                    Action::Repair(Repair::RemoveKeptDisks { uuids, .. }, _) => uuids,
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!(removed, expected, "{repository} {machine:?}");
            assert!(findings.iter().all(|finding| finding.kind == FindingKind::PoolBase));
            let is_noted = notes.iter().any(|note| note.contains("5 MiB"));
            assert_eq!(is_noted, expected.is_empty(), "{notes:?}");
        }
    }

    #[test]
    fn a_backup_of_machines_of_pools_is_known_by_its_words() {
        let is_one = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            backs_up_pools(&words)
        };
        assert!(is_one("holdfast backup -r /r xen://xen1/web1"));
        assert!(!is_one("holdfast backup -r /r web1") && !is_one("holdfast machines xen://xen1"));
    }
}
