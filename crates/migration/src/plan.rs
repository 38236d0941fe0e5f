//! What a migration would do, and everything that prevents it, before the first byte is sent.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{DiskChange, DiskPlace, HostNeeds, Identity, Medium, Rewrite, rewrite};
use holdfast_host::qemu::disks;
use holdfast_host::qemu::memory::{MemoryMethod, MemoryMode};
use holdfast_host::{Description, DiskKind, DiskSource, KeptStates, Machine, MachineDisk, MachineState};

use holdfast_live_copy::Seed;

use crate::error::{Error, Result};
use crate::far::{CheckRequest, CheckedDisk, FarAnswer, FarHost, FarRequest, FormerDisk, MovingHypervisor};

/// Whether a machine may move although its memory may arrive incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncompleteMemory {
    /// It does not move.
    Refuse,
    /// It moves: for tests of this program.
    Accept,
}

/// The machine, and where it goes.
pub struct PlanRequest<'a> {
    /// Its hypervisor.
    pub hypervisor: &'a dyn MovingHypervisor,
    /// The machine.
    pub machine: &'a dyn Machine,
    /// The other host.
    pub far: &'a FarHost,
    /// The folder of the disks there; none for the default of its hypervisor.
    pub folder: Option<&'a Path>,
    /// Images there with similar content, by the targets of the disks in the machine.
    pub seeds: BTreeMap<String, PathBuf>,
    /// Whether it may move under a QEMU that may lose memory.
    pub incomplete_memory: IncompleteMemory,
}

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
}

/// What a migration does.
#[derive(Debug, Clone)]
pub struct MigrationPlan {
    /// The machine.
    pub machine: String,
    /// Its UUID.
    pub uuid: String,
    /// The disks, in the order of the configuration.
    pub disks: Vec<PlannedDisk>,
    /// The configuration with which it runs there.
    pub configuration: String,
    /// The configuration for later starts.
    pub kept_configuration: String,
    /// Whether it starts with its host.
    pub starts_with_host: bool,
    /// Files and devices there that are the disks of its former definition.
    pub former_files: Vec<PathBuf>,
    /// The socket of the hypervisor there.
    pub far_socket: PathBuf,
    /// What prevents the migration.
    pub obstacles: Vec<String>,
    /// What a user should know.
    pub notes: Vec<String>,
}

impl MigrationPlan {
    /// # Errors
    /// Something prevents the migration.
    pub fn require_no_obstacles(&self) -> Result<()> {
        if self.obstacles.is_empty() {
            return Ok(());
        }
        Err(Error::Obstacles {
            machine: self.machine.clone(),
            obstacles: self.obstacles.clone(),
        })
    }
}

