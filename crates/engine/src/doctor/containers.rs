//! Leftovers of containers: mounts without a server, short grace periods of a killed freeze, and snapshots of killed
//! backups and clones.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use holdfast_block::error_text;
use holdfast_host::{MachineState, MachineSummary, grace_periods};
use holdfast_image::{ContainerLock, ContainerTree, is_container};

use super::leftovers::AGE_MIN_MS;
use super::seen::{FindingKind, Repair, Seen, SeenContainer, SeenLayer, SeenPlace, UnneededSnapshot};
use super::{Action, DoctorRequest, Finding};
use crate::capture::container::backup_layers;
use crate::container::{
    ContainerPlace, FoundRuntimeState, PARTIAL_ENDING, RuntimeRemains, clear_runtime_remains, delete_snapshots,
    is_left_by_killed_process, is_of_mount, runtime_remains, unmount_container,
};
use crate::job::Job;
use crate::machine::lock::{MachineLock, Work};
use crate::machine::run_journal::JournalPlace;

/// Examines the runtime folder, the named containers, those that are mounted, and those that dead processes noted.
pub(super) fn look(request: &DoctorRequest<'_>, seen: &mut Seen) {
    let canonical = |folder: PathBuf| folder.canonicalize().unwrap_or(folder);
    let mut folders: BTreeSet<PathBuf> = request.containers.iter().cloned().map(canonical).collect();
    if request.everything || !request.containers.is_empty() {
        seen.has_short_grace_periods = grace_periods::is_abandoned(Path::new(grace_periods::SWITCH));
        let now_ms = (request.now_ms)();
        let named: Vec<PathBuf> = request
            .containers
            .iter()
            .filter_map(|folder| ContainerPlace::find(folder, &request.runtime).ok())
            .map(|place| place.runtime_folder().canonicalize().unwrap_or_default())
            .collect();
        // The folder of a disk that was served for a moment names no container.
        let is_wanted = |remains: &RuntimeRemains| {
            request.everything || named.contains(&remains.folder) || !is_of_mount(&remains.folder)
        };
        let is_old = |remains: &RuntimeRemains| remains.changed_ms.is_some_and(|changed| now_ms - changed > AGE_MIN_MS);
        for remains in runtime_remains(&request.runtime).into_iter().filter(is_wanted) {
            folders.extend(remains.container.clone());
            match remains.state {
                FoundRuntimeState::Dead => seen.runtime_remains.push(remains),
                // A process that begins has made the folder, and mounts the disk next.
                FoundRuntimeState::Unmounted if is_old(&remains) => seen.runtime_remains.push(remains),
                FoundRuntimeState::Unmounted | FoundRuntimeState::Served => {}
            }
        }
    }
    let noted = seen.places.iter().map(|place| place.place.clone());
    folders.extend(noted.filter(|place| is_container(place)).map(canonical));
    for folder in folders {
        match examine(request, &folder) {
            Ok(container) => seen.containers.push(container),
            Err(error) => seen
                .unreachable
                .push((folder.display().to_string(), error_text(&error))),
        }
    }
}

fn examine(request: &DoctorRequest<'_>, folder: &Path) -> crate::Result<SeenContainer> {
    let place = ContainerPlace::find(folder, &request.runtime)?;
    let tree = ContainerTree::open(&place.folder)?;
    let summary = MachineSummary {
        name: place.folder.display().to_string(),
        uuid: place.id.clone(),
        state: MachineState::ShutOff,
    };
    let is_backed_up = request.journal.as_ref().is_some_and(|folder| {
        let journal = JournalPlace {
            folder: folder.clone(),
            way: Vec::new(),
            process: request.process.clone(),
        };
        MachineLock::is_held(&journal, &summary, Work::Backup)
    });
    let layers = backup_layers(&tree).into_iter().map(|layer| SeenLayer {
        id: layer.id.to_string(),
        repository: layer.repository,
        machine: layer.machine,
        created_s: layer.created_s,
    });
    let snapshots = tree.snapshots().into_iter();
    let left = snapshots.filter(|(_, entry)| is_left_by_killed_process(entry, request.processes));
    let left_by_clones = left.map(|(id, entry)| UnneededSnapshot {
        id: id.to_string(),
        created_s: entry.created_s,
    });
    Ok(SeenContainer {
        layers: layers.collect(),
        is_backed_up,
        left_by_clones: left_by_clones.collect(),
        folder: place.folder,
    })
}

