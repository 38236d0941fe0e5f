//! Abandoned instant restores: machines that run from a snapshot, and folders of machines that never ran.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use holdfast_block::Clock;
use holdfast_host::domain_xml::served_folder;
use holdfast_host::{Hypervisor, Machine};

use super::chains::{is_used, used_images};
use super::leftovers::changed_ms;
use super::seen::{FindingKind, Repair, SeenInstant};
use super::{Action, DoctorRequest, Finding};
use crate::machine::state::scratch::own_folders;
use crate::restore::instant_job::InstantJob;

/// File name suffix of their folders, which start with a dot.
const ENDING: &str = ".holdfast";
/// The command of their server processes, and the option with the folder.
const SERVER: [&str; 2] = ["live-server", "--folder"];

/// The folder of the instant restore with which a machine will start next time.
fn folder_of(machine: &dyn Machine) -> Option<PathBuf> {
    let configuration = machine.configuration().ok()?;
    let (_, kept) = configuration.first()?;
    served_folder(std::str::from_utf8(kept).ok()?).map(canonical)
}

/// The canonical path of a folder, if it exists: paths given by users may contain links.
fn canonical(folder: PathBuf) -> PathBuf {
    folder.canonicalize().unwrap_or(folder)
}

/// The instant restores of the examined machines. If all machines are examined, also those without a machine, beside
/// `images` and in the folders
/// `noted` by dead processes.
pub(super) fn look(
    request: &DoctorRequest<'_>,
    images: &[&PathBuf],
    noted: &BTreeSet<&Path>,
    processes: Option<&[Vec<String>]>,
) -> Vec<SeenInstant> {
    let mut owners = BTreeMap::new();
    for subject in &request.subjects {
        let folder = folder_of(subject.machine);
        owners.extend(folder.map(|folder| (folder, subject.machine.name().to_owned())));
    }
    let mut found: BTreeSet<PathBuf> = owners.keys().cloned().collect();
    let is_whole = request.everything && request.neighbours.is_some_and(|all| has_all(all, &mut owners));
    if is_whole {
        let beside = images.iter().filter_map(|image| image.parent());
        let places: BTreeSet<&Path> = beside.chain(noted.iter().copied()).collect();
        let beside = places.into_iter().flat_map(|place| own_folders(place, &["."]));
        found.extend(beside.filter(|folder| folder.to_string_lossy().ends_with(ENDING)));
    }
    let served = processes.into_iter().flatten().filter_map(|words| served_by(words));
    let served: BTreeSet<PathBuf> = served.filter(|folder| is_whole && !found.contains(folder)).collect();
    let near = found.into_iter().map(|folder| (folder, true));
    let seen = near
        .chain(served.into_iter().map(|folder| (folder, false)))
        .map(|(folder, is_near)| {
            let job = InstantJob::read(&folder);
            SeenInstant {
                is_near,
                owner: owners.get(&folder).cloned(),
                since_ms: changed_ms(&folder),
                state: job.as_ref().ok().and_then(|job| job.state().ok()),
                snapshot: job.as_ref().ok().map(|job| job.snapshot.clone()),
                machine: job.ok().map(|job| job.machine),
                folder,
            }
        });
    seen.collect()
}

/// Adds the folders of all machines of a hypervisor; false if some could not be queried.
fn has_all(hypervisor: &dyn Hypervisor, owners: &mut BTreeMap<PathBuf, String>) -> bool {
    let Ok(machines) = hypervisor.machines() else {
        return false;
    };
    machines.into_iter().all(|summary| {
        let Ok(machine) = hypervisor.machine(&summary.uuid) else {
            return false;
        };
        owners.extend(folder_of(&*machine).map(|folder| (folder, summary.name)));
        true
    })
}

/// The folder that a Holdfast process serves.
fn served_by(words: &[String]) -> Option<PathBuf> {
    let [_, command, option, folder, ..] = words else {
        return None;
    };
    (SERVER == [command, option]).then(|| canonical(folder.into()))
}