/// Plans a migration. Nothing is changed.
pub fn plan(request: &PlanRequest<'_>) -> Result<MigrationPlan> {
    let description = request.machine.describe()?;
    let summary = &description.summary;
    let FarAnswer::Described {
        socket, image_folder, ..
    } = request.far.ask(&FarRequest::Describe {})?
    else {
        return Err(request.far.other_version());
    };
    let mut obstacles = Vec::new();
    if summary.state != MachineState::Running {
        obstacles.push(format!(
            "it is {}: only a machine that runs can be migrated; its disks can be copied with live-copy",
            summary.state
        ));
        return Ok(empty_plan(&description, obstacles));
    }
    if socket.is_none() {
        obstacles.push("its hypervisor there has no local socket".to_owned());
    }
    let folder = request.folder.map(Path::to_owned).or(image_folder);
    let Some(folder) = folder else {
        obstacles.push("its hypervisor there has no default folder for images: name one, ssh://HOST/FOLDER".to_owned());
        return Ok(empty_plan(&description, obstacles));
    };
    let moving = moving_disks(&description, &mut obstacles);
    let former = request.far.former_disks(&summary.uuid)?;
    let places = DiskPlaces {
        folder: &folder,
        former: &former,
        seeds: &request.seeds,
    };
    let planned = planned_disks(request.machine, &moving, &places, &mut obstacles)?;
    let unknown = request
        .seeds
        .keys()
        .filter(|seed| !planned.iter().any(|disk| disk.target == **seed));
    obstacles.extend(unknown.map(|target| format!("it has no disk {target} that moves, which --seed names")));
    let moved = |text: &str| moved_configuration(text, &planned, &summary.name);
    let configuration = moved(&request.hypervisor.migratable_configuration(&summary.uuid)?)?;
    let kept_configuration = moved(&request.hypervisor.kept_configuration(&summary.uuid)?)?;
    obstacles.extend(kept(request.hypervisor.kept_states(&summary.uuid)?));
    obstacles.extend(incomplete_memory(request)?);
    let needs = HostNeeds::of(&configuration).unwrap_or_default();
    let passed = needs.pci_devices.iter();
    obstacles.extend(passed.map(|address| format!("the PCI device {address} is passed through, and stays here")));
    let check = CheckRequest {
        name: summary.name.clone(),
        uuid: summary.uuid.clone(),
        configuration: configuration.clone(),
        disks: planned
            .iter()
            .map(|disk| CheckedDisk {
                path: disk.path.clone(),
                size_bytes: disk.size_bytes,
                expected_bytes: allocated_bytes(&moving, disk),
            })
            .collect(),
    };
    let FarAnswer::Checked {
        obstacles: there,
        notes,
    } = request.far.ask(&FarRequest::Check(check))?
    else {
        return Err(request.far.other_version());
    };
    obstacles.extend(there);
    Ok(MigrationPlan {
        machine: summary.name.clone(),
        uuid: summary.uuid.clone(),
        disks: planned,
        configuration,
        kept_configuration,
        starts_with_host: request.hypervisor.autostart(&summary.uuid)?,
        former_files: former.into_iter().map(|disk| disk.path).collect(),
        far_socket: socket.unwrap_or_default(),
        obstacles,
        notes,
    })
}

/// A configuration of the machine, with its disks at their new places.
fn moved_configuration(text: &str, disks: &[PlannedDisk], machine: &str) -> Result<String> {
    let change = |disk: &PlannedDisk| {
        let place = DiskPlace {
            path: disk.path.clone(),
            medium: Medium::File,
            format: "raw".to_owned(),
        };
        (disk.target.clone(), DiskChange::Place(place))
    };
    let wish = Rewrite {
        disks: disks.iter().map(change).collect::<BTreeMap<_, _>>(),
        ..Rewrite::moved(Identity::Keep)
    };
    rewrite(text, &wish).map(|rewritten| rewritten.text).map_err(|detail| {
        Error::from(holdfast_host::Error::Configuration {
            machine: machine.to_owned(),
            detail,
        })
    })
}

fn empty_plan(description: &Description, obstacles: Vec<String>) -> MigrationPlan {
    MigrationPlan {
        machine: description.summary.name.clone(),
        uuid: description.summary.uuid.clone(),
        disks: Vec::new(),
        configuration: String::new(),
        kept_configuration: String::new(),
        starts_with_host: false,
        former_files: Vec::new(),
        far_socket: PathBuf::new(),
        obstacles,
        notes: Vec::new(),
    }
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
struct DiskPlaces<'a> {
    folder: &'a Path,
    former: &'a [FormerDisk],
    seeds: &'a BTreeMap<String, PathBuf>,
}