/// Folders in which a killed process was making a container. Its disk may still be mounted: the server has not ended with
/// the process.
pub(super) fn partial_containers(place: &SeenPlace) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(&place.place).into_iter().flatten().flatten();
    let is_partial = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with('.') && name.ends_with(PARTIAL_ENDING) && path.is_dir()
    };
    let is_abandoned = |path: &PathBuf| is_partial(path) && !(place.is_shared && is_used(path));
    entries.map(|entry| entry.path()).filter(is_abandoned).collect()
}

fn is_used(folder: &Path) -> bool {
    ContainerLock::is_held(folder).unwrap_or(true)
}

pub(super) fn diagnose(seen: &Seen, notes: &mut Vec<String>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = seen.runtime_remains.iter().map(of_runtime).collect();
    findings.extend(seen.has_short_grace_periods.then(of_grace_periods));
    for container in &seen.containers {
        findings.extend(of_backups(seen, container, notes));
        findings.extend(of_clones(container));
    }
    findings
}

fn of_runtime(remains: &RuntimeRemains) -> Finding {
    let folder = remains.folder.display();
    let points: Vec<String> = remains
        .mount_points
        .iter()
        .map(|point| point.display().to_string())
        .collect();
    let whose = remains
        .container
        .as_ref()
        .map_or_else(|| folder.to_string(), |container| container.display().to_string());
    let (what, words) = match (&points[..], remains.state) {
        ([], FoundRuntimeState::Dead) => (
            format!("{whose}: the server of its disk was killed, and the disk is still mounted"),
            "unmount it",
        ),
        ([], _) => (
            format!("{folder} is a folder for the mount of a container that has ended"),
            "delete it",
        ),
        (points, _) => (
            format!(
                "{whose}: the server of its disk was killed, and every access to {} fails",
                points.join(", ")
            ),
            "thaw and unmount it; what programs wrote since their last sync is lost, as after a power failure",
        ),
    };
    Finding {
        machine: None,
        kind: if points.is_empty() {
            FindingKind::Leftover
        } else {
            FindingKind::ContainerMount
        },
        what,
        since_ms: remains.changed_ms,
        is_danger: !points.is_empty(),
        remedy: Action::Repair(Repair::ClearRuntime(remains.folder.clone()), words.to_owned()),
    }
}

fn of_grace_periods() -> Finding {
    Finding {
        machine: None,
        kind: FindingKind::Leftover,
        what: format!(
            "{} is still set by a process that was killed while it froze a container: the kernel interrupts all processors more often than it has to",
            grace_periods::SWITCH
        ),
        since_ms: None,
        is_danger: false,
        remedy: Action::Repair(Repair::ResetGracePeriods, "set it to 0".to_owned()),
    }
}

/// The snapshots of backups that no later backup is compared with.
fn of_backups(seen: &Seen, container: &SeenContainer, notes: &mut Vec<String>) -> Option<Finding> {
    if container.is_backed_up {
        return None;
    }
    let folder = container.folder.display();
    let (mut left, mut unknown) = (Vec::new(), Vec::new());
    for layer in &container.layers {
        let is_forgotten = seen
            .forgotten_repositories
            .iter()
            .any(|id| layer.repository.starts_with(id.as_str()));
        let known = seen.repository.as_ref().filter(|known| known.id == layer.repository);
        match known {
            _ if is_forgotten => left.push(layer),
            Some(known) if known.layers.contains(&layer.id) => {}
            Some(_) => left.push(layer),
            None => unknown.push(layer),
        }
    }
    for layer in &unknown {
        notes.push(format!(
            "{folder} keeps a snapshot for the next backup of {} to repository {}; with that repository (-r) it is examined whether it is needed, and --forget-repository {} says that the repository is gone",
            layer.machine,
            digits(&layer.repository),
            digits(&layer.repository)
        ));
    }
    let left = left.into_iter().map(|layer| UnneededSnapshot {
        id: layer.id.clone(),
        created_s: layer.created_s,
    });
    let left: Vec<UnneededSnapshot> = left.collect();
    let why = "that a backup has taken and no later one is compared with";
    unneeded_snapshots(container, &left, why)
}

