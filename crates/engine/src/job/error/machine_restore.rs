//! Why a machine is not restored: nothing was written.

use std::path::PathBuf;

use holdfast_host::MachineState;

/// A reason not to begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The hypervisor has its files on another host.
    #[error("{hypervisor} has the files of its machines on another host")]
    OtherHost {
        /// The hypervisor.
        hypervisor: String,
    },
    /// The hypervisor runs as another user, whose files are not written with our rights.
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
    /// A machine cannot go to a point in time.
    #[error("{machine} has no point in time {name}: {reason}")]
    NoPoint {
        /// The machine.
        machine: String,
        /// What was asked for.
        name: String,
        /// Why there is none.
        reason: String,
        /// Some that are there, the newest first.
        present: Vec<String>,
    },
    /// The machine cannot go on from its memory.
    #[error("{machine} cannot go on where it was: {reason}")]
    CannotResume {
        /// The machine.
        machine: String,
        /// Why not.
        reason: String,
    },
    /// There is a machine of this name or UUID.
    #[error("there is a machine {name} already ({uuid})")]
    MachineExists {
        /// Its name.
        name: String,
        /// Its UUID.
        uuid: String,
    },
    /// The machine that is to be written over is not shut off.
    #[error("the machine {machine} is {state}")]
    NotShutOff {
        /// The machine.
        machine: String,
        /// What it is doing.
        state: MachineState,
    },
    /// A machine that is to be switched off would be gone.
    #[error("the machine {machine} is transient: once it is off, its hypervisor does not know it any more")]
    Transient {
        /// The machine.
        machine: String,
    },
    /// A machine that is to go back is not there any more.
    #[error("there is no machine {machine} any more that could go back to {point}")]
    MachineGone {
        /// The machine.
        machine: String,
        /// The name of the point.
        point: String,
    },
    /// The machine of this name is another one than the snapshot's.
    #[error("the machine {machine} ({uuid}) is not the one that the snapshot is of ({snapshot_uuid})")]
    AnotherMachine {
        /// The machine.
        machine: String,
        /// Its UUID.
        uuid: String,
        /// The UUID in the snapshot.
        snapshot_uuid: String,
    },
    /// The hypervisor keeps something that belongs to the disks as they are now.
    #[error("{hypervisor} keeps {what} of {machine}, which would be wrong with other disks")]
    KeptStates {
        /// The hypervisor.
        hypervisor: String,
        /// What, in words.
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
    /// The machine has a disk on a block device that does not exist.
    #[error("disk {disk} is on {}, which is not there", path.display())]
    NoDevice {
        /// The disk.
        disk: String,
        /// The block device.
        path: PathBuf,
        /// Bytes that it needs.
        size_bytes: u64,
    },
    /// No place was given for a disk, and it cannot go beside where it was.
    #[error("disk {disk} was at {place}, and nothing says where it is to go")]
    NoPlace {
        /// The disk.
        disk: String,
        /// Where it was.
        place: String,
    },
    /// There is no such folder.
    #[error("there is no folder {}", folder.display())]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// A place is given for a disk that the snapshot does not have.
    #[error("the snapshot has no disk {disk}; it has {}", present.join(", "))]
    UnknownDisk {
        /// The disk.
        disk: String,
        /// The disks that it has.
        present: Vec<String>,
    },
    /// There is something where a person wants a new file.
    #[error("{} exists", path.display())]
    PathTaken {
        /// The path.
        path: PathBuf,
    },
    /// A stream of a machine that is larger than any such thing.
    #[error("{name} of the snapshot has {size_bytes} bytes, more than the {size_bytes_max} that such a thing may have")]
    TooLarge {
        /// The stream.
        name: String,
        /// Its size in bytes.
        size_bytes: u64,
        /// What is allowed.
        size_bytes_max: u64,
    },
    /// A file or block device belongs to a machine.
    #[error("{} is used by the machine {machine}", path.display())]
    InUse {
        /// The file or block device.
        path: PathBuf,
        /// The machine.
        machine: String,
    },
    /// The state of a TPM that is to be replaced is at work.
    #[error("an swtpm is at work with {}", path.display())]
    TpmInUse {
        /// The state.
        path: PathBuf,
    },
    /// A machine that is to be started, and could not be.
    #[error("{machine} would not start as things are now: {}", reasons.join("; "))]
    WouldNotStart {
        /// The machine.
        machine: String,
        /// What is missing.
        reasons: Vec<String>,
    },
    /// The host does not have what accelerates the machine.
    #[error("this host cannot accelerate {machine} as its configuration wants: {reason}")]
    DomainType {
        /// The machine.
        machine: String,
        /// What the hypervisor says.
        reason: String,
    },
    /// There is too little room.
    #[error("{} has room for {free_bytes} bytes, and {needed_bytes} are needed", folder.display())]
    NoRoom {
        /// The folder.
        folder: PathBuf,
        /// Bytes that are free for us.
        free_bytes: u64,
        /// Bytes that will be written.
        needed_bytes: u64,
    },
    /// The configuration of the snapshot cannot be made to fit.
    #[error("the configuration of {machine}: {detail}")]
    Configuration {
        /// The machine.
        machine: String,
        /// Why not.
        detail: String,
    },
    /// A machine that was not there when the plan was made, or has changed since.
    #[error("the machine {machine} has changed since the plan was made")]
    Changed {
        /// The machine.
        machine: String,
    },
}
