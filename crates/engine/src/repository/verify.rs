//! `verify` and `scrub`: check that stored data can be read and is correct.

use std::path::PathBuf;

use holdfast_image::Format;
use holdfast_repo::{
    Compare, Repository, ScrubReport, ScrubRequest, Selection, VerifyDepth, VerifyReport,
    VerifyRequest as RepositoryRequest,
};
use jiff::tz::TimeZone;

use super::calendar::Calendar;
use super::only_disk::only_disk;
use super::open::{find_in, snapshots};
use crate::SnapshotName;
use crate::image::source::OpenSource;
use crate::job::{Counting, Error, Job, Result, Unit};

/// What to verify.
#[derive(Debug, Clone)]
pub struct VerifyRequest {
    /// These snapshots; all if empty.
    pub names: Vec<SnapshotName>,
    /// How thorough.
    pub depth: VerifyDepth,
    /// An image that must equal the disk of the only named snapshot.
    pub against: Option<VerifyImageAgainst>,
    /// Time zone of times in names.
    pub zone: TimeZone,
}

/// An image to compare with.
#[derive(Debug, Clone)]
pub struct VerifyImageAgainst {
    /// The image or block device.
    pub path: PathBuf,
    /// Its format, if it is not to be detected.
    pub format: Option<Format>,
}

/// Reads snapshots like a restore, and checks every byte. Damage is in the report.
pub fn verify(repository: &Repository, request: &VerifyRequest, job: Job<'_>) -> Result<VerifyReport> {
    let manifests = snapshots(repository, job.progress)?;
    let calendar = Calendar::new(repository, &request.zone, job.progress);
    let mut chosen = Vec::new();
    for name in &request.names {
        chosen.push(&manifests[find_in(&manifests, &name.snapshot, calendar)?]);
    }
    for (name, snapshot) in request.names.iter().zip(&chosen) {
        if let Some(disk) = &name.disk {
            // A disk that does not exist is an error before anything is read.
            snapshot.disk(Some(disk.as_str()))?;
        }
    }
    let opened = match &request.against {
        None => None,
        Some(against) => Some(OpenSource::open(&against.path, against.format, &[])?),
    };
    let compare = match (&opened, &chosen[..], &request.names[..]) {
        (None, _, _) => None,
        (Some(source), [snapshot], [name]) => {
            let disk = match &name.disk {
                Some(disk) => disk.as_str(),
                None => &only_disk(&snapshot.disks.iter().collect::<Vec<_>>())?.name,
            };
            Some(Compare {
                snapshot: snapshot.id,
                disk: Some(disk),
                device: &*source.device,
            })
        }
        (Some(_), _, _) => return Err(Error::CompareOne),
    };
    if let Some(compare) = &compare {
        // A disk that does not exist is an error before anything is read.
        chosen[0].disk(compare.disk)?;
    }
    job.progress.phase("verifying", Unit::Bytes);
    let request = RepositoryRequest {
        snapshots: if chosen.is_empty() {
            Selection::All
        } else {
            Selection::Some(chosen.iter().map(|manifest| manifest.id).collect())
        },
        depth: request.depth,
        compare,
        thread_count: job.thread_count,
    };
    Ok(repository.verify(&request, &job.watch(Counting::Bytes))?)
}

/// Reads all stored data, or the given share that was not read for longest. Damage is in the report.
pub fn scrub(repository: &Repository, percent: u8, job: Job<'_>) -> Result<ScrubReport> {
    job.progress.phase("scrubbing", Unit::Bytes);
    let request = ScrubRequest {
        percent,
        thread_count: job.thread_count,
    };
    Ok(repository.scrub(request, &job.watch(Counting::Bytes))?)
}
