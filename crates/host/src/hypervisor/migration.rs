//! Moving a running machine to the hypervisor of another host.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::hypervisor::domain_xml::HostNeeds;
use crate::hypervisor::error::Result;
use crate::system::processes::ProcessInfo;

/// How a machine moves. Its disks are copied by the caller.
#[derive(Clone, Copy)]
pub struct MigrationRequest<'a> {
    /// The address of the other hypervisor, as this one reaches it; of the other host, if this one does not.
    pub destination: &'a str,
    /// The socket to which this hypervisor connects to send the memory. The other one listens at the same path of its host.
    pub memory_socket: &'a Path,
    /// The configuration that the machine has there.
    pub configuration: &'a str,
    /// The configuration that is defined there for later starts.
    pub kept_configuration: &'a str,
    /// Whether the guest may be slowed.
    pub guest_speed: GuestSpeed,
    /// The other host, for a hypervisor that does not reach the one there itself.
    pub receiver: &'a dyn ReceivingHost,
}

/// The host to which a machine moves whose hypervisor does not reach the one there.
pub trait ReceivingHost: Sync {
    /// Starts a hypervisor that waits for the memory.
    ///
    /// # Errors
    /// Why it does not start, for users.
    fn prepare(&self) -> std::result::Result<(), String>;

    /// Waits for the decision what to do with the machine when it is stopped, and has its disks open here. None if it is not made
    /// within the time.
    fn wait_for_switchover(&self, patience: Duration) -> Option<Switchover>;

    /// Starts the machine, which has all of its memory.
    fn start(&self) -> ReceiverStart;

    /// Ends the hypervisor, since the machine runs here.
    fn discard(&self);
}

/// The next step of a migration that has stopped the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switchover {
    /// The hypervisor gives the disks up, and sends the rest of the memory.
    Continue,
    /// It resumes the machine.
    Cancel,
}

/// Whether a machine has started at the other host. A reason is for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReceiverStart {
    /// It runs there.
    Runs,
    /// It is not there any more, and has not run there.
    IsGone(String),
    /// It may run there.
    Unknown(String),
}

/// How a hypervisor describes its machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigurationLanguage {
    /// libvirt's XML. The hypervisors of both hosts reach each other, and start the machine at the other host.
    DomainXml,
    /// A [`CommandLine`](crate::CommandLine). A [`ReceivingHost`] starts the machine at the other host.
    CommandLine,
}

/// How fast the processors of the guest are while its memory is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestSpeed {
    /// They keep their speed.
    Kept,
    /// They are slowed more and more while the memory changes faster than it is sent.
    SlowedIfNeeded,
}

/// Whether the processor of a host can run a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessorFit {
    /// It has all features.
    Fits,
    /// It lacks some.
    Lacks,
    /// The hypervisor cannot say.
    Unknown,
}

/// The snapshots and checkpoints of a machine, as its hypervisor describes them. What they contain is in its images.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineHistory {
    /// The snapshots, each after its parent.
    pub snapshots: Vec<SnapshotDescription>,
    /// The descriptions of the checkpoints, each after its parent.
    pub checkpoints: Vec<String>,
}

impl MachineHistory {
    /// Whether there is neither a snapshot nor a checkpoint.
    pub fn is_empty(&self) -> bool {
        self.snapshots.is_empty() && self.checkpoints.is_empty()
    }
}

/// A snapshot, as its hypervisor describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotDescription {
    /// The description.
    pub text: String,
    /// Whether the next snapshot will be its child.
    pub is_current: bool,
}

/// What an interrupted migration has left: a machine that is stopped here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterruptedMigration {
    /// It has not sent everything: the machine runs nowhere else.
    Held,
    /// It has sent everything: the machine may run at the other host.
    Sent {
        /// The address of the other host.
        destination: String,
    },
}

/// A hypervisor that moves machines, given by name or UUID.
pub trait LiveMigration: Send + Sync {
    /// How it describes machines.
    fn language(&self) -> ConfigurationLanguage;

    /// What a host must have for a configuration.
    ///
    /// # Errors
    /// What is wrong with the configuration, for users.
    fn needs(&self, configuration: &str) -> std::result::Result<HostNeeds, String>;

    /// What prevents a machine that runs from moving, for users.
    fn blockers(&self, machine: &str) -> Result<Vec<String>>;

    /// The configuration of a running machine for the hypervisor of another host, complete with what the guest sees.
    fn migratable_configuration(&self, machine: &str) -> Result<String>;

    /// The configuration for later starts.
    fn kept_configuration(&self, machine: &str) -> Result<String>;

    /// Moves a machine, and returns when it runs there. It runs here after an error.
    fn migrate(&self, machine: &str, request: &MigrationRequest<'_>) -> Result<()>;

    /// Starts a machine with this configuration, which waits for its memory to come to a socket that is made.
    ///
    /// # Errors
    /// It cannot be started, or the hypervisors reach each other.
    fn receive(&self, configuration: &str, memory_socket: &Path) -> Result<()>;

    /// Whether a process of this host is the QEMU of a machine.
    fn is_process_of(&self, machine: &str, process: &ProcessInfo) -> bool;

    /// The migration that has stopped the machine and was interrupted. None if there is none, and if the hypervisor ends such
    /// migrations itself.
    fn interrupted(&self, machine: &str) -> Result<Option<InterruptedMigration>>;

    /// Lets a machine run here whose migration was interrupted. It must not run at the other host.
    fn take_back(&self, machine: &str) -> Result<()>;

    /// Limits the time for which the machine is stopped while the rest of its memory is sent.
    fn limit_downtime(&self, machine: &str, longest: Duration) -> Result<()>;

    /// Whether a machine starts with its host.
    fn autostart(&self, machine: &str) -> Result<bool>;

    /// Sets whether a machine starts with its host.
    fn set_autostart(&self, machine: &str, starts: Autostart) -> Result<()>;

    /// The snapshots and checkpoints of a machine.
    fn history(&self, machine: &str) -> Result<MachineHistory>;

    /// Replaces the descriptions of the snapshots and checkpoints of a machine. Its images are not changed.
    ///
    /// # Errors
    /// The machine has a part of them; the call can be repeated.
    fn replace_history(&self, machine: &str, history: &MachineHistory) -> Result<()>;

    /// Whether the processor of this host can run a machine with this configuration.
    fn processor_fit(&self, configuration: &str) -> ProcessorFit;

    /// The socket of the hypervisor, if it is of this host.
    fn socket(&self) -> Option<std::path::PathBuf>;
}

/// Whether a machine starts with its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Autostart {
    /// It does.
    On,
    /// It does not.
    Off,
}
