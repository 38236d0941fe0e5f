//! What every hypervisor can be asked.

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

/// A hypervisor, and the way to it.
pub trait Hypervisor: Send + Sync {
    /// Where it is and what, for people: "libvirt at qemu:///system".
    fn title(&self) -> &str;

    /// Whose rights decide which files its machines may name: those of the user it runs as.
    fn rights(&self) -> Rights {
        Rights::Own
    }

    /// Its machines, by name.
    fn machines(&self) -> Result<Vec<MachineSummary>>;

    /// The machine of this name, or of this UUID.
    fn machine(&self, name: &str) -> Result<Box<dyn Machine>>;
}

/// A hypervisor that machines can be brought to.
///
/// Machines are named by their name or UUID.
pub trait HypervisorMut: Hypervisor {
    /// Whether the files that its machines use are files of this host.
    fn is_of_this_host(&self) -> bool;

    /// Whether it can have a machine of this configuration; nothing is changed. The answer is what would keep the machine from
    /// starting as things are now, if anything would.
    ///
    /// # Errors
    /// It never can.
    fn check(&self, configuration: &str) -> Result<Option<String>>;

    /// What it lacks of what it is to have itself, networks and storage pools: each in words.
    fn lacks(&self, _needs: &HostNeeds) -> Vec<String> {
        Vec::new()
    }

    /// The default folder for images.
    fn image_folder(&self) -> Option<PathBuf> {
        None
    }

    /// What it keeps of earlier states of a machine.
    fn kept_states(&self, machine: &str) -> Result<KeptStates>;

    /// Where a machine of this configuration has the state of its TPM while it is shut off; none where it has no emulated one.
    fn tpm_place(&self, configuration: &str) -> Option<TpmPlace>;

    /// Makes a machine of a configuration; one with this UUID gets the configuration.
    fn define(&self, configuration: &str) -> Result<()>;

    /// Forgets a machine that is shut off. Its files stay.
    fn undefine(&self, machine: &str) -> Result<()>;

    /// Switches a machine off, as by pulling the plug.
    fn power_off(&self, machine: &str) -> Result<()>;

    /// Starts a machine.
    fn start(&self, machine: &str) -> Result<()>;

    /// Whether it wants the memory that a machine goes on from in a file, and reads no pipe.
    fn wants_memory_in_file(&self) -> bool {
        false
    }

    /// Lets a machine go on from its memory.
    ///
    /// # Errors
    /// The machine is shut off then, as before.
    fn resume(&self, resumption: &Resumption<'_>) -> Result<()>;
}

/// The pipe with the memory of a machine that goes on, in the folder that is given for it.
pub const MEMORY_PIPE: &str = "memory";

/// What a machine goes on from.
pub struct Resumption<'a> {
    /// The machine's configuration as it was when its memory was taken, with places and names of today.
    pub configuration: &'a str,
    /// The whole configuration of the machine as it ran then, with every feature of its processor.
    pub then: &'a str,
    /// For waiting until the hypervisor reads.
    pub clock: &'a dyn Clock,
    /// A folder for a pipe to the hypervisor.
    pub folder: &'a Path,
    /// Where nothing is yet, for a file with the whole memory: for a hypervisor that cannot do with a pipe. Whoever asks deletes it.
    pub file: &'a Path,
    /// Writes the memory as QEMU takes it in.
    pub write: &'a (dyn Fn(&mut dyn Write) -> std::io::Result<()> + Sync),
}

/// Earlier states of a machine that its hypervisor can go back to, or counts from. They belong to its disks as they are: with
/// other content in them they are wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptStates {
    /// Snapshots of the hypervisor's own.
    pub snapshot_count: u32,
    /// Checkpoints, from which changes are counted.
    pub checkpoint_count: u32,
    /// Whether its memory was saved, to go on from there when it starts.
    pub has_saved_memory: bool,
    /// Whether it is gone as soon as it does not run.
    pub is_transient: bool,
}

/// A machine of a hypervisor.
pub trait Machine: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;

    /// Whose rights decide which files it may name.
    fn rights(&self) -> Rights {
        Rights::Own
    }

    /// What it is at this moment.
    fn describe(&self) -> Result<Description>;

    /// The size of a disk in the machine, in bytes, if known.
    fn size_of(&self, disk: &MachineDisk) -> Option<u64>;

    /// How it ended; none while it runs, or if unknown.
    fn ended(&self) -> Option<MachineEnd> {
        match self.describe() {
            Ok(description) if description.summary.state == MachineState::ShutOff => Some(MachineEnd::SwitchedOff),
            Err(Error::NoSuchMachine { .. }) => Some(MachineEnd::Gone),
            _ => None,
        }
    }

    /// Its whole configuration as the hypervisor keeps it: names of files, and what is in them.
    fn configuration(&self) -> Result<Vec<(String, Vec<u8>)>>;

    /// The monitor of its QEMU, as long as it runs.
    fn monitor(&self) -> &dyn Monitor;

    /// Asks the guest agent; gives what it answers.
    fn ask_agent(&self, command: &str, deadline: std::time::Duration) -> Result<String>;
}
