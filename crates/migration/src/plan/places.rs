//! Which disks move, and where they go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice, FileDevice, IoMode, error_text};
use holdfast_engine::disk_socket;
use holdfast_host::domain_xml::PulledDisk;
use holdfast_host::qemu::disks;
use holdfast_host::{Description, DiskKind, DiskSource, Machine, MachineDisk, MachineState};
use holdfast_image::RenamedBacking;
use holdfast_live_copy::Seed;

use crate::error::Result;
use crate::far::{CheckedDisk, DiskForm, FormerDisk, NVRAM};
use crate::image_file::ImageFile;
use crate::plan::{DiskArrival, Findings, monitor_failed};

/// A disk that moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedDisk {
    /// Its target in the machine; the name of a file that is not the image of a disk.
    pub target: String,
    /// Its file at the other host.
    pub path: PathBuf,
    /// Bytes that are copied.
    pub size_bytes: u64,
    /// What has a similar content there; only the differences are sent.
    pub seed: Option<Seed>,
    /// Where it is here.
    pub image: ImageFile,
    /// What moves, and into what.
    pub form: MovingForm,
}

/// What moves of a disk, and into what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MovingForm {
    /// Its content is copied to a raw file.
    Content,
    /// The file is copied as it is, except for the name of the backing file, if one is given.
    File {
        /// The name that the copy has for its backing file.
        backing_name: Option<String>,
    },
    /// Its content is pulled into a qcow2 image while the machine runs there.
    Overlay {
        /// The socket there at which the hypervisor reads it.
        socket: PathBuf,
    },
}

impl PlannedDisk {
    /// The format of the image there.
    pub(super) fn format(&self) -> &'static str {
        match self.form {
            MovingForm::Overlay { .. } => "qcow2",
            _ => "raw",
        }
    }

    /// How it is pulled; none if it is copied.
    pub(crate) fn pulled(&self) -> Option<PulledDisk> {
        let MovingForm::Overlay { socket } = &self.form else {
            return None;
        };
        Some(PulledDisk {
            target: self.target.clone(),
            path: self.path.clone(),
            socket: socket.clone(),
            export: self.target.clone(),
        })
    }

    /// Opens the content or the file for a copy. The machine is shut off.
    pub(crate) fn open(&self) -> Result<Box<dyn BlockDevice>> {
        match &self.form {
            MovingForm::Content | MovingForm::Overlay { .. } => self
                .image
                .open_at_rest()
                .map(|image| Box::new(image) as Box<dyn BlockDevice>),
            MovingForm::File { backing_name: None } => {
                let file = FileDevice::open(&self.image.path, IoMode::Buffered);
                Ok(Box::new(file.map_err(holdfast_engine::Error::from)?))
            }
            MovingForm::File {
                backing_name: Some(name),
            } => {
                let file = RenamedBacking::open(&self.image.path, name);
                Ok(Box::new(file.map_err(holdfast_engine::Error::from)?))
            }
        }
    }
}

/// Plans the disks of a machine.
///
/// # Errors
/// The sizes of the disks cannot be found.
pub(super) fn plan_disks(
    machine: &dyn Machine,
    description: &Description,
    places: &DiskPlaces<'_>,
    findings: &mut Findings,
) -> Result<Vec<PlannedDisk>> {
    let moving = moving_disks(description, &mut findings.obstacles);
    let mut planned = planned_disks(&moving, places, &mut findings.notes)?;
    if description.summary.state == MachineState::Running {
        set_sizes(machine, &moving, &mut planned, &mut findings.obstacles)?;
        if let DiskArrival::AfterStart { run } = places.arrival {
            for (number, disk) in planned.iter_mut().enumerate() {
                disk.form = MovingForm::Overlay {
                    socket: disk_socket(run, number),
                };
                findings.obstacles.extend(not_served(disk));
            }
        }
    } else {
        planned.extend(planned_variables(description, places, &mut findings.notes)?);
        for disk in &mut planned {
            disk.size_bytes = disk.image.size_bytes()?;
        }
    }
    findings.obstacles.extend(unknown_seeds(places.seeds, &planned));
    Ok(planned)
}

