//! What is pulled, and to where.

use super::label::TemplateReference;
use super::trust::Unsigned;
use crate::files::block_target::Overwrite;
use crate::repository::forget::Execution;
use holdfast_image::{Format, Storage};
use std::path::PathBuf;

/// Whether the machine becomes another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepIdentity {
    /// It gets a name, a UUID and network addresses of its own.
    No,
    /// It is the one that was pushed.
    Yes,
}

/// Where a template goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullTarget {
    /// An image, or a block device: of a template with one disk.
    Image {
        /// Where.
        path: PathBuf,
        /// Its format.
        format: Format,
        /// What to do about what is there.
        overwrite: Overwrite,
    },
    /// A new folder: images, and the configuration of libvirt where there is one.
    Folder {
        /// Where.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// What the machine is to be called; like the folder where not given.
        name: Option<String>,
        /// Whether it becomes another one.
        identity: KeepIdentity,
    },
    /// The first of the two where there is one disk and no configuration, or else the second.
    Fitting {
        /// Where.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// Whether the machine becomes another one.
        identity: KeepIdentity,
    },
}

/// What happens to a guest's own identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateGuest {
    /// It stays as it was pushed.
    Keep,
    /// It is made anew, by the `virt-sysprep` that is there; not on a block device.
    Renew(PathBuf),
}

/// What to pull.
#[derive(Debug, Clone)]
pub struct PullRequest {
    /// The template.
    pub template: TemplateReference,
    /// Where to.
    pub target: PullTarget,
    /// What happens to an unsigned one.
    pub unsigned: Unsigned,
    /// Whether clusters are compressed.
    pub storage: Storage,
    /// When the images are made, in seconds since 1970; a VHD says it.
    pub created_s: u64,
    /// Whether anything is written. A plan does not read the disks.
    pub execution: Execution,
    /// Whether the guest gets an identity of its own, and the name of its machine, or of the image.
    pub guest: TemplateGuest,
}

/// A disk that was pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledDisk {
    /// Its name in the template.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size_bytes: u64,
}
