//! What to pull, and to which target.

use super::label::TemplateReference;
use super::trust::Unsigned;
use crate::files::block_target::Overwrite;
use crate::repository::forget::Execution;
use holdfast_image::{Format, Storage};
use std::path::PathBuf;

/// Whether the machine keeps its identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepIdentity {
    /// It gets a new name, a new UUID and new network addresses.
    No,
    /// It keeps those of the pushed machine.
    Yes,
}

/// The target of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullTarget {
    /// An image or a block device, for a template with one disk.
    Image {
        /// Its path.
        path: PathBuf,
        /// Its format.
        format: Format,
        /// What to do if it exists.
        overwrite: Overwrite,
    },
    /// A new folder: images, and a libvirt configuration if the template has one.
    Folder {
        /// Its path.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// Name of the machine; the name of the folder if not given.
        name: Option<String>,
        /// Whether the machine keeps its identity.
        identity: KeepIdentity,
    },
    /// An image for a template with one disk and no configuration, otherwise a folder.
    Fitting {
        /// Its path.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// Whether the machine keeps its identity.
        identity: KeepIdentity,
    },
}

/// What to do with the identity of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateGuest {
    /// It stays as it was pushed.
    Keep,
    /// It is renewed by the `virt-sysprep` at this path; not possible on a block device.
    Renew(PathBuf),
}

/// Parameters of a pull.
#[derive(Debug, Clone)]
pub struct PullRequest {
    /// The template.
    pub template: TemplateReference,
    /// The target.
    pub target: PullTarget,
    /// What to do with an unsigned template.
    pub unsigned: Unsigned,
    /// Whether clusters are compressed.
    pub storage: Storage,
    /// Time of creation of the images, in seconds since 1970, for formats that store it (VHD).
    pub created_s: u64,
    /// Whether anything is written. A plan does not read the disks.
    pub execution: Execution,
    /// Whether the guest gets a new identity, with the name of its machine or image.
    pub guest: TemplateGuest,
}

/// A pulled disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledDisk {
    /// Its name in the template.
    pub name: String,
    /// Its path.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size_bytes: u64,
}