/// Why a disk cannot be pulled while the machine runs there.
fn not_served(disk: &PlannedDisk) -> Option<String> {
    if let Err(error) = disk.image.open() {
        return Some(format!("disk {} cannot be read: {}", disk.target, error_text(&error)));
    }
    // When QEMU has given its image up is seen by its locks.
    match disk.image.is_open_for_writing() {
        Ok(true) => None,
        Ok(false) => Some(format!(
            "QEMU has not locked {}, so the time at which it no longer writes there is not known: migrate it without --post-copy",
            disk.image.path.display()
        )),
        Err(error) => Some(error_text(&error)),
    }
}

/// Why seeds of the user are of no use.
pub(super) fn unknown_seeds(seeds: &BTreeMap<String, PathBuf>, planned: &[PlannedDisk]) -> Vec<String> {
    let is_planned = |target: &str| planned.iter().any(|disk| disk.target == target);
    let unknown = seeds.keys().filter(|target| !is_planned(target));
    unknown
        .map(|target| format!("it has no disk {target} that moves, which --seed names"))
        .collect()
}

/// The disks that move. Media and storage in the network must be there already.
pub(super) fn moving_disks(description: &Description, obstacles: &mut Vec<String>) -> Vec<MachineDisk> {
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
    /// The name of the machine.
    pub(super) machine: &'a str,
    pub(super) folder: &'a Path,
    pub(super) former: &'a [FormerDisk],
    pub(super) seeds: &'a BTreeMap<String, PathBuf>,
    /// When the disks are complete there.
    pub(super) arrival: DiskArrival,
    /// Whether no file has a path there.
    pub(super) is_free: &'a dyn Fn(&Path) -> Result<bool>,
}

/// Limit of the numbers in names of disks.
const NUMBER_MAX: u32 = 1000;

/// The name that the file of a disk would have.
pub(super) struct DiskName<'a> {
    pub(super) stem: &'a str,
    /// With its dot; empty if there is none.
    pub(super) extension: &'a str,
    /// The disk, whose name is added if another disk has this name.
    pub(super) target: &'a str,
}

impl DiskPlaces<'_> {
    /// `web1.raw`; if another disk has that name, `web1-vdb.raw`; if former disks or other files have these names, `web1-2.raw`
    /// and so on.
    pub(super) fn free_disk_path(
        &self,
        name: &DiskName<'_>,
        planned: &[PlannedDisk],
        notes: &mut Vec<String>,
    ) -> Result<PathBuf> {
        let DiskName {
            stem,
            extension,
            target,
        } = *name;
        let file = |name: String| self.folder.join(format!("{name}{extension}"));
        let family = family_of(stem, self.machine);
        let of_family = (family != stem).then(|| file(family.to_owned()));
        let numbered = (2..NUMBER_MAX).map(|number| file(format!("{family}-{number}")));
        let named = [file(stem.to_owned()), file(format!("{stem}-{target}"))];
        let is_planned = |path: &Path| planned.iter().any(|disk| disk.path == path);
        let second = if is_planned(&named[0]) { 2 } else { 1 };
        let own = named[0].clone();
        let others = of_family.into_iter().chain(numbered).filter(|path| *path != own);
        let paths = named.into_iter().take(second).chain(others);
        self.first_free(paths.filter(|path| !is_planned(path)), notes)
    }

    /// The first path that no file has there. The check of the other host refuses the last one if none is free.
    fn first_free(&self, paths: impl Iterator<Item = PathBuf>, notes: &mut Vec<String>) -> Result<PathBuf> {
        let mut last = PathBuf::new();
        for path in paths {
            last = path;
            if self.is_former(&last) {
                continue;
            }
            if (self.is_free)(&last)? {
                break;
            }
            notes.push(format!("{} exists there, and is kept", last.display()));
        }
        Ok(last)
    }

    fn is_former(&self, path: &Path) -> bool {
        self.former.iter().any(|disk| disk.path == path)
    }

    /// The seed that the user names for a disk.
    pub(super) fn seed_of_user(&self, target: &str) -> Option<Seed> {
        let path = self.seeds.get(target)?;
        Some(Seed {
            path: path.clone(),
            format: None,
        })
    }

    /// The seed that the user names for a disk, or the disk that the machine had there before.
    fn seed(&self, target: &str) -> Option<Seed> {
        if let Some(seed) = self.seed_of_user(target) {
            return Some(seed);
        }
        let former = self.former.iter().find(|disk| disk.disk == target)?;
        Some(Seed {
            path: former.path.clone(),
            format: former.format.clone(),
        })
    }
}

