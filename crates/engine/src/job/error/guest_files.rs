//! Errors of files inside the guests' file systems.

/// Why files of a guest cannot be found or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestFilesError {
    /// No volume has this name.
    #[error("there is no volume {name}; the snapshot has {}", present.join(", "))]
    NoVolume {
        /// The name.
        name: String,
        /// All volumes.
        present: Vec<String>,
    },
    /// Several volumes have this name or this path.
    #[error("{what} is in several volumes: {}", candidates.join(", "))]
    Ambiguous {
        /// The volume's name or the path.
        what: String,
        /// The volumes, as they can be named.
        candidates: Vec<String>,
    },
    /// The volume holds something that has no reader.
    #[error("volume {volume} holds {content}, which cannot be read directly")]
    NoReader {
        /// The volume.
        volume: String,
        /// What it holds.
        content: String,
    },
    /// The bytes of a volume cannot be read.
    #[error("volume {volume} cannot be read: it is {reason}")]
    Unreadable {
        /// The volume.
        volume: String,
        /// Why.
        reason: String,
    },
    /// No volume that can be read has this path.
    #[error("no volume has {path}{}", of_unread(unread))]
    NoSuchPath {
        /// The path.
        path: String,
        /// Volumes that could not be searched, with the reason.
        unread: Vec<String>,
    },
    /// A path of a file or a directory is needed.
    #[error("the path of a file or a directory is missing")]
    NoPath,
    /// The file system, or a file in it, cannot be read.
    #[error("{}", if path.is_empty() { volume.clone() } else { format!("{volume}:{path}") })]
    Read {
        /// The volume.
        volume: String,
        /// The path; empty if the file system cannot be opened.
        path: String,
        /// The reason.
        source: holdfast_guest_files::Error,
    },
    /// The appliance cannot be made or started.
    #[error(transparent)]
    Appliance(holdfast_appliance::ApplianceError),
    /// A volume needs the appliance, which cannot be used.
    #[error("volume {volume} is read by an appliance only ({reason}), and that cannot be used")]
    NeedsAppliance {
        /// The volume.
        volume: String,
        /// Why a process cannot read it.
        reason: String,
        /// Why there is no appliance.
        source: Box<GuestFilesError>,
    },
    /// The snapshot has more disks than an appliance can have.
    #[error("the snapshot has more than {limit} disks, which is the most that an appliance can have")]
    TooManyDisks {
        /// The bound.
        limit: usize,
    },
    /// There is no passphrase of an encrypted volume.
    #[error("there is no passphrase of the encrypted volume: {reason}")]
    Passphrase {
        /// Why.
        reason: String,
    },
}

fn of_unread(unread: &[String]) -> String {
    if unread.is_empty() {
        String::new()
    } else {
        format!(" (not searched: {})", unread.join(", "))
    }
}
