//! `forget`, `protect` and `unprotect`: single snapshots, by hand.

use std::collections::HashSet;

use holdfast_repo::{Manifest, Repository, SnapshotId};
use jiff::tz::TimeZone;

use super::calendar::Calendar;
use super::open::{all_snapshots, find_of_machines};
use crate::job::error::SnapshotChoiceError;
use crate::job::{Error, Job, Result};
use crate::notes::is_template;
use crate::{SnapshotMoment, SnapshotReference};

/// Whether a plan is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Execution {
    /// It is only shown.
    DryRun,
    /// It is carried out.
    Execute,
}

/// Snapshots that `forget` removed or would remove.
#[derive(Debug, Clone, Default)]
pub struct ForgetReport {
    /// Snapshots that could be read.
    pub snapshots: Vec<Manifest>,
    /// Snapshots that are lost or cannot be read.
    pub unreadable: Vec<SnapshotId>,
}

/// Removes single snapshots, each named exactly: by its id, or by machine and time. All names are resolved before the
/// first snapshot is removed.
///
/// A snapshot that is lost or cannot be read is in no list; all 32 digits of its id name it. The next gc reclaims the space.
pub fn forget(
    repository: &Repository,
    references: &[SnapshotReference],
    execution: Execution,
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<ForgetReport> {
    let manifests = all_snapshots(repository, job.progress)?;
    let calendar = Calendar::new(repository, zone, job.progress);
    let mut report = ForgetReport::default();
    for reference in references {
        match find_of_machines(&manifests, reference, calendar) {
            Err(error @ Error::Template(_)) => return Err(error),
            Ok(index) => {
                let manifest = &manifests[index];
                if !is_exact(reference, manifest) {
                    return Err(SnapshotChoiceError::NotExact {
                        id: manifest.id,
                        machine: manifest.machine.clone(),
                    }
                    .into());
                }
                if !report.snapshots.iter().any(|other| other.id == manifest.id) {
                    report.snapshots.push(manifest.clone());
                }
            }
            Err(error) => {
                let id = whole_id(reference).ok_or(error)?;
                if !report.unreadable.contains(&id) {
                    report.unreadable.push(id);
                }
            }
        }
    }
    let ids = || {
        report
            .snapshots
            .iter()
            .map(|manifest| manifest.id)
            .chain(report.unreadable.iter().copied())
    };
    ids().try_for_each(|id| repository.check_forgettable(id))?;
    if execution == Execution::Execute {
        for id in ids() {
            job.interrupt.check()?;
            repository.forget(id, "forget: by hand")?;
        }
    }
    Ok(report)
}

/// The id, if all its digits are given.
fn whole_id(reference: &SnapshotReference) -> Option<SnapshotId> {
    match reference {
        SnapshotReference::Word(word) => word.parse().ok(),
        SnapshotReference::Latest | SnapshotReference::Machine { .. } => None,
    }
}

/// Changes whether retention and `forget` may remove a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtectionChange {
    /// They may not remove it.
    Protect,
    /// They may remove it, unless a machine runs from it.
    Unprotect,
    /// They may remove it, unless another holder needs it.
    UnprotectHeld,
}

/// Protects snapshots from removal, or ends the protection. All names are resolved before anything is changed.
///
/// The name of a machine alone means its newest snapshot when protecting, and its protected snapshot when unprotecting.
///
/// # Errors
/// A snapshot to unprotect is not protected, or the name matches several protected snapshots.
pub fn change_protection(
    repository: &Repository,
    references: &[SnapshotReference],
    change: ProtectionChange,
    execution: Execution,
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<Vec<Manifest>> {
    let mut chosen = match change {
        ProtectionChange::Protect => choose(repository, references, zone, job)?,
        ProtectionChange::Unprotect | ProtectionChange::UnprotectHeld => {
            choose_protected(repository, references, zone, job)?
        }
    };
    let mut held = Vec::new();
    for manifest in &chosen {
        if execution == Execution::Execute {
            match change {
                ProtectionChange::Protect => repository.protect(manifest.id)?,
                ProtectionChange::Unprotect => repository.unprotect(manifest.id)?,
                ProtectionChange::UnprotectHeld => {
                    repository.unprotect(manifest.id)?;
                    repository.release_all(manifest.id)?;
                }
            }
        }
        if change == ProtectionChange::Unprotect && repository.holder_count(manifest.id)? > 0 {
            held.push(manifest.id);
            job.progress.warning(&format!(
                "{} stays protected: a machine runs from it, or did when its restore was killed; --held ends that, too",
                manifest.id
            ));
        }
    }
    chosen.retain(|manifest| !held.contains(&manifest.id));
    Ok(chosen)
}

fn choose(
    repository: &Repository,
    references: &[SnapshotReference],
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<Vec<Manifest>> {
    let manifests = all_snapshots(repository, job.progress)?;
    let calendar = Calendar::new(repository, zone, job.progress);
    let find = |reference| Ok(manifests[find_of_machines(&manifests, reference, calendar)?].clone());
    references.iter().map(find).collect()
}

/// The snapshots to unprotect.
fn choose_protected(
    repository: &Repository,
    references: &[SnapshotReference],
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<Vec<Manifest>> {
    let manifests = all_snapshots(repository, job.progress)?;
    let protected = repository.protected()?;
    let calendar = Calendar::new(repository, zone, job.progress);
    let mut chosen: Vec<Manifest> = Vec::new();
    for reference in references {
        let found = match protected_of_machine(&manifests, &protected, reference) {
            Some(found) => found?,
            None => &manifests[find_of_machines(&manifests, reference, calendar)?],
        };
        if !protected.contains(&found.id) {
            return Err(SnapshotChoiceError::NotProtected {
                id: found.id,
                machine: found.machine.clone(),
            }
            .into());
        }
        if chosen.iter().all(|other| other.id != found.id) {
            chosen.push(found.clone());
        }
    }
    Ok(chosen)
}

/// The only protected snapshot of the machine; none if `reference` is not the name of a machine.
fn protected_of_machine<'m>(
    manifests: &'m [Manifest],
    protected: &HashSet<SnapshotId>,
    reference: &SnapshotReference,
) -> Option<Result<&'m Manifest>> {
    let SnapshotReference::Word(word) = reference else {
        return None;
    };
    let mut of_machine = manifests
        .iter()
        .filter(|manifest| manifest.machine == *word && !is_template(manifest));
    let newest = of_machine.clone().next_back()?;
    // The word may also be the start of an id: then the user has to say which is meant.
    if manifests
        .iter()
        .any(|manifest| manifest.id.to_string().starts_with(&word.to_ascii_lowercase()))
    {
        return None;
    }
    let kept: Vec<&Manifest> = of_machine
        .by_ref()
        .filter(|manifest| protected.contains(&manifest.id))
        .collect();
    Some(match &kept[..] {
        [] => Err(SnapshotChoiceError::NoneProtected {
            machine: newest.machine.clone(),
        }
        .into()),
        [one] => Ok(one),
        several => Err(SnapshotChoiceError::SeveralProtected {
            machine: newest.machine.clone(),
            ids: several.iter().map(|manifest| manifest.id.short()).collect(),
        }
        .into()),
    })
}

/// Whether the name always means this snapshot: a name for "the newest" means another one after each backup.
fn is_exact(reference: &SnapshotReference, manifest: &Manifest) -> bool {
    match reference {
        SnapshotReference::Latest => false,
        SnapshotReference::Word(word) => manifest.id.to_string().starts_with(&word.to_ascii_lowercase()),
        SnapshotReference::Machine { moment, .. } => !matches!(moment, SnapshotMoment::Latest),
    }
}
