//! What a restore of a machine is asked for.

use std::collections::BTreeMap;
use std::path::PathBuf;

use holdfast_image::Format;
use jiff::tz::TimeZone;

use crate::SnapshotName;
use crate::files::block_target::Overwrite;
use crate::job::MachineName;

/// What to restore, and as what.
#[derive(Debug, Clone)]
pub struct MachineRestoreRequest {
    /// The snapshot.
    pub name: SnapshotName,
    /// As what.
    pub restore_as: RestoreAs,
    /// What comes after.
    pub after: AfterRestore,
    /// A folder for the pipe through which a hypervisor gets memory.
    pub runtime: PathBuf,
    /// In which times of the snapshot's name are meant.
    pub zone: TimeZone,
}

/// What a snapshot becomes.
#[derive(Debug, Clone)]
pub enum RestoreAs {
    /// A machine that is not there.
    NewMachine(NewMachineOptions),
    /// The machine that is there goes back in time.
    InPlace(InPlaceOptions),
}

/// How a new machine is to be.
#[derive(Debug, Clone)]
pub struct NewMachineOptions {
    /// What it is called; otherwise a name is made from that in the snapshot.
    pub name: Option<MachineName>,
    /// Its identity.
    pub identity: NewMachineIdentity,
    /// The folder for its images; otherwise they go beside the originals.
    pub storage: Option<PathBuf>,
    /// The format of its new images; otherwise that of the originals.
    pub format: Option<Format>,
    /// New files or block devices for single disks.
    pub places: BTreeMap<String, PathBuf>,
    /// What accelerates it ("kvm", "qemu"); otherwise what did.
    pub domain_type: Option<String>,
    /// Whether what is in these files and on these block devices may be lost.
    pub overwrite: Overwrite,
}

/// The identity of a new machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NewMachineIdentity {
    /// Another one: new UUID, new addresses of network cards, so that both can run.
    #[default]
    New,
    /// The one in the snapshot, which must not be there.
    Keep,
}

/// What is to be done to a machine that is there.
#[derive(Debug, Clone)]
pub struct InPlaceOptions {
    /// The machine; otherwise the one that the snapshot is of.
    pub machine: Option<String>,
    /// What happens to its configuration.
    pub configuration: ConfigurationChoice,
    /// Whether it may run while this is planned.
    pub presence: Presence,
}

/// Whether an existing machine may run while its restore is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Presence {
    /// It is shut off.
    #[default]
    ShutOff,
    /// It will be switched off before anything is written; what would be refused then is refused now.
    SwitchedOffFirst,
}

/// What happens to the configuration of a machine that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConfigurationChoice {
    /// It stays as it is.
    #[default]
    Keep,
    /// The snapshot's takes its place.
    Restore,
}

/// What comes after a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AfterRestore {
    /// The machine stays shut off.
    #[default]
    LeaveOff,
    /// It is started.
    Start,
    /// It goes on from the memory in the snapshot.
    Resume,
}
