//! `forget`, `protect` and `unprotect`: single snapshots, by hand.

use holdfast_repo::{Manifest, Repository};
use jiff::tz::TimeZone;

use crate::error::{Error, Result};
use crate::job::Job;
use crate::repository::{find_in, snapshots};
use crate::{Moment, SnapshotReference};

/// Whether a plan is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Execution {
    /// It is only shown.
    DryRun,
    /// It is carried out.
    Execute,
}

/// Removes single snapshots, each named exactly: by its id, or by machine and time. All names are resolved before the
/// first snapshot goes.
///
/// Space is given back by the next gc.
pub fn forget(
    repository: &Repository,
    references: &[SnapshotReference],
    execution: Execution,
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<Vec<Manifest>> {
    let chosen = choose(repository, references, zone, job)?;
    for (manifest, reference) in chosen.iter().zip(references) {
        if !is_exact(reference, manifest) {
            return Err(Error::NotExact {
                id: manifest.id,
                machine: manifest.machine.clone(),
            });
        }
    }
    let protected = repository.protected()?;
    if let Some(manifest) = chosen.iter().find(|manifest| protected.contains(&manifest.id)) {
        return Err(Error::Repository(holdfast_repo::Error::Protected { id: manifest.id }));
    }
    let mut gone: Vec<Manifest> = Vec::new();
    for manifest in chosen {
        if gone.iter().any(|other| other.id == manifest.id) {
            continue;
        }
        if execution == Execution::Execute {
            job.interrupt.check()?;
            repository.forget(manifest.id, "forget: by hand")?;
        }
        gone.push(manifest);
    }
    Ok(gone)
}

/// Whether retention and `forget` may remove a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtectionChange {
    /// They may not, from now on.
    Protect,
    /// They may, from now on.
    Unprotect,
}

/// Protects snapshots from being removed, or lets them be removed again.
pub fn change_protection(
    repository: &Repository,
    references: &[SnapshotReference],
    change: ProtectionChange,
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<Vec<Manifest>> {
    let chosen = choose(repository, references, zone, job)?;
    for manifest in &chosen {
        match change {
            ProtectionChange::Protect => repository.protect(manifest.id)?,
            ProtectionChange::Unprotect => repository.unprotect(manifest.id)?,
        }
    }
    Ok(chosen)
}

fn choose(
    repository: &Repository,
    references: &[SnapshotReference],
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<Vec<Manifest>> {
    let manifests = snapshots(repository, job.progress)?;
    let find = |reference| Ok(manifests[find_in(&manifests, reference, zone)?].clone());
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
