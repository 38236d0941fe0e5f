//! The interfaces of all hypervisors and machines.

use std::io::Write;
use std::path::{Path, PathBuf};

use holdfast_block::Clock;

use crate::hypervisor::domain_xml::HostNeeds;
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::exit_report::MachineEnd;
use crate::hypervisor::machine::{Description, MachineDisk, MachineState, MachineSummary};
use crate::hypervisor::tpm::TpmPlace;
use crate::qemu::qmp::Monitor;
use crate::system::rights::Rights;

/// A connection to a hypervisor.
pub trait Hypervisor: Send + Sync {
    /// The kind and address, for users: "libvirt at qemu:///system".
    fn title(&self) -> &str;

    /// The rights for opening files that the machines name: those of the user under which the hypervisor runs.
    fn rights(&self) -> Rights {
        Rights::Own
    }

    /// The machines, by name.
    fn machines(&self) -> Result<Vec<MachineSummary>>;

    /// Finds a machine by name or UUID.
    fn machine(&self, name: &str) -> Result<Box<dyn Machine>>;
}

/// A hypervisor on which machines can be created.
///
/// Machines are given by name or UUID.
pub trait HypervisorMut: Hypervisor {
    /// Whether the machines use files of this host.
    fn is_of_this_host(&self) -> bool;

    /// Checks whether the hypervisor accepts a configuration. Changes nothing. Returns what would currently prevent
    /// the machine from starting, if anything.
    ///
    /// # Errors
    /// The hypervisor can never accept the configuration.
    fn check(&self, configuration: &str) -> Result<Option<String>>;

    /// Descriptions of the needed networks and storage pools that the hypervisor lacks.
    fn missing_resources(&self, _needs: &HostNeeds) -> Vec<String> {
        Vec::new()
    }

    /// The default folder for images.
    fn image_folder(&self) -> Option<PathBuf> {
        None
    }

    /// The earlier states of a machine that the hypervisor keeps.
    fn kept_states(&self, machine: &str) -> Result<KeptStates>;

    /// The location of the TPM's state of a machine that is shut off; none if the configuration has no emulated TPM.
    fn tpm_place(&self, configuration: &str) -> Option<TpmPlace>;

    /// Defines a machine. An existing machine with the same UUID gets the new configuration.
    fn define(&self, configuration: &str) -> Result<()>;

    /// Removes the definition of a machine that is shut off. Its files are kept.
    fn undefine(&self, machine: &str) -> Result<()>;

    /// Stops a machine without a guest shutdown.
    fn power_off(&self, machine: &str) -> Result<()>;

    /// Starts a machine.
    fn start(&self, machine: &str) -> Result<()>;

    /// Whether the hypervisor needs the saved memory in a file, because it cannot read a pipe.
    fn wants_memory_in_file(&self) -> bool {
        false
    }

    /// Starts a machine from its saved memory.
    ///
    /// # Errors
    /// The machine is shut off, as before the call.
    fn resume(&self, resumption: &Resumption<'_>) -> Result<()>;
}

/// The name of the pipe with a machine's memory, in the folder for it.
pub const MEMORY_PIPE: &str = "memory";

/// The saved state that a machine is started from.
pub struct Resumption<'a> {
    /// The configuration at the time of the save, with current paths and names.
    pub configuration: &'a str,
    /// The complete configuration of the running machine at the time of the save, with every CPU feature.
    pub original_configuration: &'a str,
    /// Clock for waiting until the hypervisor reads.
    pub clock: &'a dyn Clock,
    /// A folder for a pipe to the hypervisor.
    pub folder: &'a Path,
    /// An unused path for a file with the whole memory, for a hypervisor that cannot read a pipe. The caller deletes
    /// the file.
    pub file: &'a Path,
    /// Writes the memory in the format of QEMU.
    pub write: &'a (dyn Fn(&mut dyn Write) -> std::io::Result<()> + Sync),
}

/// Earlier states of a machine to which its hypervisor can return, or from which it counts changes. They depend on
/// the current content of the disks, and are invalid for any other content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptStates {
    /// Snapshots of the hypervisor.
    pub snapshot_count: u32,
    /// Checkpoints from which changes are tracked.
    pub checkpoint_count: u32,
    /// Whether the memory was saved, so that the next start resumes the machine.
    pub has_saved_memory: bool,
    /// Whether the definition is removed when the machine stops.
    pub is_transient: bool,
}

/// A machine of a hypervisor.
pub trait Machine: Send + Sync {
    /// The name.
    fn name(&self) -> &str;

    /// The rights for opening files that the machine names.
    fn rights(&self) -> Rights {
        Rights::Own
    }

    /// The current description.
    fn describe(&self) -> Result<Description>;

    /// The size of a disk in the machine, in bytes, if known.
    fn size_of(&self, disk: &MachineDisk) -> Option<u64>;

    /// How the machine ended; none while it is running, or if unknown.
    fn ended(&self) -> Option<MachineEnd> {
        match self.describe() {
            Ok(description) if description.summary.state == MachineState::ShutOff => Some(MachineEnd::SwitchedOff),
            Err(Error::NoSuchMachine { .. }) => Some(MachineEnd::Gone),
            _ => None,
        }
    }

    /// The complete configuration as the hypervisor stores it: file names and contents.
    fn configuration(&self) -> Result<Vec<(String, Vec<u8>)>>;

    /// The monitor of the machine's QEMU, while it is running.
    fn monitor(&self) -> &dyn Monitor;

    /// Sends a command to the guest agent, and returns the answer.
    fn ask_agent(&self, command: &str, deadline: std::time::Duration) -> Result<String>;
}
