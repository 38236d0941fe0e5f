//! Why a restore of a machine is refused before anything is written.

use std::path::PathBuf;

use holdfast_host::MachineState;

/// Why a restore is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The files of the hypervisor are on another host.
    #[error("{hypervisor} has the files of its machines on another host")]
    OtherHost {
        /// The hypervisor.
        hypervisor: String,
    },
    /// The hypervisor runs as another user, whose files this process may not write.
    #[error("{hypervisor} belongs to user {user}: root does not write files that another user has named")]
    OtherUser {
        /// The hypervisor.
        hypervisor: String,
        /// The user that it runs as.
        user: u32,
    },
    /// The snapshot is of images, or of a machine that libvirt did not know.
    #[error("snapshot {snapshot} has no configuration of a machine of libvirt")]
    NoConfiguration {
        /// The snapshot.
        snapshot: String,
    },
    /// The machine has no such point in time.
    #[error("{machine} has no point in time {name}: {reason}")]
    NoPoint {
        /// The machine.
        machine: String,
        /// The requested point.
        name: String,
        /// Why there is none.
        reason: String,
        /// Some existing points, newest first.
        present: Vec<String>,
    },
    /// The machine cannot be resumed from its memory.
    #[error("{machine} cannot be resumed: {reason}")]
    CannotResume {
        /// The machine.
        machine: String,
        /// Why not.
        reason: String,
    },
    /// A machine of this name or UUID exists.
    #[error("there is a machine {name} already ({uuid})")]
    MachineExists {
        /// Its name.
        name: String,
        /// Its UUID.
        uuid: String,
    },
    /// The machine to overwrite is not shut off.
    #[error("the machine {machine} is {state}")]
    NotShutOff {
        /// The machine.
        machine: String,
        /// Its state.
        state: MachineState,
    },
    /// A transient machine would disappear when it is switched off.
    #[error("the machine {machine} is transient: once it is off, its hypervisor does not know it any more")]
    Transient {
        /// The machine.
        machine: String,
    },
    /// The machine to roll back no longer exists.
    #[error("there is no machine {machine} any more that could go back to {point}")]
    MachineGone {
        /// The machine.
        machine: String,
        /// The name of the point.
        point: String,
    },
    /// The machine of this name is not the machine of the snapshot.
    #[error("the machine {machine} ({uuid}) is not the one that the snapshot is of ({snapshot_uuid})")]
    AnotherMachine {
        /// The machine.
        machine: String,
        /// Its UUID.
        uuid: String,
        /// The UUID in the snapshot.
        snapshot_uuid: String,
    },
    /// The hypervisor keeps states that belong to the current disks.
    #[error("{hypervisor} keeps {what} of {machine}, which would be wrong with other disks")]
    KeptStates {
        /// The hypervisor.
        hypervisor: String,
        /// A description of these states.
        what: String,
        /// The machine.
        machine: String,
    },
    /// The machine lacks a disk that the snapshot has.
    #[error("the machine {machine} has no image for disk {disk} of the snapshot; it has {}", present.join(", "))]
    DiskMissing {
        /// The machine.
        machine: String,
        /// The disk.
        disk: String,
        /// The disks that it has.
        present: Vec<String>,
    },
    /// A disk of the machine is on a block device that does not exist.
    #[error("disk {disk} is on {}, which does not exist", path.display())]
    NoDevice {
        /// The disk.
        disk: String,
        /// The block device.
        path: PathBuf,
        /// Bytes that the disk needs.
        size_bytes: u64,
    },
    /// No path was given for a disk, and it cannot be restored beside its original path.
    #[error("disk {disk} was at {place}, and its new place is not given")]
    NoPlace {
        /// The disk.
        disk: String,
        /// Its original path.
        place: String,
    },
    /// The folder does not exist.
    #[error("there is no folder {}", folder.display())]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// A path is given for a disk that the snapshot does not have.
    #[error("the snapshot has no disk {disk}; it has {}", present.join(", "))]
    UnknownDisk {
        /// The disk.
        disk: String,
        /// The disks that it has.
        present: Vec<String>,
    },
    /// Something exists at a path where a new file is to be created.
    #[error("{} exists", path.display())]
    PathTaken {
        /// The path.
        path: PathBuf,
    },
    /// A stream of the machine is larger than its kind allows.
    #[error("{name} of the snapshot has {size_bytes} bytes, more than the {size_bytes_max} that such a thing may have")]
    TooLarge {
        /// The stream.
        name: String,
        /// Its size in bytes.
        size_bytes: u64,
        /// Largest size allowed, in bytes.
        size_bytes_max: u64,
    },
    /// A file or block device is used by a machine.
    #[error("{} is used by the machine {machine}", path.display())]
    InUse {
        /// The file or block device.
        path: PathBuf,
        /// The machine.
        machine: String,
    },
    /// The TPM state to replace is in use.
    #[error("an swtpm is using {}", path.display())]
    TpmInUse {
        /// The state.
        path: PathBuf,
    },
    /// The machine is to be started, but cannot be.
    #[error("{machine} would not start on this host: {}", reasons.join("; "))]
    WouldNotStart {
        /// The machine.
        machine: String,
        /// What is missing.
        reasons: Vec<String>,
    },
    /// The host does not support the acceleration of the machine.
    #[error("this host cannot accelerate {machine} as its configuration wants: {reason}")]
    DomainType {
        /// The machine.
        machine: String,
        /// What the hypervisor says.
        reason: String,
    },
    /// There is not enough free space.
    #[error("{} has room for {free_bytes} bytes, and {needed_bytes} are needed", folder.display())]
    NoRoom {
        /// The folder.
        folder: PathBuf,
        /// Bytes that are free for this process.
        free_bytes: u64,
        /// Bytes that will be written.
        needed_bytes: u64,
    },
    /// The configuration in the snapshot cannot be adapted.
    #[error("the configuration of {machine}: {detail}")]
    Configuration {
        /// The machine.
        machine: String,
        /// Why not.
        detail: String,
    },
    /// The machine changed, or was created, after the plan was made.
    #[error("the machine {machine} has changed since the plan was made")]
    Changed {
        /// The machine.
        machine: String,
    },
}
