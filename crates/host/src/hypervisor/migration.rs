//! Moving a running machine to the hypervisor of another host.

use std::path::Path;
use std::time::Duration;

use crate::hypervisor::error::Result;

/// How a machine moves. Its disks are copied by the caller.
#[derive(Debug, Clone, Copy)]
pub struct MigrationRequest<'a> {
    /// The address of the other hypervisor, as this one reaches it.
    pub destination: &'a str,
    /// The socket to which this hypervisor connects to send the memory. The other one listens at the same path of its host.
    pub memory_socket: &'a Path,
    /// The configuration that the machine has there.
    pub configuration: &'a str,
    /// The configuration that is defined there for later starts.
    pub kept_configuration: &'a str,
    /// Whether the guest may be slowed.
    pub guest_speed: GuestSpeed,
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

/// A hypervisor that moves running machines, given by name or UUID.
pub trait LiveMigration: Send + Sync {
    /// The configuration of a running machine for the hypervisor of another host, complete with what the guest sees.
    fn migratable_configuration(&self, machine: &str) -> Result<String>;

    /// The configuration for later starts.
    fn kept_configuration(&self, machine: &str) -> Result<String>;

    /// Moves a machine, and returns when it runs there. It runs here after an error.
    fn migrate(&self, machine: &str, request: &MigrationRequest<'_>) -> Result<()>;

    /// Limits the time for which the machine is stopped while the rest of its memory is sent.
    fn limit_downtime(&self, machine: &str, longest: Duration) -> Result<()>;

    /// Whether a machine starts with its host.
    fn autostart(&self, machine: &str) -> Result<bool>;

    /// Sets whether a machine starts with its host.
    fn set_autostart(&self, machine: &str, starts: Autostart) -> Result<()>;

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
