//! Which disks move, and where they go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_host::qemu::disks;
use holdfast_host::{Description, DiskKind, DiskSource, Machine, MachineDisk, MachineState};
use holdfast_live_copy::Seed;

use crate::error::{Error, Result};
use crate::far::{CheckedDisk, FormerDisk, NVRAM};
use crate::image_file::ImageFile;

/// A disk that moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedDisk {
    /// Its target in the machine.
    pub target: String,
    /// Its raw file at the other host.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// What has a similar content there; only the differences are sent.
    pub seed: Option<Seed>,
    /// Where it is here.
    pub image: ImageFile,
}

/// Plans the disks of a machine.
///
/// # Errors
/// The sizes of the disks cannot be found.
pub(super) fn plan_disks(
    machine: &dyn Machine,
    description: &Description,
    places: &DiskPlaces<'_>,
    obstacles: &mut Vec<String>,
) -> Result<Vec<PlannedDisk>> {
    let moving = moving_disks(description, obstacles);
    let mut planned = planned_disks(description, &moving, places);
    if description.summary.state == MachineState::Running {
        set_sizes(machine, &moving, &mut planned, obstacles)?;
    } else {
        planned.extend(planned_variables(description, places));
        for disk in &mut planned {
            disk.size_bytes = disk.image.size_bytes()?;
        }
    }
    let is_planned = |target: &str| planned.iter().any(|disk| disk.target == target);
    let unknown = places.seeds.keys().filter(|target| !is_planned(target));
    obstacles.extend(unknown.map(|target| format!("it has no disk {target} that moves, which --seed names")));
    Ok(planned)
}

/// The disks that move. Media and storage in the network must be there already.
fn moving_disks(description: &Description, obstacles: &mut Vec<String>) -> Vec<MachineDisk> {
    let mut moving = Vec::new();
    for disk in &description.disks {
        match (&disk.source, disk.kind) {
            (DiskSource::Empty | DiskSource::Other(_), _) | (_, DiskKind::Cdrom | DiskKind::Floppy) => {}
            (_, DiskKind::Lun) => obstacles.push(format!(
                "disk {} is a device of this host, to which the machine sends SCSI commands",
                disk.target
            )),
            (DiskSource::File(_) | DiskSource::Device(_), DiskKind::Disk) if disk.is_shared => {
                obstacles.push(format!("other machines can write to disk {}", disk.target));
            }
            // What is only read must be at the same place there, as the check of its files says.
            (DiskSource::File(_) | DiskSource::Device(_), DiskKind::Disk) if disk.is_read_only => {}
            (DiskSource::File(_) | DiskSource::Device(_), DiskKind::Disk) => moving.push(disk.clone()),
        }
    }
    moving
}

/// Where the disks go, and what is there.
pub(super) struct DiskPlaces<'a> {
    pub(super) folder: &'a Path,
    pub(super) former: &'a [FormerDisk],
    pub(super) seeds: &'a BTreeMap<String, PathBuf>,
}

impl DiskPlaces<'_> {
    /// `web1.raw`; if another disk has that name, `web1-vdb.raw`; if former disks have these names, `web1-2.raw` and so on.
    fn free_path(&self, stem: &str, target: &str, planned: &[PlannedDisk]) -> PathBuf {
        let file = |name: String| self.folder.join(name);
        let numbered = (2..).map(|number| file(format!("{stem}-{number}.raw")));
        let named = [file(format!("{stem}.raw")), file(format!("{stem}-{target}.raw"))];
        let is_planned = |path: &Path| planned.iter().any(|disk| disk.path == path);
        let second = if is_planned(&named[0]) { 2 } else { 1 };
        let mut paths = named.into_iter().take(second).chain(numbered);
        let free = paths.find(|path| !is_planned(path) && !self.is_former(path));
        free.expect("there are fewer disks than numbers")
    }

    fn is_former(&self, path: &Path) -> bool {
        self.former.iter().any(|disk| disk.path == path)
    }

    /// The seed that the user names for a disk, or the disk that the machine had there before.
    fn seed(&self, target: &str) -> Option<Seed> {
        if let Some(path) = self.seeds.get(target) {
            return Some(Seed {
                path: path.clone(),
                format: None,
            });
        }
        let former = self.former.iter().find(|disk| disk.disk == target)?;
        Some(Seed {
            path: former.path.clone(),
            format: former.format.clone(),
        })
    }
}

fn planned_disks(description: &Description, moving: &[MachineDisk], places: &DiskPlaces<'_>) -> Vec<PlannedDisk> {
    let mut planned: Vec<PlannedDisk> = Vec::new();
    for disk in moving {
        let (DiskSource::File(path) | DiskSource::Device(path)) = &disk.source else {
            continue;
        };
        planned.push(PlannedDisk {
            target: disk.target.clone(),
            path: places.free_path(&stem_of(&description.summary.name, disk), &disk.target, &planned),
            size_bytes: 0,
            seed: places.seed(&disk.target),
            image: ImageFile {
                path: path.clone(),
                format: disk.format.clone(),
            },
        });
    }
    planned
}

