//! `forget`, `protect` and `unprotect`: single snapshots, by hand.

use holdfast_repo::{Manifest, Repository, SnapshotId};
use jiff::tz::TimeZone;

use crate::error::{Error, Result};
use crate::job::Job;
use crate::repository::{all_snapshots, find_of_machines};
use crate::{Moment, SnapshotReference};

/// Whether a plan is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Execution {
    /// It is only shown.
    DryRun,
    /// It is carried out.
    Execute,
}

/// What `forget` removed, or would.
#[derive(Debug, Clone, Default)]
pub struct ForgetReport {
    /// Snapshots with what is known of them.
    pub snapshots: Vec<Manifest>,
    /// Snapshots that are lost or cannot be read.
    pub unreadable: Vec<SnapshotId>,
}

/// Removes single snapshots, each named exactly: by its id, or by machine and time. All names are resolved before the
/// first snapshot goes.
///
/// A snapshot that is lost or cannot be read is in no list; all 32 digits of its id name it. Space is given back by the
/// next gc.
pub fn forget(
    repository: &Repository,
    references: &[SnapshotReference],
    execution: Execution,
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<ForgetReport> {
    let manifests = all_snapshots(repository, job.progress)?;
    let mut report = ForgetReport::default();
    for reference in references {
        match find_of_machines(&manifests, reference, zone) {
            Err(error @ Error::Template(_)) => return Err(error),
            Ok(index) => {
                let manifest = &manifests[index];
                if !is_exact(reference, manifest) {
                    return Err(Error::NotExact {
                        id: manifest.id,
                        machine: manifest.machine.clone(),
                    });
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

/// The id that is given with all its digits.
fn whole_id(reference: &SnapshotReference) -> Option<SnapshotId> {
    match reference {
        SnapshotReference::Word(word) => word.parse().ok(),
        SnapshotReference::Latest | SnapshotReference::Machine { .. } => None,
    }
}

/// Whether retention and `forget` may remove a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtectionChange {
    /// They may not, from now on.
    Protect,
    /// They may, from now on, unless a machine runs from it.
    Unprotect,
    /// They may, from now on, whoever needs it.
    UnprotectHeld,
}

/// Protects snapshots from being removed, or lets them be removed again.
pub fn change_protection(
    repository: &Repository,
    references: &[SnapshotReference],
    change: ProtectionChange,
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<Vec<Manifest>> {
    let mut chosen = choose(repository, references, zone, job)?;
    let mut held = Vec::new();
    for manifest in &chosen {
        match change {
            ProtectionChange::Protect => repository.protect(manifest.id)?,
            ProtectionChange::Unprotect => {
                repository.unprotect(manifest.id)?;
                if repository.holder_count(manifest.id)? > 0 {
                    held.push(manifest.id);
                    job.progress.warning(&format!(
                        "{} stays protected: a machine runs from it, or did when its restore was killed; --held ends that, too",
                        manifest.id
                    ));
                }
            }
            ProtectionChange::UnprotectHeld => {
                repository.unprotect(manifest.id)?;
                repository.release_all(manifest.id)?;
            }
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
    let find = |reference| Ok(manifests[find_of_machines(&manifests, reference, zone)?].clone());
    references.iter().map(find).collect()
}

/// Whether a name means this snapshot today and tomorrow: what means "the newest" moves on with every backup.
fn is_exact(reference: &SnapshotReference, manifest: &Manifest) -> bool {
    match reference {
        SnapshotReference::Latest => false,
        SnapshotReference::Word(word) => manifest.id.to_string().starts_with(&word.to_ascii_lowercase()),
        SnapshotReference::Machine { moment, .. } => !matches!(moment, Moment::Latest),
    }
}
