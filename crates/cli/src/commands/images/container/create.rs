//! `holdfast container create`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use holdfast_engine::{
    ContainerError, ContainerPlace, CreateContainerRequest, FileSystemKind, MountedDisk, create_container,
};
use holdfast_image::Format;
use serde::Serialize;

use super::mount_args::server_words;
use super::{container_tools, started};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `container create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateContainerArgs {
    /// The folder to create
    #[arg(value_name = "CONTAINER")]
    container: PathBuf,
    /// Size of the disk (20G); its files grow as it is written
    #[arg(value_name = "SIZE", value_parser = units::parse_bytes)]
    size: u64,
    /// The file system of the disk
    #[arg(long, value_name = "KIND", value_enum, default_value_t = FileSystemArg::Ext4)]
    filesystem: FileSystemArg,
    /// The format of the layers: qcow2, or parallels for disks that ploop and Virtuozzo can use
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LayerFormatArg::Qcow2)]
    format: LayerFormatArg,
    /// Check everything, and show what would be made; make nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FileSystemArg {
    Ext4,
    Xfs,
    Btrfs,
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LayerFormatArg {
    Qcow2,
    Parallels,
}

impl FileSystemArg {
    fn kind(self) -> Option<FileSystemKind> {
        match self {
            Self::Ext4 => Some(FileSystemKind::Ext4),
            Self::Xfs => Some(FileSystemKind::Xfs),
            Self::Btrfs => Some(FileSystemKind::Btrfs),
            Self::None => None,
        }
    }
}

impl Verb for CreateContainerArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Create a container of 20 GiB with an ext4",
            line: "holdfast container create /srv/web1 20G",
        },
        Example {
            wish: "Create a disk that the tools of Virtuozzo can use",
            line: "holdfast container create /vz/private/101/root.hdd 20G --format parallels",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let folder = std::path::absolute(&self.container).map_err(|source| Error::File {
            action: "look at",
            path: self.container.clone(),
            source,
        })?;
        let format = match self.format {
            LayerFormatArg::Qcow2 => Format::Qcow2,
            LayerFormatArg::Parallels => Format::Parallels,
        };
        let created = ContainerCreated {
            dry_run: self.dry_run,
            container: folder.display().to_string(),
            size_bytes: self.size.next_multiple_of(512),
            format: format.name(),
            filesystem: self.filesystem.kind().map(FileSystemKind::name),
        };
        if self.dry_run {
            if folder.symlink_metadata().is_ok() {
                return Err(holdfast_engine::Error::from(ContainerError::Exists { folder }).into());
            }
            return context.report(&created);
        }
        let tools = container_tools(context);
        let request = CreateContainerRequest {
            folder,
            size_bytes: created.size_bytes,
            format,
            file_system: self.filesystem.kind(),
            properties: BTreeMap::new(),
            runtime: context.runtime_folder(),
            tools: &tools,
            mount: &|place: &ContainerPlace, folder: &Path, disk: MountedDisk| {
                let mut words = server_words("mount-server", place, folder);
                if disk == MountedDisk::File {
                    words.push("--disk".into());
                }
                started(context.serve_in_background(words, folder, None))
            },
        };
        context.work(1, |job| create_container(&request, None, job))?;
        context.report(&created)
    }
}

/// Report of `container create`.
#[derive(Debug, Serialize)]
struct ContainerCreated {
    dry_run: bool,
    container: String,
    size_bytes: u64,
    format: &'static str,
    filesystem: Option<&'static str>,
}

impl Report for ContainerCreated {
    fn command(&self) -> &'static str {
        "container create"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let would = if self.dry_run { "would create " } else { "" };
        page.line(&format!(
            "{would}{}  {} disk of {} layers, {}",
            self.container,
            units::bytes(self.size_bytes),
            self.format,
            self.filesystem.unwrap_or("without a file system")
        ));
    }
}
