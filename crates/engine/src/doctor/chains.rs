//! What images are based on.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::snapshot_sources;
use holdfast_host::{Description, DiskSource, Rights};

use super::DoctorRequest;

pub(super) use crate::machine_restore::{chain_of, is_same};

/// The chain of each disk of a machine that is a file or a device, with its target, as far as it can be read with the rights of whoever
/// names the files.
pub(super) fn chains_of(description: &Description, rights: &Rights) -> Vec<(String, Vec<PathBuf>)> {
    rights.exercise(|| chains(description)).unwrap_or_default()
}

fn chains(description: &Description) -> Vec<(String, Vec<PathBuf>)> {
    let disks = description.disks.iter().filter_map(|disk| match &disk.source {
        DiskSource::File(path) | DiskSource::Device(path) => {
            Some((disk.target.clone(), chain_of(path, disk.format.as_deref())))
        }
        DiskSource::Other(_) | DiskSource::Empty => None,
    });
    disks.collect()
}

/// Every image that a machine of the same hypervisor has: now, when it starts the next time, or in a snapshot.
pub(super) fn used_images(request: &DoctorRequest<'_>) -> Result<Vec<PathBuf>, String> {
    let words = |error: holdfast_host::Error| error.to_string();
    let hypervisor = request.neighbours.ok_or("nobody can tell which machines have it")?;
    let mut used = vec![];
    for summary in hypervisor.machines().map_err(words)? {
        let machine = hypervisor.machine(&summary.uuid).map_err(words)?;
        let description = machine.describe().map_err(words)?;
        used.extend(
            chains_of(&description, &machine.rights())
                .into_iter()
                .flat_map(|(_, chain)| chain),
        );
        for (_, text) in machine.configuration().map_err(words)? {
            let text = String::from_utf8_lossy(&text).into_owned();
            used.extend(snapshot_sources(&text).unwrap_or_default());
        }
        if let Some(overlays) = request.overlays {
            used.extend(overlays.snapshot_files(&summary.uuid).map_err(words)?);
        }
    }
    Ok(used)
}

/// Whether an image is one of `used`, or below one of them.
pub(super) fn is_used(used: &[PathBuf], path: &Path) -> bool {
    let is_or_has =
        |other: &PathBuf| is_same(other, path) || chain_of(other, None).iter().any(|below| is_same(below, path));
    used.iter().any(is_or_has)
}

/// Whether nobody may write a file, by its permissions.
pub(super) fn is_write_protected(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.mode() & 0o222 == 0)
}
