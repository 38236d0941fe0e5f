//! What can be wrong with a machine of VirtualBox.

use std::path::PathBuf;

/// Why a machine of VirtualBox cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VirtualBoxError {
    /// VirtualBox has nothing here that belongs to the user.
    #[error("VirtualBox has no machines of this user: there is no {}", registry.display())]
    NoRegistry {
        /// The file that would list them.
        registry: PathBuf,
    },
    /// Several machines could be meant.
    #[error("{} machines are called {name:?}: {}", uuids.len(), uuids.join(", "))]
    Ambiguous {
        /// The name.
        name: String,
        /// Their UUIDs.
        uuids: Vec<String>,
    },
    /// A file of VirtualBox makes no sense.
    #[error("{}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: holdfast_hardware::Error,
    },
    /// It runs, and there is no VBoxManage that could take a snapshot of it.
    #[error(
        "{machine} is in use by process {process} ({program}), and VBoxManage, which could take a snapshot of it, {why_not}"
    )]
    InUse {
        /// The machine.
        machine: String,
        /// The process.
        process: u32,
        /// Its program.
        program: String,
        /// Why there is no snapshot.
        why_not: &'static str,
    },
    /// It was started, or its images were written, while they were read.
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
    /// Two images with one UUID.
    #[error("the settings have two images with the UUID {uuid}: {} and {}", first, second)]
    SameUuid {
        /// The UUID.
        uuid: String,
        /// Where one is.
        first: String,
        /// Where the other one is.
        second: String,
    },
    /// A file that the settings name lies elsewhere.
    #[error("{} is not in the machine's own folder {}", file.display(), folder.display())]
    Outside {
        /// The file.
        file: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// Root reads no settings of another user.
    #[error("{} belongs to user {user}, and names files that root would open", path.display())]
    OtherUser {
        /// The settings, or the list of machines.
        path: PathBuf,
        /// The user.
        user: u32,
    },
    /// VirtualBox has encrypted an image.
    #[error("disk {disk}: {location} is encrypted by VirtualBox")]
    Encrypted {
        /// The disk.
        disk: String,
        /// The image.
        location: String,
    },
    /// An image of a format that cannot be read.
    #[error("disk {disk}: {location} is of the format {format:?}, which is not read")]
    Format {
        /// The disk.
        disk: String,
        /// The image.
        location: String,
        /// Its format.
        format: String,
    },
    /// The file is another image than the settings say.
    #[error("disk {disk}: {} is not the image that VirtualBox knows: {detail}", file.display())]
    OtherImage {
        /// The disk.
        disk: String,
        /// The file.
        file: PathBuf,
        /// How they differ.
        detail: String,
    },
    /// A machine that neither runs nor is off.
    #[error("VirtualBox says that {machine} is in the state {word:?}, in which it cannot be read")]
    State {
        /// The machine.
        machine: String,
        /// Its state, in the word of VirtualBox.
        word: String,
    },
    /// A snapshot keeps none of its disks as they were.
    #[error("{machine} runs, and a snapshot of it keeps none of its disks as they were")]
    NoInstant {
        /// The machine.
        machine: String,
    },
    /// `VBoxManage` is wanted, and not there.
    #[error("there is no VBoxManage on this host, and {what} needs it")]
    NoManager {
        /// What was wanted.
        what: &'static str,
    },
}
