//! The arguments of `container mount`, which its servers get too.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use holdfast_engine::{ContainerMountRequest, ContainerPlace, DiskTransport, MountedDisk, RelocatedUse};
use holdfast_host::fuse_mount::MountReaders;

use super::ContainerArg;
use crate::args::MountOptionArgs;
use crate::context::Context;
use crate::errors::Error;

/// Arguments of `container mount`.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct MountContainerArgs {
    #[command(flatten)]
    pub(super) container: ContainerArg,
    /// An empty folder
    #[arg(value_name = "FOLDER")]
    pub(super) folder: PathBuf,
    /// Mount a snapshot, read-only, beside the container
    #[arg(long, value_name = "SNAPSHOT")]
    pub(super) snapshot: Option<String>,
    /// Show the disk as a raw file instead of mounting its file system; needs no root
    #[arg(long)]
    pub(super) disk: bool,
    /// What makes a block device of the disk
    #[arg(long, value_name = "WHAT", value_enum, default_value_t, conflicts_with_all = ["disk", "snapshot"])]
    pub(super) through: TransportArg,
    /// Mount a container that was migrated to another host, as it was before; it must not be used there any more
    #[arg(long, conflicts_with_all = ["disk", "snapshot"])]
    pub(super) take_back: bool,
    #[command(flatten)]
    pub(super) options: MountOptionArgs,
}

/// What makes a block device of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(super) enum TransportArg {
    /// A file of FUSE, and a loop device
    #[default]
    Fuse,
    /// The NBD client of the kernel
    Nbd,
}

impl TransportArg {
    pub(super) fn of(transport: DiskTransport) -> Self {
        match transport {
            DiskTransport::Fuse => Self::Fuse,
            DiskTransport::Nbd => Self::Nbd,
        }
    }

    pub(super) fn transport(self) -> DiskTransport {
        match self {
            Self::Fuse => DiskTransport::Fuse,
            Self::Nbd => DiskTransport::Nbd,
        }
    }

    /// The words that pass it on to another process.
    pub(super) fn words(self) -> &'static [&'static str] {
        match self {
            Self::Fuse => &[],
            Self::Nbd => &["--through", "nbd"],
        }
    }
}

impl MountContainerArgs {
    pub(super) fn mounted_disk(&self) -> MountedDisk {
        if self.disk {
            MountedDisk::File
        } else {
            MountedDisk::FileSystem
        }
    }

    pub(super) fn request(&self, folder: &Path, context: &Context) -> Result<ContainerMountRequest, Error> {
        Ok(ContainerMountRequest {
            place: self.container.place(context)?,
            folder: folder.to_owned(),
            disk: self.mounted_disk(),
            transport: self.through.transport(),
            readers: self.readers(),
            relocated: if self.take_back {
                RelocatedUse::TakeBack
            } else {
                RelocatedUse::Refuse
            },
        })
    }

    pub(super) fn readers(&self) -> MountReaders {
        if self.options.allow_other {
            MountReaders::Everyone
        } else {
            MountReaders::Owner
        }
    }

    pub(super) fn server_words(&self, place: &ContainerPlace, folder: &Path) -> Vec<OsString> {
        let verb = match self.snapshot {
            Some(_) => "snapshot-server",
            None => "mount-server",
        };
        let mut words = server_words(verb, place, folder);
        if let Some(snapshot) = &self.snapshot {
            words.extend(["--snapshot".into(), snapshot.into()]);
        }
        if self.disk {
            words.push("--disk".into());
        }
        words.extend(self.through.words().iter().map(OsString::from));
        if self.take_back {
            words.push("--take-back".into());
        }
        if self.options.allow_other {
            words.push("--allow-other".into());
        }
        words
    }
}

/// The words that start a server of a container.
pub(super) fn server_words(verb: &str, place: &ContainerPlace, folder: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["container".into(), verb.into()];
    words.extend([place.folder.clone().into(), folder.into()]);
    words
}
