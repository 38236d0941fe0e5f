//! What every hypervisor can be asked.

use crate::error::Result;
use crate::machine::{Description, MachineDisk, MachineSummary};
use crate::qmp::Monitor;

/// A hypervisor, and the way to it.
pub trait Hypervisor: Send + Sync {
    /// Where it is and what, for people: "libvirt at qemu:///system".
    fn title(&self) -> &str;

    /// Its machines, by name.
    fn machines(&self) -> Result<Vec<MachineSummary>>;

    /// The machine of this name, or of this UUID.
    fn machine(&self, name: &str) -> Result<Box<dyn Machine>>;
}

/// A machine of a hypervisor.
pub trait Machine: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;

    /// What it is at this moment.
    fn describe(&self) -> Result<Description>;

    /// How large a disk is to the machine, in bytes, where that can be told.
    fn size_of(&self, disk: &MachineDisk) -> Option<u64>;

    /// Its whole configuration as the hypervisor keeps it: names of files, and what is in them.
    fn configuration(&self) -> Result<Vec<(String, Vec<u8>)>>;

    /// The monitor of its QEMU, as long as it runs.
    fn monitor(&self) -> &dyn Monitor;

    /// Asks the guest agent; gives what it answers.
    fn ask_agent(&self, command: &str, deadline: std::time::Duration) -> Result<String>;
}
