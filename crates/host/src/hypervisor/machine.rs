//! What a machine is: its state, its disks, and what else belongs to it.

use std::fmt;
use std::path::PathBuf;

use crate::hypervisor::tpm::Tpm;

/// What a machine is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MachineState {
    /// Its processors run.
    Running,
    /// It is paused, and its memory is there.
    Paused,
    /// It is switched off.
    ShutOff,
    /// It has crashed, is asleep, or on its way from one state to another.
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
    /// Its name at its hypervisor.
    pub name: String,
    /// Its UUID, as text.
    pub uuid: String,
    /// What it is doing.
    pub state: MachineState,
}

/// Everything about a machine that matters for its disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Its name, UUID and state.
    pub summary: MachineSummary,
    /// Its disks, in the order of its configuration.
    pub disks: Vec<MachineDisk>,
    /// The file with the firmware's variables, where it has one.
    pub nvram: Option<PathBuf>,
    /// Its TPM, where it has an emulated one.
    pub tpm: Option<Tpm>,
    /// Whether it has a channel for the QEMU guest agent. The guest need not run the agent.
    pub has_agent_channel: bool,
    /// The settings about backups in its configuration.
    pub mark: BackupMark,
}

/// The settings about backups in a machine's own configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BackupMark {
    /// The machine is to be left out where all are backed up.
    pub is_left_out: bool,
    /// Disks that are to be left out, by target.
    pub left_out_disks: Vec<String>,
    /// Words by which several machines are chosen at once.
    pub tags: Vec<String>,
}

/// A disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineDisk {
    /// Its name in the machine: "vda".
    pub target: String,
    /// What it is to the machine.
    pub kind: DiskKind,
    /// Where its bytes are.
    pub source: DiskSource,
    /// The format of its image, if configured.
    pub format: Option<String>,
    /// Whether the machine cannot write it.
    pub is_read_only: bool,
    /// Whether other machines may have it open at the same time.
    pub is_shared: bool,
    /// What QEMU calls the device while the machine runs: its id, "virtio-disk0", or its whole path.
    pub alias: Option<String>,
}

/// What a disk is to its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskKind {
    /// A disk.
    Disk,
    /// A disk of the host that takes SCSI commands.
    Lun,
    /// A CD or DVD.
    Cdrom,
    /// A floppy disk.
    Floppy,
}

/// Where the bytes of a disk are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSource {
    /// In a file.
    File(PathBuf),
    /// On a block device.
    Device(PathBuf),
    /// Elsewhere, as described by the text.
    Other(String),
    /// Nowhere: the drive is empty.
    Empty,
}

/// What is done with a disk when its machine is backed up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It is backed up.
    Take,
    /// It is not, and this is why.
    Leave(String),
}

/// Which disks of a machine a person wants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskChoice {
    /// Only these, by target; all where none is named.
    pub include: Vec<String>,
    /// Not these.
    pub exclude: Vec<String>,
}

impl Description {
    /// What is done with each disk, in their order, and why.
    ///
    /// A disk that is named is included, unless it cannot be read.
    pub fn decide(&self, choice: &DiskChoice) -> Vec<Decision> {
        self.disks.iter().map(|disk| self.decide_one(disk, choice)).collect()
    }

    /// Names of the choice that no disk has.
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
            return leave("others are included");
        }
        if is_in(&self.mark.left_out_disks) {
            return leave("the machine's own configuration leaves it out");
        }
        match disk.kind {
            DiskKind::Cdrom => return leave("it is a CD, which does not change"),
            DiskKind::Floppy => return leave("it is a floppy disk"),
            DiskKind::Lun => return leave("its machine speaks SCSI to it, past the hypervisor"),
            DiskKind::Disk => {}
        }
        if disk.is_shared {
            return leave("other machines write to it too, so it has no instant of this machine");
        }
        if disk.is_read_only {
            return leave("the machine cannot write it");
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
    fn without_a_wish_what_belongs_to_the_machine_is_taken() {
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
    fn who_names_a_disk_gets_it_unless_there_is_nothing() {
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
