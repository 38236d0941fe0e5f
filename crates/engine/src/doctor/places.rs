//! Folders in which a process was creating files when it was killed.

use std::collections::BTreeSet;
use std::path::Path;

use holdfast_repo::Liveness;

use super::containers::partial_containers;
use super::leftovers::leftover;
use super::seen::SeenPlace;
use super::seen::{FindingKind, Leftover, LeftoverKind, Repair, Seen};
use super::{Action, DoctorRequest, Finding};
use crate::files::atomic_file::left_in;
use crate::machine::place_note::{PlaceRecord, forget_place, noted_places};
use crate::machine::run_journal::liveness_of;
use crate::restore::instant::unfinished_folders;

/// The noted folders of dead processes.
pub(super) fn look(request: &DoctorRequest<'_>) -> crate::Result<Vec<SeenPlace>> {
    let Some(folder) = &request.places else {
        return Ok(Vec::new());
    };
    let is_dead = |record: &PlaceRecord| liveness_of(&record.process, request.processes) == Liveness::Dead;
    let (dead, others): (Vec<_>, Vec<_>) = noted_places(folder)?.into_iter().partition(is_dead);
    let seen = dead.into_iter().filter(|_| request.everything).map(|record| SeenPlace {
        is_shared: others.iter().any(|other| other.place == record.place),
        number: record.number,
        place: record.place,
        process: record.process.process,
        has_folder: record.held.as_ref().is_some_and(|held| held.folder.exists()),
        held: record.held,
    });
    Ok(seen.collect())
}

/// The folders that may contain leftovers.
pub(super) fn folders(places: &[SeenPlace]) -> BTreeSet<&Path> {
    places.iter().map(|place| place.place.as_path()).collect()
}

/// Incomplete files and folders in these places.
pub(super) fn leftovers(places: &[SeenPlace]) -> Vec<Leftover> {
    let folders = folders(places);
    let files = folders.iter().flat_map(|folder| left_in(folder));
    let files = files.map(|path| leftover(path, LeftoverKind::Partial));
    let unfinished = folders.iter().flat_map(|folder| unfinished_folders(folder));
    let containers: BTreeSet<_> = places.iter().flat_map(partial_containers).collect();
    files
        .chain(
            containers
                .into_iter()
                .map(|path| leftover(path, LeftoverKind::UnfinishedContainer)),
        )
        .chain(unfinished.map(|path| leftover(path, LeftoverKind::UnfinishedFolder)))
        .collect()
}

/// Findings for the notes themselves, once nothing else is found.
pub(super) fn diagnose(seen: &Seen) -> Vec<Finding> {
    let findings = seen.places.iter().filter_map(|place| {
        if place.has_folder {
            // The folder's own state names the hold on its snapshot, but only this note leads to the folder.
            return None;
        }
        let held = place.held.as_ref();
        let repository = seen.repository.as_ref().map(|repository| &repository.id);
        let remedy = match held {
            Some(held) if repository != Some(&held.repository) => Action::Advice(format!(
                "snapshot {} of repository {} stays protected for it: holdfast doctor --fix with that repository (-r) ends this",
                held.snapshot, held.repository
            )),
            _ => Action::Repair(
                Repair::ForgetPlace {
                    number: place.number,
                    held: held.map(|held| (held.snapshot.clone(), held.holder)),
                },
                match held {
                    Some(held) => format!("end the protection of snapshot {}, and delete the note", held.snapshot),
                    None => "delete the note".to_owned(),
                },
            ),
        };
        Some(Finding {
            machine: None,
            kind: FindingKind::DeadRun,
            what: format!("process {} died while it wrote in {}", place.process, place.place.display()),
            since_ms: None,
            is_danger: false,
            remedy,
        })
    });
    findings.collect()
}

/// Deletes the note of a place, and releases the hold on its snapshot.
pub(super) fn forget(request: &DoctorRequest<'_>, number: u32, held: Option<&(String, u32)>) -> Result<String, String> {
    let mut words = String::new();
    if let Some((snapshot, holder)) = held {
        let id = snapshot
            .parse()
            .map_err(|_| format!("{snapshot} is no id of a snapshot"))?;
        let repository = request.repository.ok_or("the repository was not named")?;
        repository.release(id, *holder).map_err(|error| error.to_string())?;
        words = format!("ended the protection of snapshot {snapshot}; ");
    }
    let folder = request.places.as_deref().unwrap_or(Path::new("."));
    forget_place(folder, number).map_err(|error| error.to_string())?;
    Ok(words + "deleted the note")
}
