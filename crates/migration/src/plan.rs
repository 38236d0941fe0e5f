//! What a migration would do, and everything that prevents it, before the first byte is sent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{DiskChange, DiskPlace, HostNeeds, Identity, Medium, Rewrite, rewrite};
use holdfast_host::qemu::disks;
use holdfast_host::qemu::memory::{MemoryMethod, MemoryMode};
use holdfast_host::{Description, DiskKind, DiskSource, KeptStates, Machine, MachineDisk, MachineState};

use crate::error::{Error, Result};
use crate::far::{CheckRequest, CheckedDisk, FarAnswer, FarHost, FarRequest, MovingHypervisor};

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
    /// The socket of the hypervisor there.
    pub far_socket: PathBuf,
    /// What prevents the migration.
    pub obstacles: Vec<String>,
    /// What a user should know.
    pub warnings: Vec<String>,
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
    let planned = planned_disks(request.machine, &moving, &folder, &mut obstacles)?;
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
        warnings,
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
        far_socket: socket.unwrap_or_default(),
        obstacles,
        warnings,
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
        far_socket: PathBuf::new(),
        obstacles,
        warnings: Vec::new(),
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

fn planned_disks(
    machine: &dyn Machine,
    moving: &[MachineDisk],
    folder: &Path,
    obstacles: &mut Vec<String>,
) -> Result<Vec<PlannedDisk>> {
    let monitor_failed = |source| {
        Error::from(holdfast_host::Error::Monitor {
            machine: machine.name().to_owned(),
            source,
        })
    };
    let present = disks(machine.monitor()).map_err(monitor_failed)?;
    let mut names = BTreeSet::new();
    let mut planned = Vec::new();
    for disk in moving {
        let alias = disk.alias.as_deref();
        let found = alias.and_then(|alias| present.iter().find(|device| device.is_called(alias)));
        let Some(device) = found else {
            obstacles.push(format!("its QEMU has no device for disk {}", disk.target));
            continue;
        };
        let mut name = name_of(machine.name(), disk);
        if !names.insert(name.clone()) {
            name = format!("{}-{}.raw", name.trim_end_matches(".raw"), disk.target);
            names.insert(name.clone());
        }
        planned.push(PlannedDisk {
            target: disk.target.clone(),
            path: folder.join(name),
            size_bytes: device.size_bytes,
        });
    }
    Ok(planned)
}

/// `web1.raw` for `web1.qcow2`; for a volume, `MACHINE-TARGET.raw`.
fn name_of(machine: &str, disk: &MachineDisk) -> String {
    let stem = match &disk.source {
        DiskSource::File(path) => path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned),
        _ => None,
    };
    let stem = stem.unwrap_or_else(|| format!("{}-{}", machine.replace('/', "-"), disk.target));
    format!("{stem}.raw")
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
