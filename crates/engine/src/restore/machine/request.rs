//! The request for a machine's restore.

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
    /// The resulting machine.
    pub restore_as: RestoreAs,
    /// What happens after the restore.
    pub after: AfterRestore,
    /// A folder for the pipe through which a hypervisor receives memory.
    pub runtime: PathBuf,
    /// The time zone of times in the snapshot's name.
    pub zone: TimeZone,
}

/// What a snapshot is restored as.
#[derive(Debug, Clone)]
pub enum RestoreAs {
    /// A machine that does not exist yet.
    NewMachine(NewMachineOptions),
    /// The existing machine, which is rolled back.
    InPlace(InPlaceOptions),
}

/// Options for a new machine.
#[derive(Debug, Clone)]
pub struct NewMachineOptions {
    /// Its name; by default one is derived from the name in the snapshot.
    pub name: Option<MachineName>,
    /// Its identity.
    pub identity: NewMachineIdentity,
    /// The folder for its images; by default that of the originals.
    pub storage: Option<PathBuf>,
    /// The format of its new images; by default that of the originals.
    pub format: Option<Format>,
    /// New files or block devices for single disks, by the disk's name.
    pub places: BTreeMap<String, PathBuf>,
    /// The domain type ("kvm", "qemu"); by default that in the snapshot.
    pub domain_type: Option<String>,
    /// Whether existing content of these files and block devices may be overwritten.
    pub overwrite: Overwrite,
}

/// The identity of a new machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NewMachineIdentity {
    /// A new one: new UUID and new MAC addresses, so that both machines can run.
    #[default]
    New,
    /// The one in the snapshot, which no existing machine may have.
    Keep,
}

/// Options for a restore of an existing machine.
#[derive(Debug, Clone)]
pub struct InPlaceOptions {
    /// The machine; by default the one that the snapshot is of.
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

/// What happens to the configuration of an existing machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConfigurationChoice {
    /// It stays unchanged.
    #[default]
    Keep,
    /// It is replaced by the one in the snapshot.
    Restore,
}

/// What happens after a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AfterRestore {
    /// The machine stays shut off.
    #[default]
    LeaveOff,
    /// It is started.
    Start,
    /// It resumes from the memory in the snapshot.
    Resume,
}