/// `web1` for `web1-2`, the name of a disk of `web1` that has moved. Other numbers may be in names that a user chose.
pub(super) fn family_of<'s>(stem: &'s str, machine: &str) -> &'s str {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_of_machine = |base: &str| {
        base.strip_prefix(machine)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    match stem.rsplit_once('-') {
        Some((base, number)) if is_number(number) && is_of_machine(base) => base,
        _ => stem,
    }
}

fn planned_disks(moving: &[MachineDisk], places: &DiskPlaces<'_>, notes: &mut Vec<String>) -> Result<Vec<PlannedDisk>> {
    let mut planned: Vec<PlannedDisk> = Vec::new();
    let is_pulled = matches!(places.arrival, DiskArrival::AfterStart { .. });
    for disk in moving {
        let (DiskSource::File(path) | DiskSource::Device(path)) = &disk.source else {
            continue;
        };
        planned.push(PlannedDisk {
            target: disk.target.clone(),
            path: {
                let name = DiskName {
                    stem: &stem_of(places.machine, disk),
                    extension: if is_pulled { ".qcow2" } else { ".raw" },
                    target: &disk.target,
                };
                places.free_disk_path(&name, &planned, notes)?
            },
            size_bytes: 0,
            seed: places.seed(&disk.target).filter(|_| !is_pulled),
            image: ImageFile {
                path: path.clone(),
                format: disk.format.clone(),
            },
            form: MovingForm::Content,
        });
    }
    Ok(planned)
}

/// The variables of the firmware, which keep their path, unless another file has it there.
pub(super) fn planned_variables(
    description: &Description,
    places: &DiskPlaces<'_>,
    notes: &mut Vec<String>,
) -> Result<Option<PlannedDisk>> {
    let Some(path) = description.nvram.as_ref().filter(|path| path.exists()) else {
        return Ok(None);
    };
    let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else {
        return Ok(None);
    };
    let extension = path.extension().and_then(|extension| extension.to_str());
    let numbered = (2..NUMBER_MAX).map(|number| {
        let name = format!("{stem}-{number}");
        path.with_file_name(extension.map_or(name.clone(), |extension| format!("{name}.{extension}")))
    });
    Ok(Some(PlannedDisk {
        target: NVRAM.to_owned(),
        path: places.first_free(std::iter::once(path.clone()).chain(numbered), notes)?,
        size_bytes: 0,
        seed: None,
        image: ImageFile {
            path: path.clone(),
            format: Some("raw".to_owned()),
        },
        form: MovingForm::Content,
    }))
}

