//! Backing chains of images.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::snapshot_sources;
use holdfast_host::{Description, DiskSource, Rights};
use holdfast_image::Format;

use super::DoctorRequest;

use crate::restore::machine::{chain_of, is_same};

/// Most files in a chain: a chain with a loop has no end.
const FILE_COUNT_MAX: usize = 1000;

/// The backing chain of each disk of a machine that is a file or a device, with its target name, as far as it can be
/// read with the rights of the user who names the files.
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

/// All images of the machines of the same hypervisor: present ones, those of the next start, and those in snapshots.
pub(super) fn used_images(request: &DoctorRequest<'_>) -> Result<Vec<PathBuf>, String> {
    let words = |error: holdfast_host::Error| error.to_string();
    let hypervisor = request.neighbours.ok_or("it is not known which machines use it")?;
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

/// Whether an image is one of `used`, or a backing image of one.
pub(super) fn is_used(used: &[PathBuf], path: &Path) -> bool {
    let is_or_has = |other: &PathBuf| may_be_based_on(other).iter().any(|below| is_same(below, path));
    used.iter().any(is_or_has)
}

/// An image and its backing chain, with detected formats if none was given. A guest could add files by writing a
/// header: that only prevents their deletion.
fn may_be_based_on(image: &Path) -> Vec<PathBuf> {
    let mut files = vec![image.to_owned()];
    while files.len() < FILE_COUNT_MAX
        && let Some(last) = files.last()
    {
        // Only a qcow2 can have a backing image here. Any other file ends the chain.
        let below = chain_of(last, Some(Format::Qcow2.name())).split_off(1);
        if below.is_empty() {
            break;
        }
        files.extend(below);
    }
    files
}

/// Whether the permissions make a file read-only for every user.
pub(super) fn is_write_protected(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.mode() & 0o222 == 0)
}

#[cfg(test)]
mod tests {
    use holdfast_image::{BackingFile, CreateOptions, Format, create};

    use super::is_used;

    #[test]
    fn what_an_image_of_an_unsaid_format_is_based_on_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let [base, middle, top, other] =
            ["base.raw", "web1.snap1", "web1.raw", "other.raw"].map(|name| folder.path().join(name));
        for path in [&base, &other] {
            std::fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
        }
        for (image, below, format) in [(&middle, &base, Format::Raw), (&top, &middle, Format::Qcow2)] {
            let mut options = CreateOptions::qcow2(1 << 20);
            options.qcow2.backing = Some(BackingFile {
                name: below.display().to_string(),
                format,
            });
            create(image, &options).unwrap();
        }
        let used = [top];
        for path in [&base, &middle, &used[0]] {
            assert!(is_used(&used, path), "{}", path.display());
        }
        assert!(!is_used(&used, &other));
    }
}