/// The variables of the firmware, which keep their path, unless the former ones have it.
fn planned_variables(description: &Description, places: &DiskPlaces<'_>) -> Option<PlannedDisk> {
    let path = description.nvram.as_ref().filter(|path| path.exists())?;
    let extension = path.extension().and_then(|extension| extension.to_str());
    let stem = path.file_stem()?.to_str()?;
    let numbered = (2..).map(|number| {
        let name = format!("{stem}-{number}");
        path.with_file_name(extension.map_or(name.clone(), |extension| format!("{name}.{extension}")))
    });
    let mut paths = std::iter::once(path.clone()).chain(numbered);
    Some(PlannedDisk {
        target: NVRAM.to_owned(),
        path: paths.find(|path| !places.is_former(path))?,
        size_bytes: 0,
        seed: None,
        image: ImageFile {
            path: path.clone(),
            format: Some("raw".to_owned()),
        },
    })
}

/// Asks QEMU for the sizes of the disks.
fn set_sizes(
    machine: &dyn Machine,
    moving: &[MachineDisk],
    planned: &mut [PlannedDisk],
    obstacles: &mut Vec<String>,
) -> Result<()> {
    let monitor_failed = |source| {
        Error::from(holdfast_host::Error::Monitor {
            machine: machine.name().to_owned(),
            source,
        })
    };
    let present = disks(machine.monitor()).map_err(monitor_failed)?;
    for (disk, planned) in moving.iter().zip(planned) {
        let alias = disk.alias.as_deref();
        let found = alias.and_then(|alias| present.iter().find(|device| device.is_called(alias)));
        match found {
            Some(device) => planned.size_bytes = device.size_bytes,
            None => obstacles.push(format!("its QEMU has no device for disk {}", disk.target)),
        }
    }
    Ok(())
}

/// `web1` for `web1.qcow2`; for a volume, `MACHINE-TARGET`.
fn stem_of(machine: &str, disk: &MachineDisk) -> String {
    let stem = match &disk.source {
        DiskSource::File(path) => path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned),
        _ => None,
    };
    stem.unwrap_or_else(|| format!("{}-{}", machine.replace('/', "-"), disk.target))
}

/// What the other host checks before.
pub(super) fn checked_disk(disk: &PlannedDisk) -> CheckedDisk {
    CheckedDisk {
        path: disk.path.clone(),
        size_bytes: disk.size_bytes,
        expected_bytes: allocated_bytes(disk),
    }
}

/// Bytes that the image takes here; the size of the disk, if that is not known.
fn allocated_bytes(disk: &PlannedDisk) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    // An image with a backing file holds only a part of the disk.
    let is_raw = disk.image.format.as_deref() == Some("raw");
    let found = disk
        .image
        .path
        .metadata()
        .ok()
        .filter(|found| is_raw && found.is_file());
    let allocated = found.map(|found| found.blocks() * 512);
    allocated.unwrap_or(disk.size_bytes).min(disk.size_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    use super::{DiskPlaces, ImageFile, PlannedDisk};
    use crate::far::FormerDisk;

    fn former(disk: &str, path: &str) -> FormerDisk {
        FormerDisk {
            disk: disk.to_owned(),
            path: path.into(),
            format: Some("qcow2".to_owned()),
        }
    }

    fn planned(target: &str, path: PathBuf) -> PlannedDisk {
        PlannedDisk {
            target: target.to_owned(),
            path,
            size_bytes: 1,
            seed: None,
            image: ImageFile {
                path: "/here/web1.raw".into(),
                format: None,
            },
        }
    }

    #[test]
    fn no_disk_gets_the_path_of_another_one() {
        let former = [former("vda", "/srv/web1.raw"), former("vdb", "/srv/web1-3.raw")];
        let none = BTreeMap::new();
        let places = |former| DiskPlaces {
            folder: Path::new("/srv"),
            former,
            seeds: &none,
        };
        let names = |former, stems: &[&str]| {
            let mut disks = Vec::new();
            for (stem, target) in stems.iter().zip(["vda", "vdb", "vdc"]) {
                let path = places(former).free_path(stem, target, &disks);
                disks.push(planned(target, path));
            }
            let names = disks
                .iter()
                .map(|disk| disk.path.file_name().unwrap().to_str().unwrap().to_owned());
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(&[], &["web1", "data"]), ["web1.raw", "data.raw"]);
        assert_eq!(
            names(&[], &["disk", "disk", "disk"]),
            ["disk.raw", "disk-vdb.raw", "disk-vdc.raw"]
        );
        assert_eq!(names(&former, &["web1", "web1"]), ["web1-2.raw", "web1-4.raw"]);
        assert_eq!(names(&former, &["web1", "web1-2"]), ["web1-2.raw", "web1-2-vdb.raw"]);
    }

    #[test]
    fn a_seed_of_the_user_comes_before_the_former_disk() {
        let former = [former("vda", "/srv/web1.qcow2"), former("vdb", "/srv/data.qcow2")];
        let seeds = BTreeMap::from([("vdb".to_owned(), PathBuf::from("/backup/data.raw"))]);
        let places = DiskPlaces {
            folder: Path::new("/srv"),
            former: &former,
            seeds: &seeds,
        };
        let seed = |target| places.seed(target).map(|seed| (seed.path, seed.format));
        assert_eq!(seed("vda"), Some(("/srv/web1.qcow2".into(), Some("qcow2".to_owned()))));
        assert_eq!(seed("vdb"), Some(("/backup/data.raw".into(), None)));
        assert_eq!(seed("vdc"), None);
    }
}
