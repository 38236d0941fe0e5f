//! Errors of jobs.

mod choice;
mod clone;
mod container;
mod container_content;
mod exchange;
mod exchanged;
mod from;
mod guest_files;
mod instant;
mod machine_restore;
mod name_taken;
mod resolve;
mod scratch;
mod serving;
mod template;
mod virtualbox;
mod xen;

use std::path::PathBuf;

use holdfast_host::provider::ProviderError;
use holdfast_image::Format;

use super::{Interrupted, NameError};
pub use choice::SnapshotChoiceError;
pub use clone::CloneError;
pub use container::{ContainerError, MemoryProblem, ServerFailure};
pub use container_content::ContainerContentError;
pub use exchange::ExchangeError;
pub use exchanged::Exchanged;
pub use guest_files::GuestFilesError;
pub use instant::InstantError;
pub use machine_restore::Refusal;
pub use name_taken::NameTaken;
pub(crate) use resolve::PREFIX_DIGITS_MIN;
pub use resolve::ResolveError;
pub use scratch::ScratchOverrun;
pub use serving::ServingError;
pub use template::TemplateError;
pub use virtualbox::VirtualBoxError;
pub use xen::XenBackupError;

/// Result of a job.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the repository, its store or its keys.
    #[error(transparent)]
    Repository(holdfast_repo::Error),
    /// An image.
    #[error(transparent)]
    Image(#[from] holdfast_image::Error),
    /// A machine archive, or a packed stream.
    #[error(transparent)]
    Archive(holdfast_archive::Error),
    /// A machine configuration cannot be read or converted.
    #[error(transparent)]
    Hardware(#[from] holdfast_hardware::Error),
    /// An import or an export.
    #[error(transparent)]
    Exchange(Box<crate::ExchangeError>),
    /// A backup of a machine of XenServer or XCP-ng.
    #[error(transparent)]
    Xen(Box<crate::XenBackupError>),
    /// A container.
    #[error(transparent)]
    Container(Box<crate::ContainerError>),
    /// Files inside the guests' file systems.
    #[error(transparent)]
    GuestFiles(Box<crate::GuestFilesError>),
    /// The content of a container.
    #[error(transparent)]
    ContainerContent(Box<crate::ContainerContentError>),
    /// A template.
    #[error(transparent)]
    Template(Box<crate::TemplateError>),
    /// A disk, a file or a block device.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// A machine or disk cannot have this name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A name matches no snapshot, or more than one.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The job was interrupted.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// This kind of location cannot hold a repository.
    #[error("{location}: repositories of the kind \"{scheme}:\" are not supported, only directories")]
    Scheme {
        /// The location as given.
        location: String,
        /// The text before the colon.
        scheme: String,
    },
    /// The directory for a new repository is not empty.
    #[error("{store} is not empty: it holds {stranger}")]
    NotEmpty {
        /// The store, as it describes itself.
        store: String,
        /// The first entry in it that does not belong to a repository.
        stranger: String,
    },
    /// A new password is easy to guess.
    #[error("the password is too weak: {reason}")]
    WeakPassword {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The repository was opened with a paper key, so there is no key slot to replace.
    #[error("the repository was opened with its paper key: no key slot was used that could be replaced")]
    NoSlotUsed,
    /// No machine name can be derived from what is backed up.
    #[error("the machine needs a name")]
    NoMachineName,
    /// Two disks of one snapshot have the same name.
    #[error("two disks are called {name:?}")]
    DuplicateDisk {
        /// The name.
        name: String,
    },
    /// An image cannot be cloned.
    #[error(transparent)]
    Clone(#[from] CloneError),
    /// A stream is longer than the declared size of the disk.
    #[error("the stream has more than the {size_bytes} bytes of the disk")]
    StreamLonger {
        /// Declared size of the disk in bytes.
        size_bytes: u64,
    },
    /// Standard input was given twice.
    #[error("standard input can be only one of the disks")]
    StandardInputTwice,
    /// The disk is too large for the image format.
    #[error("the disk of {size_bytes} bytes does not become a {format} image: {detail}")]
    DiskDoesNotFit {
        /// Its size.
        size_bytes: u64,
        /// The format.
        format: String,
        /// The limit of the format.
        detail: String,
    },
    /// A disk that was raw now looks like an image of another format, which its guest may have written.
    #[error(
        "{} was backed up as {before} and now looks like {now}: its guest may have written that to have other files read",
        path.display()
    )]
    FormatChanged {
        /// The image.
        path: PathBuf,
        /// The format in the previous snapshot.
        before: String,
        /// The format detected now.
        now: String,
    },
    /// A name does not select a snapshot to remove or unprotect.
    #[error(transparent)]
    Choice(#[from] SnapshotChoiceError),
    /// The name is in use for another machine.
    #[error(transparent)]
    NameTaken(#[from] NameTaken),
    /// Another repository was found at a known location.
    #[error(transparent)]
    Exchanged(#[from] Exchanged),
    /// Only one disk can be compared with an image.
    #[error("an image is compared with the disk of one snapshot")]
    CompareOne,
    /// The target exists, and would be overwritten.
    #[error("{} exists", path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },
    /// The target is a block device, and overwriting it was not requested.
    #[error("{} is a block device: what is on it would be lost", path.display())]
    DeviceExists {
        /// The target.
        path: PathBuf,
    },
    /// A block device cannot hold an image of a format that consists of several files.
    #[error("{} is a block device, which holds a raw disk, not a {format} image", path.display())]
    DeviceFormat {
        /// The target.
        path: PathBuf,
        /// The requested format.
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
    /// Another process serves the overlay with the writes to a disk of a snapshot.
    #[error("{} is in use: it is served already", path.display())]
    OverlayInUse {
        /// The file.
        path: PathBuf,
    },
    /// What is to be served cannot be served.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// Another process writes to a device that is the target of a restore.
    #[error("{} is in use: process {process} ({program}) has it open for writing", path.display())]
    DeviceInUse {
        /// The device.
        path: PathBuf,
        /// The process id.
        process: u32,
        /// Its program.
        program: String,
    },
    /// The target to change in place does not exist.
    #[error("{} does not exist, so nothing can be restored in place", path.display())]
    NoTarget {
        /// The target.
        path: PathBuf,
    },
    /// The image to change in place is damaged.
    #[error("{} cannot be restored in place: {source}", path.display())]
    TargetDamaged {
        /// The target.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<holdfast_image::Error>,
    },
    /// The name of the target stands for a format, but its content is not an image of any format.
    #[error("{} has the name of a {format} image, but its content is not one", path.display())]
    TargetNotAnImage {
        /// The target.
        path: PathBuf,
        /// The format that its name stands for.
        format: Format,
    },
    /// The format of the target cannot be written.
    #[error("{}: {format} images cannot be written there", path.display())]
    TargetFormat {
        /// The target.
        path: PathBuf,
        /// Its format.
        format: String,
    },
    /// The target holds one disk, but several are to be written.
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
    /// Something exists at the path of the external data file of a new image.
    #[error("the data file {} exists", path.display())]
    DataFileExists {
        /// The data file.
        path: PathBuf,
    },
    /// A new image would replace a file that it is created from.
    #[error("{} is part of what is read", path.display())]
    TargetIsSource {
        /// The target.
        path: PathBuf,
    },
    /// A new image has neither a size nor a backing file to take the size from.
    #[error("the size of the new disk is missing")]
    NoSize,
    /// Data reads back differently from what was written.
    #[error("{} was written wrong: {different_bytes} bytes differ, the first at offset {offset}", path.display())]
    WrittenWrong {
        /// The new image.
        path: PathBuf,
        /// The first byte that differs.
        offset: u64,
        /// How many bytes differ.
        different_bytes: u64,
    },
    /// A file or device could not be read or written.
    #[error("{}", path.display())]
    Medium {
        /// Which one.
        path: PathBuf,
        /// The operation, the offset, and the operating system's reason.
        source: holdfast_block::Error,
    },
    /// A file could not be read, written, renamed or removed.
    #[error("{action} {}", path.display())]
    File {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// An error of a hypervisor or of a machine.
    #[error(transparent)]
    Host(Box<holdfast_host::Error>),
    /// Another policy run is active on this host.
    #[error("another run of a policy is in progress: it has locked {}", .lock.display())]
    PolicyBusy {
        /// The lock file that it holds.
        lock: PathBuf,
    },
    /// Another scheduler is active in the same folder.
    #[error("another holdfast daemon is running: it has locked {}", .lock.display())]
    DaemonBusy {
        /// The lock file that it holds.
        lock: PathBuf,
    },
    /// A provider of host snapshots failed.
    #[error(transparent)]
    Provider(Box<ProviderError>),
    /// The machine does not have these disks.
    #[error("the machine {machine} has no disk {}; it has {}", disks.join(", "), present.join(", "))]
    NoSuchDisk {
        /// The machine.
        machine: String,
        /// The requested disks.
        disks: Vec<String>,
        /// The disks that it has.
        present: Vec<String>,
    },
    /// The machine is in transition: neither running nor paused nor shut off.
    #[error("the machine {machine} is on its way from one state to another")]
    MachineBetween {
        /// The machine.
        machine: String,
    },
    /// A disk of a machine that is shut off cannot be read from this host.
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
    /// A running machine cannot be read in the requested way, or in any way that keeps it running.
    #[error("the disks of {machine} cannot be read while it runs: {reason}")]
    NoMethod {
        /// The machine.
        machine: String,
        /// Why, for each way.
        reason: String,
    },
    /// The disk is not an image file.
    #[error("disk {disk} is not on an image file, but on {place}")]
    NoImageFile {
        /// The disk.
        disk: String,
        /// Where it is.
        place: String,
    },
    /// The watchdog process of the machine does not start, or has ended: no machine is paused without it.
    #[error("the watchdog does not answer; without it, no machine is paused")]
    NoWatchdog {
        /// The operating system's reason, if known.
        source: Option<std::io::Error>,
    },
    /// A hook of the administrator failed, and the backup depends on it.
    #[error("the hook {} fails at {event}: {reason}", program.display())]
    Hook {
        /// The program.
        program: PathBuf,
        /// The event that it was called for.
        event: &'static str,
        /// How it ended.
        reason: String,
    },
    /// The scratch files with blocks that the guest has overwritten became too large.
    #[error("the copy of {machine} was cancelled because of the scratch files in {}, which keep the data that the guest overwrites: {why}", scratch.display())]
    ScratchLimit {
        /// The machine.
        machine: String,
        /// The folder.
        scratch: PathBuf,
        /// The limit that was exceeded.
        why: crate::ScratchOverrun,
    },
    /// The guest cannot be frozen although this was required.
    #[error("the file systems of {machine} cannot be frozen")]
    NotQuiesced {
        /// The machine.
        machine: String,
        /// Why; none if it has no guest agent.
        source: Option<Box<holdfast_host::Error>>,
    },
    /// The restore of a machine is refused: nothing was written.
    #[error(transparent)]
    MachineRestore(#[from] Refusal),
    /// An error of an instant restore.
    #[error(transparent)]
    Instant(#[from] InstantError),
    /// A server does not start.
    #[error(transparent)]
    Serve(holdfast_serve::Error),
    /// Snapshots cannot be mounted or unmounted.
    #[error(transparent)]
    FuseMount(#[from] holdfast_host::fuse_mount::FuseMountError),
    /// QEMU does not serve the frozen disks.
    #[error("QEMU does not serve the frozen disks of {machine}")]
    Frozen {
        /// The machine.
        machine: String,
        /// Why.
        source: Box<holdfast_serve::nbd::client::Error>,
    },
    /// All disks of the machine are excluded.
    #[error("all disks of {machine} are excluded: a snapshot needs at least one disk")]
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
    /// The frozen copy of a disk failed while it was read.
    #[error("the frozen copy of disk {disk} of {machine} broke: what the guest overwrote did not fit into {}, or was not saved in time", scratch.display())]
    FrozenBroken {
        /// The machine.
        machine: String,
        /// The disk.
        disk: String,
        /// The folder with the scratch files.
        scratch: PathBuf,
        /// The error of the read.
        source: Box<holdfast_block::Error>,
    },
    /// The memory of the machine cannot be stored.
    #[error("the memory of {machine} cannot be kept; it goes by way of {}", folder.display())]
    MemoryNotKept {
        /// The machine.
        machine: String,
        /// The folder with the scratch files.
        folder: PathBuf,
        /// Why.
        source: Box<holdfast_host::qemu::memory::MemoryStreamError>,
    },
    /// The memory state in a snapshot is invalid.
    #[error("the state of the memory of {machine} in the snapshot")]
    MemoryState {
        /// The machine.
        machine: String,
        /// What is wrong.
        source: holdfast_host::qemu::memory::StateError,
    },
    /// The memory of the machine was not received.
    #[error("the memory of {machine} was sent only in part")]
    MemoryNotSent {
        /// The machine.
        machine: String,
        /// Why.
        source: Box<holdfast_host::qemu::memory::MemoryStreamError>,
    },
    /// QEMU does not send the memory again of a machine that has been paused since the memory was sent.
    #[error("QEMU sent the memory of {machine} before, and sends it again only after the machine has run")]
    MemorySentBefore {
        /// The machine.
        machine: String,
    },
    /// A stream between two hosts failed.
    #[error("the stream was interrupted")]
    Stream(#[source] std::io::Error),
    /// A request of a program on another host cannot be fulfilled.
    #[error("{reason}")]
    Peer {
        /** Why. */
        reason: String,
    },
    /// Standard output could not be written.
    #[error("write to standard output")]
    Stdout(#[source] std::io::Error),
}
