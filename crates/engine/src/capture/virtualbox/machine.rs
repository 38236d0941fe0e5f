//! A VirtualBox machine: its settings and its state.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::open_past_leases;
use holdfast_hardware::virtualbox::{Medium, MediumKind, Settings, media, read, read_at, settings};
use holdfast_hardware::{DiskKind as HardwareKind, Machine, Platform, Translated, Untranslated, adapt};
use holdfast_host::virtualbox::{MachineInfo, VBoxManage, VirtualBoxState};
use holdfast_host::{
    BackupMark, Description, DiskKind, DiskSource, MachineDisk, MachineState, MachineSummary, ProcessInfo,
    writers_of_files,
};
use holdfast_image::{Backing, OpenOptions};
use rustix::fs::{Mode, OFlags};
use rustix::process::geteuid;

use super::media::{chain_of, format_of};
use super::of;
use crate::job::error::VirtualBoxError;
use crate::job::{Error, Result};

/// VirtualBox as one user has configured it.
pub struct VirtualBox {
    pub(super) home: Option<PathBuf>,
    pub(super) manager: Option<VBoxManage>,
}

/// The maximum size of a settings file in bytes.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// A machine, given by its settings.
pub struct VirtualBoxMachine<'a> {
    place: &'a VirtualBox,
    path: PathBuf,
    name: String,
    uuid: String,
}

/// The settings of a machine at one moment.
pub(super) struct LoadedSettings {
    /// The settings as they are.
    pub(super) text: String,
    /// The parts that only VirtualBox has.
    pub(super) settings: Settings,
    /// The parts that all hypervisors have: the key of a disk is the UUID of its image.
    pub(super) machine: Machine,
    /// Settings that other hypervisors cannot express.
    pub(super) dropped: Vec<Untranslated>,
    /// All images, parents before their children.
    pub(super) media: Vec<Medium>,
}

/// The state of a machine, and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    /// Reported by VirtualBox.
    Reported(VirtualBoxState),
    /// VBoxManage cannot be asked, and no visible process writes to its images.
    Unused {
        /// Whether all processes are visible.
        is_certain: bool,
    },
    /// VBoxManage cannot be asked, and this process writes to its images.
    UsedBy(ProcessInfo),
}

impl Condition {
    /// The state in the terms of all hypervisors.
    pub(super) fn state(&self) -> MachineState {
        match self {
            Self::Reported(state) => state.state(),
            Self::Unused { .. } => MachineState::ShutOff,
            Self::UsedBy(_) => MachineState::Running,
        }
    }
}

