//! Errors of VirtualBox machines.

use std::path::PathBuf;

/// Why a VirtualBox machine cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VirtualBoxError {
    /// The user has no VirtualBox machines on this host.
    #[error("VirtualBox has no machines of this user: there is no {}", registry.display())]
    NoRegistry {
        /// The missing file that lists the machines.
        registry: PathBuf,
    },
    /// Several machines have this name.
    #[error("{} machines are called {name:?}: {}", uuids.len(), uuids.join(", "))]
    Ambiguous {
        /// The name.
        name: String,
        /// Their UUIDs.
        uuids: Vec<String>,
    },
    /// A file of VirtualBox is invalid.
    #[error("{}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: holdfast_hardware::Error,
    },
    /// The machine is running, and there is no VBoxManage to take a snapshot of it.
    #[error(
        "{machine} is in use by process {process} ({program}), and VBoxManage, which could take a snapshot of it, {why_not}"
    )]
    InUse {
        /// The machine.
        machine: String,
        /// The process id.
        process: u32,
        /// Its program.
        program: String,
        /// Why no snapshot can be taken.
        why_not: &'static str,
    },
    /// The machine was started, or its images were written, while they were read.
    #[error("{machine} changed while it was read: {detail}; nothing was kept")]
    Changed {
        /// The machine.
        machine: String,
        /// What changed.
        detail: String,
    },
    /// The settings attach an image that they do not list.
    #[error("disk {disk} is the image {uuid}, and nothing says where that is")]
    UnknownImage {
        /// The disk.
        disk: String,
        /// The UUID of the image.
        uuid: String,
    },
    /// Two images have the same UUID.
    #[error("the settings have two images with the UUID {uuid}: {} and {}", first, second)]
    SameUuid {
        /// The UUID.
        uuid: String,
        /// Path of the first image.
        first: String,
        /// Path of the second image.
        second: String,
    },
    /// A file that the settings name is outside the folder of the machine.
    #[error("{} is not in the machine's own folder {}", file.display(), folder.display())]
    Outside {
        /// The file.
        file: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// A process of root does not read settings of another user.
    #[error("{} belongs to user {user}, and names files that root would open", path.display())]
    OtherUser {
        /// The settings, or the list of machines.
        path: PathBuf,
        /// The user id.
        user: u32,
    },
    /// The image is encrypted by VirtualBox.
    #[error("disk {disk}: {location} is encrypted by VirtualBox")]
    Encrypted {
        /// The disk.
        disk: String,
        /// The image.
        location: String,
    },
    /// The format of the image cannot be read.
    #[error("disk {disk}: {location} is of the format {format:?}, which is not read")]
    Format {
        /// The disk.
        disk: String,
        /// The image.
        location: String,
        /// Its format.
        format: String,
    },
    /// The file is not the image that the settings name.
    #[error("disk {disk}: {} is not the image that VirtualBox knows: {detail}", file.display())]
    OtherImage {
        /// The disk.
        disk: String,
        /// The file.
        file: PathBuf,
        /// How they differ.
        detail: String,
    },
    /// The machine is neither running nor off.
    #[error("VirtualBox says that {machine} is in the state {word:?}, in which it cannot be read")]
    State {
        /// The machine.
        machine: String,
        /// Its state, in VirtualBox's own word.
        word: String,
    },
    /// The snapshot does not preserve any disk of the machine.
    #[error("{machine} runs, and a snapshot of it keeps none of its disks as they were")]
    NoInstant {
        /// The machine.
        machine: String,
    },
    /// `VBoxManage` is required but missing.
    #[error("there is no VBoxManage on this host, and {what} needs it")]
    NoManager {
        /// The operation that requires it.
        what: &'static str,
    },
}