/// The finding about an instant restore, if there is one.
pub(super) fn diagnose(seen: &SeenInstant) -> Option<Finding> {
    let folder = seen.folder.display();
    let finding = |what: String, is_danger, remedy| Finding {
        machine: seen.owner.clone(),
        kind: FindingKind::InstantRestore,
        what,
        since_ms: seen.since_ms,
        is_danger,
        remedy,
    };
    match (&seen.owner, &seen.machine, seen.state) {
        (_, Some(_), Some(state)) if state.is_attended => None,
        (Some(owner), Some(_), Some(state)) => {
            let how = if state.has_server {
                "it runs from the snapshot as long as the server of its disks lives"
            } else {
                "the server of its disks is dead, so it stops as soon as it needs them"
            };
            Some(finding(
                format!("its disks are not filled yet, and no process fills them; {how}"),
                !state.has_server,
                Action::Advice(format!("holdfast resume {owner} continues it")),
            ))
        }
        (Some(_), ..) => Some(finding(
            format!("what is known of its instant restore cannot be read: {folder}"),
            true,
            Action::Advice("restore its file job.json; until then the job cannot be resumed".to_owned()),
        )),
        // Found through a running server: the machine belongs to another libvirt of this host, whose own examination reports it.
        (None, Some(_), Some(state)) if state.has_begun && !seen.is_near => None,
        (None, Some(machine), Some(state)) if state.has_begun => Some(finding(
            format!("{folder} holds what {machine} wrote, which this hypervisor does not know"),
            false,
            Action::Advice(if state.has_server {
                "the server of its disks lives: look where the machine runs before anything is deleted".to_owned()
            } else {
                let held = seen.snapshot.as_ref().map_or_else(String::new, |snapshot| {
                    format!("; then holdfast unprotect --held {snapshot} releases its snapshot")
                });
                format!(
                    "delete the folder, and the images beside it that were not filled, if they are not needed; if other hosts \
                     mount the folder too, look there first{held}"
                )
            }),
        )),
        (None, Some(machine), Some(_)) => {
            let protection = seen.snapshot.as_ref().map(|snapshot| {
                format!("; its snapshot stays protected, which holdfast unprotect --held {snapshot} ends")
            });
            Some(finding(
                format!("{folder} is of an instant restore of {machine} that was killed before the machine ran"),
                false,
                Action::Repair(
                    Repair::Abandon(seen.folder.clone()),
                    format!(
                        "end its server, and delete what was made{}",
                        protection.unwrap_or_default()
                    ),
                ),
            ))
        }
        // An unreadable folder belongs to another user, or is just being created.
        (None, ..) => None,
    }
}

/// Deletes the files of an instant restore whose machine never ran.
pub(super) fn abandon(request: &DoctorRequest<'_>, folder: &Path, clock: &dyn Clock) -> Result<String, String> {
    let words = |error: crate::Error| error.to_string();
    let job = InstantJob::read(folder).map_err(words)?;
    let state = job.state().map_err(words)?;
    if state.is_attended || state.has_begun {
        return Err("another process has resumed it".to_owned());
    }
    let used = used_images(request)?;
    job.abandon(&|path| is_used(&used, path), clock).map_err(words)?;
    Ok(format!("deleted {} and what was made with it", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::{SeenInstant, diagnose, served_by};
    use crate::doctor::{Action, Repair};
    use crate::restore::instant::InstantState;

    fn seen(owner: Option<&str>, state: Option<(bool, bool, bool)>) -> SeenInstant {
        SeenInstant {
            is_near: true,
            folder: "/i/.web1.holdfast".into(),
            machine: state.map(|_| "web1".to_owned()),
            snapshot: Some("ab".to_owned()),
            owner: owner.map(str::to_owned),
            since_ms: None,
            state: state.map(|(is_attended, has_server, has_begun)| InstantState {
                is_attended,
                has_server,
                has_begun,
            }),
        }
    }

    #[test]
    fn only_what_never_ran_is_removed_and_nothing_that_a_process_works_on() {
        for has_server in [true, false] {
            for has_begun in [true, false] {
                for owner in [None, Some("web1")] {
                    assert!(diagnose(&seen(owner, Some((true, has_server, has_begun)))).is_none());
                }
                let finding = diagnose(&seen(Some("web1"), Some((false, has_server, has_begun)))).unwrap();
                assert_eq!(finding.is_danger, !has_server);
                assert!(matches!(&finding.remedy, Action::Advice(words) if words.contains("holdfast resume web1")));
                let finding = diagnose(&seen(None, Some((false, has_server, has_begun)))).unwrap();
                let is_repaired = matches!(&finding.remedy, Action::Repair(Repair::Abandon(_), words) if words.contains("unprotect --held ab"));
                assert_eq!(is_repaired, !has_begun, "{finding:?}");
            }
        }
        assert!(diagnose(&seen(None, None)).is_none());
        let elsewhere = |state| SeenInstant {
            is_near: false,
            ..seen(None, Some(state))
        };
        assert!(diagnose(&elsewhere((false, true, true))).is_none());
        assert!(diagnose(&elsewhere((false, true, false))).is_some());
        assert!(diagnose(&elsewhere((false, false, true))).is_none());
        assert!(diagnose(&seen(Some("web1"), None)).unwrap().is_danger);
    }

    #[test]
    fn a_server_names_its_folder() {
        let words = [
            "/usr/bin/holdfast",
            "live-server",
            "--folder",
            "/i",
            "--repository",
            "/r",
        ]
        .map(str::to_owned);
        assert_eq!(
            served_by(&words),
            Some("/i".into()),
            "one that is not there stays as it is"
        );
        assert_eq!(served_by(&words[..3]), None);
        assert_eq!(served_by(&words[1..]), None);
    }
}
