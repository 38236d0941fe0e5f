//! What can go wrong with a job.

mod choice;
mod clone;
mod exchange;
mod exchanged;
mod from;
mod instant;
mod machine_restore;
mod name_taken;
mod resolve;
mod scratch;
mod template;
mod virtualbox;
mod xen;

use std::path::PathBuf;

use holdfast_host::provider::ProviderError;
use holdfast_image::Format;

use super::{Interrupted, NameError};
pub use choice::SnapshotChoiceError;
pub use clone::CloneError;
pub use exchange::ExchangeError;
pub use exchanged::Exchanged;
pub use instant::InstantError;
pub use machine_restore::Refusal;
pub use name_taken::NameTaken;
pub(crate) use resolve::PREFIX_DIGITS_MIN;
pub use resolve::ResolveError;
pub use scratch::GivenUp;
pub use template::TemplateError;
pub use virtualbox::VirtualBoxError;
pub use xen::XenBackupError;

/// Result of a job.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The repository, its store or its keys.
    #[error(transparent)]
    Repository(holdfast_repo::Error),
    /// An image.
    #[error(transparent)]
    Image(#[from] holdfast_image::Error),
    /// A machine archive, or a packed stream.
    #[error(transparent)]
    Archive(holdfast_archive::Error),
    /// What a machine consists of, as another hypervisor says it.
    #[error(transparent)]
    Hardware(#[from] holdfast_hardware::Error),
    /// An import or an export.
    #[error(transparent)]
    Exchange(Box<crate::ExchangeError>),
    /// A backup of a machine of XenServer or XCP-ng.
    #[error(transparent)]
    Xen(Box<crate::XenBackupError>),
    /// A template.
    #[error(transparent)]
    Template(Box<crate::TemplateError>),
    /// A disk, a file or a block device.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// A machine or disk cannot have this name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A name means no snapshot, or more than one.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The job was interrupted.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A repository cannot be kept there.
    #[error("{location}: repositories of the kind \"{scheme}:\" are not supported, only directories")]
    Scheme {
        /// The location as given.
        location: String,
        /// What stands before the colon.
        scheme: String,
    },
    /// A directory in which a repository is to be made holds something else.
    #[error("{store} is not empty: it holds {stranger}")]
    NotEmpty {
        /// The store, as it describes itself.
        store: String,
        /// The first thing in it that is no part of a repository.
        stranger: String,
    },
    /// A new password that a guesser finds at once.
    #[error("the password is too weak: {reason}")]
    WeakPassword {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A paper key opens the repository, but no key slot, so there is none that could be replaced.
    #[error("the repository was opened with its paper key: no key slot was used that could be replaced")]
    NoSlotUsed,
    /// No machine name can be made of what is backed up.
    #[error("the machine needs a name")]
    NoMachineName,
    /// Two disks of one snapshot with one name.
    #[error("two disks are called {name:?}")]
    DuplicateDisk {
        /// The name.
        name: String,
    },
    /// An image cannot be cloned.
    #[error(transparent)]
    Clone(#[from] CloneError),
    /// A stream has more than the disk that it was said to be.
    #[error("the stream has more than the {size_bytes} bytes of the disk")]
    StreamLonger {
        /// Size of the disk.
        size_bytes: u64,
    },
    /// Standard input was given twice.
    #[error("standard input can be only one of the disks")]
    StandardInputTwice,
    /// A disk is larger than an image of a format can be.
    #[error("the disk of {size_bytes} bytes does not become a {format} image: {detail}")]
    DiskDoesNotFit {
        /// Its size.
        size_bytes: u64,
        /// The format.
        format: String,
        /// What the format has.
        detail: String,
    },
    /// A disk that was raw looks like an image of another format now, which its guest may have brought about.
    #[error(
        "{} was backed up as {before} and now looks like {now}: its guest may have written that to have other files read",
        path.display()
    )]
    FormatChanged {
        /// The image.
        path: PathBuf,
        /// The format in the snapshot before.
        before: String,
        /// The format that its content shows now.
        now: String,
    },
    /// A name does not say which snapshot is to be removed or unprotected.
    #[error(transparent)]
    Choice(#[from] SnapshotChoiceError),
    /// A name is taken by another machine.
    #[error(transparent)]
    NameTaken(#[from] NameTaken),
    /// Another repository is where one was known.
    #[error(transparent)]
    Exchanged(#[from] Exchanged),
    /// An image is compared with one disk.
    #[error("an image is compared with the disk of one snapshot")]
    CompareOne,
    /// There is something at the target, which would be lost.
    #[error("{} exists", path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },
    /// There is a block device at the target, and overwriting it was not requested.
    #[error("{} is a block device: what is on it would be lost", path.display())]
    DeviceExists {
        /// The target.
        path: PathBuf,
    },
    /// A block device that is to hold an image of a format with files of its own.
    #[error("{} is a block device, which holds a raw disk, not a {format} image", path.display())]
    DeviceFormat {
        /// The target.
        path: PathBuf,
        /// The format asked for.
        format: String,
    },
    /// A disk does not fit on its target.
    #[error("{} has {target_bytes} bytes, the disk has {disk_bytes}", path.display())]
    TargetTooSmall {
        /// The target.
        path: PathBuf,
        /// Size of the target in bytes.
        target_bytes: u64,
        /// Size of the disk in bytes.
        disk_bytes: u64,
    },
    /// Another process serves what is written to a disk of a snapshot.
    #[error("{} is in use: it is served already", path.display())]
    OverlayInUse {
        /// The file.
        path: PathBuf,
    },
    /// Another process writes to a device that a disk is restored to.
    #[error("{} is in use: process {process} ({program}) has it open for writing", path.display())]
    DeviceInUse {
        /// The device.
        path: PathBuf,
        /// The number of the process.
        process: u32,
        /// Its program.
        program: String,
    },
    /// There is nothing at a target that was to be changed in place.
    #[error("{} does not exist, so nothing can be restored in place", path.display())]
    NoTarget {
        /// The target.
        path: PathBuf,
    },
    /// An image that was to be changed in place, and is damaged.
    #[error("{} cannot be restored in place: {source}", path.display())]
    TargetDamaged {
        /// The target.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<holdfast_image::Error>,
    },
    /// A target whose name says one format, and whose content is no image of any.
    #[error("{} has the name of a {format} image, but its content is not one", path.display())]
    TargetNotAnImage {
        /// The target.
        path: PathBuf,
        /// What its name says.
        format: Format,
    },
    /// A target of a format that cannot be written.
    #[error("{}: {format} images cannot be written there", path.display())]
    TargetFormat {
        /// The target.
        path: PathBuf,
        /// Its format.
        format: String,
    },
    /// Several disks, and a target that holds one.
    #[error("the snapshot has {} disks: {}", disks.len(), disks.join(", "))]
    SeveralDisks {
        /// Their names.
        disks: Vec<String>,
    },
    /// The target is a device, a folder or a pipe, which a new file must not replace.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The target.
        path: PathBuf,
    },
    /// There is something where the external data file of a new image is to be.
    #[error("the data file {} exists", path.display())]
    DataFileExists {
        /// The data file.
        path: PathBuf,
    },
    /// A new image would replace a file that it is made from.
    #[error("{} is part of what is read", path.display())]
    TargetIsSource {
        /// The target.
        path: PathBuf,
    },
    /// A new image has no size, and no backing file to take it from.
    #[error("the size of the new disk is missing")]
    NoSize,
    /// What was written reads back otherwise.
    #[error("{} was written wrong: {different_bytes} bytes differ, the first at offset {offset}", path.display())]
    WrittenWrong {
        /// The new image.
        path: PathBuf,
        /// The first byte that differs.
        offset: u64,
        /// Bytes that differ.
        different_bytes: u64,
    },
    /// A file or device could not be read or written.
    #[error("{}", path.display())]
    Medium {
        /// Which one.
        path: PathBuf,
        /// What was tried, where, and the operating system's reason.
        source: holdfast_block::Error,
    },
    /// A file could not be read, written, renamed or removed.
    #[error("{action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A hypervisor, or a machine of it.
    #[error(transparent)]
    Host(Box<holdfast_host::Error>),
    /// Another run of a policy is under way on this host.
    #[error("another run of a policy is under way: it has locked {}", .lock.display())]
    PolicyBusy {
        /// What it has locked.
        lock: PathBuf,
    },
    /// Another scheduler is at work in the same folder.
    #[error("another holdfast daemon is at work: it has locked {}", .lock.display())]
    DaemonBusy {
        /// What it has locked.
        lock: PathBuf,
    },
    /// A provider of host snapshots failed.
    #[error(transparent)]
    Provider(Box<ProviderError>),
    /// A machine has no such disks.
    #[error("the machine {machine} has no disk {}; it has {}", disks.join(", "), present.join(", "))]
    NoSuchDisk {
        /// The machine.
        machine: String,
        /// The disks that were asked for.
        disks: Vec<String>,
        /// The disks that it has.
        present: Vec<String>,
    },
    /// A machine is neither running nor paused nor shut off.
    #[error("the machine {machine} is on its way from one state to another")]
    MachineBetween {
        /// The machine.
        machine: String,
    },
    /// A disk of a machine that is shut off lies where it cannot be read.
    #[error("disk {disk} is at {place}, where it can be read only while the machine runs")]
    Unreachable {
        /// The disk.
        disk: String,
        /// Where it is.
        place: String,
    },
    /// QEMU has no device for a disk of its machine.
    #[error("QEMU has no device for disk {disk} of {machine}")]
    NoDevice {
        /// The machine.
        machine: String,
        /// The disk.
        disk: String,
    },
    /// A machine that runs cannot be read as was asked for, or in any way that leaves it running.
    #[error("the disks of {machine} cannot be read while it runs: {reason}")]
    NoMethod {
        /// The machine.
        machine: String,
        /// Why, for each way.
        reason: String,
    },
    /// A disk that is on no image file.
    #[error("disk {disk} is on no image file, but on {place}")]
    NoImageFile {
        /// The disk.
        disk: String,
        /// Where it is.
        place: String,
    },
    /// The process that watches over the machine does not start, or is gone: nothing is stopped without it.
    #[error("the watchdog, without which no machine is stopped, does not answer")]
    NoWatchdog {
        /// The operating system's reason, where it gave one.
        source: Option<std::io::Error>,
    },
    /// A program of the administrator's own fails, and the backup depends on it.
    #[error("the hook {} fails at {event}: {reason}", program.display())]
    Hook {
        /// The program.
        program: PathBuf,
        /// What it was called for.
        event: &'static str,
        /// How it ended.
        reason: String,
    },
    /// What the guest has overwritten took too much room.
    #[error("the copy of {machine} was given up, to spare the room in {}, where what it overwrites is kept: {why}", scratch.display())]
    ScratchLimit {
        /// The machine.
        machine: String,
        /// The folder.
        scratch: PathBuf,
        /// How much room.
        why: crate::GivenUp,
    },
    /// The guest cannot be frozen, and was to be.
    #[error("the file systems of {machine} cannot be frozen")]
    NotQuiesced {
        /// The machine.
        machine: String,
        /// Why; none where it has no guest agent.
        source: Option<Box<holdfast_host::Error>>,
    },
    /// A machine is not restored: nothing was written.
    #[error(transparent)]
    MachineRestore(#[from] Refusal),
    /// A restore that lets the machine run from the start.
    #[error(transparent)]
    Instant(#[from] InstantError),
    /// A server does not start.
    #[error(transparent)]
    Serve(holdfast_serve::Error),
    /// QEMU does not serve what it has frozen.
    #[error("QEMU does not serve the frozen disks of {machine}")]
    Frozen {
        /// The machine.
        machine: String,
        /// Why.
        source: Box<holdfast_serve::nbd::client::Error>,
    },
    /// All disks of a machine are left out.
    #[error("all disks of {machine} are left out, and a snapshot without disks is none")]
    NoDisks {
        /// The machine.
        machine: String,
    },
    /// A machine was switched off, or its QEMU crashed, while it was backed up.
    #[error("{machine} {how} while it was backed up")]
    MachineEnded {
        /// The machine.
        machine: String,
        /// How it ended.
        how: holdfast_host::MachineEnd,
    },
    /// The frozen copy of a disk broke while it was read.
    #[error("the frozen copy of disk {disk} of {machine} broke: what the guest overwrote did not fit into {}, or was not saved in time", scratch.display())]
    FrozenBroken {
        /// The machine.
        machine: String,
        /// The disk.
        disk: String,
        /// The folder with the scratch files.
        scratch: PathBuf,
        /// What the read of the frozen disk answered.
        source: Box<holdfast_block::Error>,
    },
    /// The memory of a machine cannot be kept.
    #[error("the memory of {machine} cannot be kept; it goes by way of {}", folder.display())]
    MemoryNotKept {
        /// The machine.
        machine: String,
        /// The folder with the scratch files.
        folder: PathBuf,
        /// Why.
        source: Box<holdfast_host::qemu::memory::MemoryStreamError>,
    },
    /// What a snapshot holds of a machine's memory makes no sense.
    #[error("the state of the memory of {machine} in the snapshot")]
    MemoryState {
        /// The machine.
        machine: String,
        /// What is wrong.
        source: holdfast_host::qemu::memory::StateError,
    },
    /// The memory of a machine did not come.
    #[error("the memory of {machine} was not sent to its end")]
    MemoryNotSent {
        /// The machine.
        machine: String,
        /// Why.
        source: Box<holdfast_host::qemu::memory::MemoryStreamError>,
    },
    /// QEMU does not send the memory of a machine that is paused since it was sent before.
    #[error("QEMU sent the memory of {machine} before, and sends it again only after the machine has run")]
    MemorySentBefore {
        /// The machine.
        machine: String,
    },
    /// A stream from one host to another, or what goes with it.
    #[error("the stream breaks")]
    Stream(#[source] std::io::Error),
    /// What a program on another host asks for cannot be done.
    #[error("{reason}")]
    Peer {
        /// Why.
        reason: String,
    },
    /// Standard output could not be written.
    #[error("write to standard output")]
    Stdout(#[source] std::io::Error),
}

impl Error {
    /// The same error with the name of the file that it is about, which devices do not know.
    pub(crate) fn on(self, path: &std::path::Path) -> Self {
        match self {
            Self::Device(source @ holdfast_block::Error::Io { .. })
            | Self::Image(holdfast_image::Error::Device(source @ holdfast_block::Error::Io { .. })) => Self::Medium {
                path: path.to_owned(),
                source,
            },
            other => other,
        }
    }
}