/// Asks QEMU for the sizes of the disks.
fn set_sizes(
    machine: &dyn Machine,
    moving: &[MachineDisk],
    planned: &mut [PlannedDisk],
    obstacles: &mut Vec<String>,
) -> Result<()> {
    let present = disks(machine.monitor()).map_err(|source| monitor_failed(machine, source))?;
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
        form: match disk.form {
            MovingForm::Content | MovingForm::File { .. } => DiskForm::Copy,
            MovingForm::Overlay { .. } => DiskForm::Overlay,
        },
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

    use holdfast_block::lock_file;

    use super::{DiskArrival, DiskName, DiskPlaces, ImageFile, MovingForm, PlannedDisk, not_served};
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
            form: MovingForm::Content,
        }
    }

    /// The names of disks with these stems, and the notes.
    fn names(former: &[FormerDisk], others: &[&str], stems: &[&str]) -> (Vec<String>, Vec<String>) {
        let none = BTreeMap::new();
        let is_free = |path: &Path| Ok(others.iter().all(|other| path != Path::new("/srv").join(other)));
        let places = DiskPlaces {
            machine: "web1",
            folder: Path::new("/srv"),
            former,
            seeds: &none,
            arrival: DiskArrival::BeforeStart,
            is_free: &is_free,
        };
        let (mut disks, mut notes) = (Vec::new(), Vec::new());
        for (stem, target) in stems.iter().zip(["vda", "vdb", "vdc"]) {
            let name = DiskName {
                stem,
                extension: ".raw",
                target,
            };
            let path = places.free_disk_path(&name, &disks, &mut notes).unwrap();
            disks.push(planned(target, path));
        }
        let name = |disk: &PlannedDisk| disk.path.file_name().unwrap().to_str().unwrap().to_owned();
        (disks.iter().map(name).collect(), notes)
    }

    #[test]
    fn no_disk_gets_the_path_of_another_one() {
        let former = [former("vda", "/srv/web1.raw"), former("vdb", "/srv/web1-3.raw")];
        let names = |former, stems| names(former, &[], stems).0;
        assert_eq!(names(&[], &["web1", "data"]), ["web1.raw", "data.raw"]);
        assert_eq!(
            names(&[], &["disk", "disk", "disk"]),
            ["disk.raw", "disk-vdb.raw", "disk-vdc.raw"]
        );
        assert_eq!(names(&former, &["web1", "web1"]), ["web1-2.raw", "web1-4.raw"]);
        assert_eq!(names(&former, &["web1", "web1-2"]), ["web1-2.raw", "web1-2-vdb.raw"]);
    }

    #[test]
    fn a_file_that_exists_keeps_its_path() {
        let (found, notes) = names(&[], &["web1.raw", "web1-2.raw"], &["web1", "data"]);
        assert_eq!(found, ["web1-3.raw", "data.raw"]);
        let kept = ["web1.raw", "web1-2.raw"].map(|name| format!("/srv/{name} exists there, and is kept"));
        assert_eq!(notes, kept);
        // Its own name is tried once.
        let (found, notes) = names(&[], &["web1-2.raw", "web1.raw"], &["web1-2"]);
        assert_eq!((&found[0][..], notes.len()), ("web1-3.raw", 2));
    }

    #[test]
    fn the_numbers_of_a_machine_that_moves_often_do_not_pile_up() {
        let once = |former_name: &str, stem| names(&[former("vda", former_name)], &[], &[stem]).0;
        assert_eq!(once("/srv/web1-2.raw", "web1-2"), ["web1.raw"]);
        assert_eq!(once("/srv/web1.raw", "web1-2"), ["web1-2.raw"]);
        assert_eq!(once("/srv/web1-vdb-2.raw", "web1-vdb-2"), ["web1-vdb.raw"]);
        // A name of the user.
        assert_eq!(once("/srv/disk-2.raw", "disk-2"), ["disk-2-2.raw"]);
    }

    #[test]
    fn a_seed_of_the_user_comes_before_the_former_disk() {
        let former = [former("vda", "/srv/web1.qcow2"), former("vdb", "/srv/data.qcow2")];
        let seeds = BTreeMap::from([("vdb".to_owned(), PathBuf::from("/backup/data.raw"))]);
        let places = DiskPlaces {
            machine: "web1",
            folder: Path::new("/srv"),
            former: &former,
            seeds: &seeds,
            arrival: DiskArrival::BeforeStart,
            is_free: &|_| Ok(true),
        };
        let seed = |target| places.seed(target).map(|seed| (seed.path, seed.format));
        assert_eq!(seed("vda"), Some(("/srv/web1.qcow2".into(), Some("qcow2".to_owned()))));
        assert_eq!(seed("vdb"), Some(("/backup/data.raw".into(), None)));
        assert_eq!(seed("vdc"), None);
    }

    #[test]
    fn a_disk_is_pulled_only_if_the_end_of_its_writes_is_seen() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let mut disk = planned("vda", "/srv/web1.qcow2".into());
        disk.image.path = file.path().to_owned();
        disk.image.format = Some("raw".to_owned());
        let reason = not_served(&disk).unwrap();
        assert!(reason.contains("without --post-copy"), "{reason}");
        let _held = lock_file(file.as_file()).unwrap();
        assert_eq!(not_served(&disk), None);
        disk.image.path = "/does/not/exist".into();
        assert!(not_served(&disk).unwrap().contains("cannot be read"));
    }
}
