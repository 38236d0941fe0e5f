//! Descriptions of machines: their states, disks and other parts.

use std::fmt;
use std::path::PathBuf;

use crate::hypervisor::tpm::Tpm;

/// The state of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MachineState {
    /// The processors are running.
    Running,
    /// The machine is paused, and its memory exists.
    Paused,
    /// The machine is shut off.
    ShutOff,
    /// The machine has crashed, is suspended, or is changing from one state to another.
    Between,
}

impl fmt::Display for MachineState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::ShutOff => "shut off",
            Self::Between => "in between",
        })
    }
}

/// A machine in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineSummary {
    /// The name at the hypervisor.
    pub name: String,
    /// The UUID, as text.
    pub uuid: String,
    /// The state.
    pub state: MachineState,
}

/// The properties of a machine that matter for a backup of its disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Name, UUID and state.
    pub summary: MachineSummary,
    /// The disks, in the order of the configuration.
    pub disks: Vec<MachineDisk>,
    /// The file with the firmware's variables, if the machine has one.
    pub nvram: Option<PathBuf>,
    /// The emulated TPM, if the machine has one.
    pub tpm: Option<Tpm>,
    /// Whether the machine has a channel for the QEMU guest agent. The agent need not run in the guest.
    pub has_agent_channel: bool,
    /// The settings about backups in the configuration.
    pub mark: BackupMark,
}

/// The settings about backups in a machine's own configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BackupMark {
    /// The machine is excluded from backups of all machines.
    pub is_left_out: bool,
    /// Excluded disks, by target.
    pub left_out_disks: Vec<String>,
    /// Tags by which machines are selected.
    pub tags: Vec<String>,
}

/// A disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineDisk {
    /// The name in the machine: "vda".
    pub target: String,
    /// The kind of device.
    pub kind: DiskKind,
    /// The location of the disk's bytes.
    pub source: DiskSource,
    /// The format of the image, if configured.
    pub format: Option<String>,
    /// Whether the machine cannot write the disk.
    pub is_read_only: bool,
    /// Whether other machines may have the disk open at the same time.
    pub is_shared: bool,
    /// QEMU's name of the device while the machine is running: its id, "virtio-disk0", or its QOM path.
    pub alias: Option<String>,
}

/// The kind of device that a disk is to its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskKind {
    /// A disk.
    Disk,
    /// A disk of the host to which the guest sends SCSI commands.
    Lun,
    /// A CD or DVD.
    Cdrom,
    /// A floppy disk.
    Floppy,
}

/// The location of a disk's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSource {
    /// A file.
    File(PathBuf),
    /// A block device.
    Device(PathBuf),
    /// Another location, as the text describes.
    Other(String),
    /// None: the drive is empty.
    Empty,
}

/// Whether a disk is backed up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The disk is backed up.
    Take,
    /// The disk is not backed up, for this reason.
    Leave(String),
}

/// The user's selection of disks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskChoice {
    /// Only these disks, by target; all disks if empty.
    pub include: Vec<String>,
    /// Excluded disks, by target.
    pub exclude: Vec<String>,
}

impl Description {
    /// The decision for each disk, in order.
    ///
    /// A disk that is included by name is backed up, unless it cannot be read.
    pub fn decide(&self, choice: &DiskChoice) -> Vec<Decision> {
        self.disks.iter().map(|disk| self.decide_one(disk, choice)).collect()
    }

    /// Names in the selection that match no disk.
    pub fn unknown<'a>(&self, choice: &'a DiskChoice) -> Vec<&'a str> {
        let named = choice.include.iter().chain(&choice.exclude).map(String::as_str);
        named
            .filter(|name| self.disks.iter().all(|disk| disk.target != *name))
            .collect()
    }

    fn decide_one(&self, disk: &MachineDisk, choice: &DiskChoice) -> Decision {
        let is_in = |list: &[String]| list.contains(&disk.target);
        let leave = |why: &str| Decision::Leave(why.to_owned());
        if let DiskSource::Empty = disk.source {
            return leave("the drive is empty");
        }
        if is_in(&choice.exclude) {
            return leave("it is excluded");
        }
        if is_in(&choice.include) {
            return Decision::Take;
        }
        if !choice.include.is_empty() {
            return leave("it is not among the included disks");
        }
        if is_in(&self.mark.left_out_disks) {
            return leave("the machine's configuration excludes it");
        }
        match disk.kind {
            DiskKind::Cdrom => return leave("it is a CD, which does not change"),
            DiskKind::Floppy => return leave("it is a floppy disk"),
            DiskKind::Lun => return leave("its machine sends SCSI commands to it directly, without the hypervisor"),
            DiskKind::Disk => {}
        }
        if disk.is_shared {
            return leave("other machines can write to it, so it has no point in time of this machine");
        }
        if disk.is_read_only {
            return leave("it is read-only");
        }
        Decision::Take
    }
}

#[cfg(test)]
mod tests {
    use super::{
        BackupMark, Decision, Description, DiskChoice, DiskKind, DiskSource, MachineDisk, MachineState, MachineSummary,
    };

    fn disk(target: &str, change: impl FnOnce(&mut MachineDisk)) -> MachineDisk {
        let mut disk = MachineDisk {
            target: target.to_owned(),
            kind: DiskKind::Disk,
            source: DiskSource::File("/images/a".into()),
            format: Some("qcow2".to_owned()),
            is_read_only: false,
            is_shared: false,
            alias: None,
        };
        change(&mut disk);
        disk
    }

    fn machine() -> Description {
        Description {
            summary: MachineSummary {
                name: "web1".to_owned(),
                uuid: "u".to_owned(),
                state: MachineState::Running,
            },
            disks: vec![
                disk("vda", |_| ()),
                disk("vdb", |disk| disk.is_shared = true),
                disk("vdc", |disk| disk.is_read_only = true),
                disk("vdd", |_| ()),
                disk("sda", |disk| disk.kind = DiskKind::Cdrom),
                disk("sdb", |disk| disk.source = DiskSource::Empty),
            ],
            nvram: None,
            tpm: None,
            has_agent_channel: false,
            mark: BackupMark {
                is_left_out: false,
                left_out_disks: vec!["vdd".to_owned()],
                tags: Vec::new(),
            },
        }
    }

    fn taken(choice: &DiskChoice) -> Vec<String> {
        let machine = machine();
        let decisions = machine.decide(choice);
        let disks = machine.disks.iter().zip(decisions);
        disks
            .filter(|(_, decision)| *decision == Decision::Take)
            .map(|(disk, _)| disk.target.clone())
            .collect()
    }

    #[test]
    fn by_default_the_disks_of_the_machine_are_backed_up() {
        assert_eq!(taken(&DiskChoice::default()), ["vda"]);
        assert!(
            machine()
                .decide(&DiskChoice::default())
                .iter()
                .skip(1)
                .all(|decision| *decision != Decision::Take)
        );
    }

    #[test]
    fn a_disk_included_by_name_is_backed_up_unless_it_is_empty() {
        let include = |names: &[&str]| DiskChoice {
            include: names.iter().map(|name| (*name).to_owned()).collect(),
            exclude: vec!["vdc".to_owned()],
        };
        assert_eq!(
            taken(&include(&["vdb", "vdc", "vdd", "sda", "sdb"])),
            ["vdb", "vdd", "sda"]
        );
        assert_eq!(machine().unknown(&include(&["vdz", "vda"])), ["vdz"]);
        assert_eq!(taken(&include(&[])), ["vda"]);
    }
}