fn of_clones(container: &SeenContainer) -> Option<Finding> {
    unneeded_snapshots(container, &container.left_by_clones, "that a killed clone has taken")
}

/// The finding for snapshots of a container; `why` says why nothing needs them.
fn unneeded_snapshots(container: &SeenContainer, left: &[UnneededSnapshot], why: &str) -> Option<Finding> {
    if left.is_empty() {
        return None;
    }
    let since_s = left.iter().filter_map(|snapshot| snapshot.created_s).min();
    let ids: Vec<String> = left.iter().map(|snapshot| snapshot.id.clone()).collect();
    let count = match ids.len() {
        1 => "a snapshot".to_owned(),
        count => format!("{count} snapshots"),
    };
    Some(Finding {
        machine: None,
        kind: FindingKind::ContainerSnapshot,
        what: format!("{} has {count} {why}", container.folder.display()),
        since_ms: since_s.and_then(|seconds| i64::try_from(seconds.saturating_mul(1000)).ok()),
        is_danger: false,
        remedy: Action::Repair(
            Repair::DeleteContainerSnapshots {
                folder: container.folder.clone(),
                ids,
            },
            "delete it, and merge its layer".to_owned(),
        ),
    })
}

/// The digits of a repository's id that messages show.
fn digits(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}

pub(super) fn clear_runtime(folder: &Path, job: Job<'_>) -> Result<String, String> {
    clear_runtime_remains(folder, job.clock)
        .map(|()| format!("unmounted and deleted {}", folder.display()))
        .map_err(|error| format!("{}: {error}", folder.display()))
}

pub(super) fn reset_grace_periods() -> Result<String, String> {
    let switch = grace_periods::SWITCH;
    match grace_periods::reset_abandoned(Path::new(switch)) {
        Ok(true) => Ok(format!("set {switch} to 0")),
        Ok(false) => Ok(format!("another process has reset {switch}")),
        Err(error) => Err(format!("{switch}: {error}")),
    }
}

pub(super) fn delete_layers(
    request: &DoctorRequest<'_>,
    folder: &Path,
    ids: &[String],
    job: Job<'_>,
) -> Result<String, String> {
    let words = |error: crate::Error| error_text(&error);
    let place = ContainerPlace::find(folder, &request.runtime).map_err(words)?;
    delete_snapshots(&place, ids, job).map_err(words)?;
    Ok(match ids.len() {
        1 => format!("deleted the snapshot of {}", folder.display()),
        count => format!("deleted {count} snapshots of {}", folder.display()),
    })
}

/// Deletes the folder of a container that was not completed, after its disk is unmounted.
pub(super) fn delete_partial(request: &DoctorRequest<'_>, folder: &Path, job: Job<'_>) -> Result<String, String> {
    if is_used(folder) {
        let words = |error: crate::Error| error_text(&error);
        let place = ContainerPlace::find(folder, &request.runtime).map_err(words)?;
        unmount_container(&place, job).map_err(words)?;
    }
    delete_unused(folder)
}