impl<'a> VirtualBoxMachine<'a> {
    /// The machine of these settings.
    pub(super) fn open(place: &'a VirtualBox, path: &Path) -> Result<Self> {
        // VBoxManage may run in another folder.
        let path = path.canonicalize().map_err(|source| Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        let said = settings(&read_text(&path)?).map_err(said_by(&path))?;
        Ok(Self {
            place,
            path,
            name: said.name,
            uuid: said.uuid,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its UUID.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The file with its settings.
    pub fn settings_file(&self) -> &Path {
        &self.path
    }

    pub(super) fn place(&self) -> &'a VirtualBox {
        self.place
    }

    /// Its UUID and path, for messages.
    pub(super) fn said(&self) -> String {
        format!("{} ({})", self.uuid, self.path.display())
    }

    /// The folder that its files are in.
    pub(super) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Resolves a path of the settings.
    pub(super) fn file(&self, said: &str) -> PathBuf {
        self.folder().join(said)
    }

    /// Reads its settings.
    pub(super) fn read(&self) -> Result<LoadedSettings> {
        let text = read_text(&self.path)?;
        let wrong = said_by(&self.path);
        let mut media = media(&text).map_err(&wrong)?;
        media.extend(self.place.common_media()?);
        let Translated { value, dropped } = read(&text).map_err(&wrong)?;
        Ok(LoadedSettings {
            settings: settings(&text).map_err(&wrong)?,
            machine: value,
            dropped,
            media,
            text,
        })
    }

    /// The machine as it was at a VirtualBox snapshot.
    pub(super) fn read_at(&self, said: &LoadedSettings, snapshot: &str) -> Result<Machine> {
        Ok(read_at(&said.text, snapshot).map_err(said_by(&self.path))?.value)
    }

    /// The state of the machine.
    pub(super) fn condition(&self, said: &LoadedSettings) -> Result<Condition> {
        if let Some(info) = self.reported()? {
            return Ok(Condition::Reported(info.state));
        }
        let images: Vec<PathBuf> = said.media.iter().map(|medium| self.file(&medium.location)).collect();
        let writers = writers_of_files(&images);
        Ok(match writers.found.into_iter().next() {
            Some(user) => Condition::UsedBy(user),
            None => Condition::Unused {
                is_certain: writers.is_complete,
            },
        })
    }

    /// VirtualBox's report; none if it cannot be asked, or has another machine with this UUID.
    fn reported(&self) -> Result<Option<MachineInfo>> {
        let Some(manager) = self.place.manager() else {
            return Ok(None);
        };
        match manager.info(&self.uuid) {
            Ok(info) => {
                // A copied folder has the UUID of the original machine.
                let is_this = info.settings.canonicalize().is_ok_and(|path| path == self.path);
                Ok(is_this.then_some(info))
            }
            Err(holdfast_host::Error::NoSuchMachine { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The current description of the machine.
    pub fn describe(&self) -> Result<Description> {
        let said = self.read()?;
        let condition = self.condition(&said)?;
        Ok(self.description(&said.machine, &said, &condition))
    }

    /// The description of a machine with these settings, whose disks have the images in `machine`.
    pub(super) fn description(&self, machine: &Machine, said: &LoadedSettings, condition: &Condition) -> Description {
        let targets = targets(machine);
        let disks = machine.disks.iter().zip(targets);
        Description {
            summary: MachineSummary {
                name: self.name.clone(),
                uuid: self.uuid.clone(),
                state: condition.state(),
            },
            disks: disks.map(|(disk, target)| self.disk(disk, target, said)).collect(),
            nvram: said.settings.nvram.as_deref().map(|path| self.file(path)),
            tpm: None,
            has_agent_channel: false,
            mark: BackupMark::default(),
        }
    }

    fn disk(&self, disk: &holdfast_hardware::Disk, target: String, said: &LoadedSettings) -> MachineDisk {
        let chain = chain_of(&said.media, &disk.key);
        let kind = chain.last().map_or(MediumKind::Normal, |base| base.kind);
        MachineDisk {
            target,
            kind: match disk.kind {
                HardwareKind::Disk => DiskKind::Disk,
                HardwareKind::Cdrom => DiskKind::Cdrom,
                HardwareKind::Floppy => DiskKind::Floppy,
            },
            source: match chain.first() {
                _ if disk.key.is_empty() => DiskSource::Empty,
                Some(medium) => DiskSource::File(self.file(&medium.location)),
                None => DiskSource::Other(format!("the image {}", disk.key)),
            },
            format: chain
                .first()
                .map(|medium| medium.format.to_lowercase())
                .filter(|format| !format.is_empty()),
            is_read_only: disk.is_read_only || kind == MediumKind::ReadOnly,
            is_shared: kind == MediumKind::Shareable,
            alias: None,
        }
    }

    /// The size of a disk in bytes, where its image has it.
    pub fn size_of(&self, disk: &MachineDisk) -> Option<u64> {
        let DiskSource::File(path) = &disk.source else {
            return None;
        };
        let options = OpenOptions {
            format: Some(format_of(disk.format.as_deref()?)?),
            backing: Backing::Ignore,
            ..OpenOptions::default()
        };
        let image = holdfast_image::open(path, &options).ok()?;
        image.layers().first().map(|layer| layer.size_bytes)
    }
}

/// The disks' names in snapshots, in order: those that libvirt would use.
pub(crate) fn targets(machine: &Machine) -> Vec<String> {
    adapt(machine, Platform::Qemu).value.targets()
}

/// Opens a file that settings name. Any user may have written the settings, and opening a pipe would block.
pub(super) fn open_regular(path: &Path) -> std::io::Result<File> {
    let open = |flags| rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(open_past_leases(OFlags::CLOEXEC, open)?);
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(std::io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
    }
}

/// Reads a file of VirtualBox.
///
/// # Errors
/// Another user has written it and this process is root: the file names others that are opened with root's rights.
pub(super) fn read_text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let failed = |source| Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    };
    let file = open_regular(path).map_err(failed)?;
    let user = file.metadata().map_err(failed)?.uid();
    if geteuid().is_root() && user != 0 {
        return Err(of(VirtualBoxError::OtherUser {
            path: path.to_owned(),
            user,
        }));
    }
    file.take(TEXT_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Adds the path of the invalid file to an error.
pub(super) fn said_by(path: &Path) -> impl Fn(holdfast_hardware::Error) -> Error + '_ {
    |source| {
        of(VirtualBoxError::Settings {
            path: path.to_owned(),
            source,
        })
    }
}