impl DiskPlaces<'_> {
    /// `web1.raw`; if another disk has that name, `web1-vdb.raw`; if former disks have these names, `web1-2.raw` and so on.
    fn free_path(&self, stem: &str, target: &str, planned: &[PlannedDisk]) -> PathBuf {
        let file = |name: String| self.folder.join(name);
        let numbered = (2..).map(|number| file(format!("{stem}-{number}.raw")));
        let named = [file(format!("{stem}.raw")), file(format!("{stem}-{target}.raw"))];
        let is_planned = |path: &Path| planned.iter().any(|disk| disk.path == path);
        let is_former = |path: &Path| self.former.iter().any(|disk| disk.path == path);
        let second = if is_planned(&named[0]) { 2 } else { 1 };
        let mut paths = named.into_iter().take(second).chain(numbered);
        let free = paths.find(|path| !is_planned(path) && !is_former(path));
        free.expect("there are fewer disks than numbers")
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

fn planned_disks(
    machine: &dyn Machine,
    moving: &[MachineDisk],
    places: &DiskPlaces<'_>,
    obstacles: &mut Vec<String>,
) -> Result<Vec<PlannedDisk>> {
    let monitor_failed = |source| {
        Error::from(holdfast_host::Error::Monitor {
            machine: machine.name().to_owned(),
            source,
        })
    };
    let present = disks(machine.monitor()).map_err(monitor_failed)?;
    let mut planned: Vec<PlannedDisk> = Vec::new();
    for disk in moving {
        let alias = disk.alias.as_deref();
        let found = alias.and_then(|alias| present.iter().find(|device| device.is_called(alias)));
        let Some(device) = found else {
            obstacles.push(format!("its QEMU has no device for disk {}", disk.target));
            continue;
        };
        planned.push(PlannedDisk {
            target: disk.target.clone(),
            path: places.free_path(&stem_of(machine.name(), disk), &disk.target, &planned),
            size_bytes: device.size_bytes,
            seed: places.seed(&disk.target),
        });
    }
    Ok(planned)
}

/// `web1` for `web1.qcow2`; for a volume, `MACHINE-TARGET`.
fn stem_of(machine: &str, disk: &MachineDisk) -> String {
    let stem = match &disk.source {
        DiskSource::File(path) => path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned),
        _ => None,
    };
    stem.unwrap_or_else(|| format!("{}-{}", machine.replace('/', "-"), disk.target))
}

/// Bytes that the image takes here; the size of the disk, if that is not known.
fn allocated_bytes(moving: &[MachineDisk], planned: &PlannedDisk) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let disk = moving.iter().find(|disk| disk.target == planned.target);
    let allocated = disk.and_then(|disk| match &disk.source {
        // An image with a backing file holds only a part of the disk.
        DiskSource::File(path) if disk.format.as_deref() == Some("raw") => Some(path.metadata().ok()?.blocks() * 512),
        _ => None,
    });
    allocated.unwrap_or(planned.size_bytes).min(planned.size_bytes)
}

fn kept(states: KeptStates) -> Vec<String> {
    let mut obstacles = Vec::new();
    if states.snapshot_count > 0 {
        obstacles.push("its hypervisor has snapshots of it, which depend on the images here: delete them".to_owned());
    }
    if states.checkpoint_count > 0 {
        obstacles.push("its hypervisor has checkpoints of it, which are in the images here: delete them".to_owned());
    }
    if states.is_transient {
        obstacles.push("its definition is removed when it stops, so it could not return: define it".to_owned());
    }
    obstacles
}

fn incomplete_memory(request: &PlanRequest<'_>) -> Result<Option<String>> {
    let method = match request.incomplete_memory {
        IncompleteMemory::Refuse => MemoryMethod::Auto,
        IncompleteMemory::Accept => return Ok(None),
    };
    let mode = method.mode(request.machine.monitor()).map_err(|source| {
        Error::from(holdfast_host::Error::Monitor {
            machine: request.machine.name().to_owned(),
            source,
        })
    })?;
    Ok(match mode {
        (MemoryMode::Stopped, Some(version)) => Some(format!(
            "its processor is emulated, and QEMU {version} may then lose writes to memory that it is sending; QEMU 9.0 does not"
        )),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    use super::{DiskPlaces, PlannedDisk};
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