fn delete_unused(folder: &Path) -> Result<String, String> {
    if is_used(folder) {
        return Err(format!("{}: a process is using it", folder.display()));
    }
    std::fs::remove_dir_all(folder)
        .map(|()| format!("deleted {}", folder.display()))
        .map_err(|error| format!("{}: {error}", folder.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{
        Action, ContainerLock, FindingKind, FoundRuntimeState, Repair, RuntimeRemains, delete_unused, diagnose,
        partial_containers,
    };
    use crate::doctor::seen::{Seen, SeenContainer, SeenLayer, SeenPlace, SeenRepository, UnneededSnapshot};

    fn layer(id: &str, repository: &str) -> SeenLayer {
        SeenLayer {
            id: id.to_owned(),
            repository: repository.to_owned(),
            machine: "web1".to_owned(),
            created_s: Some(5),
        }
    }

    fn seen(is_backed_up: bool) -> Seen {
        Seen {
            repository: Some(SeenRepository {
                id: "aa".to_owned(),
                layers: BTreeSet::from(["1".to_owned()]),
                ..SeenRepository::default()
            }),
            forgotten_repositories: vec!["dd".to_owned()],
            containers: vec![SeenContainer {
                folder: "/srv/web1".into(),
                layers: vec![layer("1", "aa"), layer("2", "aa"), layer("3", "bb"), layer("4", "ddd")],
                is_backed_up,
                left_by_clones: Vec::new(),
            }],
            ..Seen::default()
        }
    }

    #[test]
    fn only_snapshots_that_no_backup_needs_are_deleted() {
        let mut notes = Vec::new();
        let findings = diagnose(&seen(false), &mut notes);
        let [finding] = &findings[..] else {
            panic!("{findings:?}")
        };
        let Action::Repair(Repair::DeleteContainerSnapshots { folder, ids }, _) = &finding.remedy else {
            panic!("{finding:?}")
        };
        assert_eq!(
            (folder.to_str(), &ids[..]),
            (Some("/srv/web1"), &["2".to_owned(), "4".to_owned()][..])
        );
        assert_eq!(finding.since_ms, Some(5000));
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains("repository bb"));
    }

    #[test]
    fn the_snapshot_of_a_killed_clone_is_deleted_even_while_a_backup_runs() {
        let mut seen = seen(true);
        seen.containers[0].left_by_clones = vec![UnneededSnapshot {
            id: "9".to_owned(),
            created_s: Some(7),
        }];
        let findings = diagnose(&seen, &mut Vec::new());
        let [finding] = &findings[..] else {
            panic!("{findings:?}")
        };
        assert_eq!(finding.what, "/srv/web1 has a snapshot that a killed clone has taken");
        assert!(
            matches!(&finding.remedy, Action::Repair(Repair::DeleteContainerSnapshots { ids, .. }, _) if ids == &["9"])
        );
    }

    #[test]
    fn a_container_that_was_not_completed_is_left_alone_while_it_is_made() {
        let place = tempfile::tempdir().unwrap();
        for name in [".web1.holdfast-new", "web2.holdfast-new", ".web3"] {
            std::fs::create_dir(place.path().join(name)).unwrap();
        }
        let partial = place.path().join(".web1.holdfast-new");
        let noted = |is_shared| SeenPlace {
            number: 1,
            place: place.path().to_owned(),
            process: 1,
            held: None,
            has_folder: false,
            is_shared,
        };
        let lock = ContainerLock::take(&partial).unwrap();
        assert!(partial_containers(&noted(true)).is_empty());
        assert!(delete_unused(&partial).unwrap_err().contains("using it"));
        // The process that has noted the place is dead, and no other one has.
        assert_eq!(partial_containers(&noted(false)), std::slice::from_ref(&partial));
        drop(lock);
        assert_eq!(partial_containers(&noted(true)), std::slice::from_ref(&partial));
        delete_unused(&partial).unwrap();
        assert!(!partial.exists());
    }

    #[test]
    fn nothing_is_deleted_while_a_backup_runs() {
        let mut notes = Vec::new();
        assert!(diagnose(&seen(true), &mut notes).is_empty());
        assert!(notes.is_empty());
    }

    #[test]
    fn a_file_system_without_a_server_is_a_danger() {
        let remains = |points: &[&str], state| RuntimeRemains {
            folder: "/run/holdfast-container-1".into(),
            container: Some("/srv/web1".into()),
            mount_points: points.iter().map(Into::into).collect(),
            state,
            changed_ms: None,
        };
        let seen = Seen {
            runtime_remains: vec![
                remains(&["/mnt/web1"], FoundRuntimeState::Dead),
                remains(&[], FoundRuntimeState::Dead),
                remains(&[], FoundRuntimeState::Unmounted),
            ],
            ..Seen::default()
        };
        let findings = diagnose(&seen, &mut Vec::new());
        let shown: Vec<_> = findings
            .iter()
            .map(|finding| (finding.kind, finding.is_danger))
            .collect();
        let leftover = (FindingKind::Leftover, false);
        assert_eq!(shown, [(FindingKind::ContainerMount, true), leftover, leftover]);
        assert!(findings[0].what.contains("/mnt/web1"));
    }

    #[test]
    fn short_grace_periods_of_a_killed_freeze_are_reset() {
        let seen = Seen {
            has_short_grace_periods: true,
            ..Seen::default()
        };
        let findings = diagnose(&seen, &mut Vec::new());
        let [finding] = &findings[..] else {
            panic!("{findings:?}")
        };
        assert!(matches!(finding.remedy, Action::Repair(Repair::ResetGracePeriods, _)));
        assert!(finding.what.starts_with("/sys/kernel/rcu_expedited is still set"));
    }
}
