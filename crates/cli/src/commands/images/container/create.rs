//! `holdfast container create`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use holdfast_engine::{
    ContainerPlace, ContentSource, CreateContainerRequest, FileSystemKind, FillReport, ImageChoice, Job, MountedDisk,
    TarInput, TemplateContainer, check_create, check_source, create_container, fill_root, is_image_archive,
};
use holdfast_image::Format;
use serde::Serialize;

use super::container_tools;
use super::mount_args::server_words;
use super::template_source::{TemplateContainerPlan, TemplateSourceArgs};
use crate::args::Example;
use crate::commands::images::template::SignedDocument;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::started;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `container create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateContainerArgs {
    /// The folder to create
    #[arg(value_name = "CONTAINER")]
    container: PathBuf,
    /// Size of the disk (20G); its files grow as it is written [default: that of the template]
    #[arg(value_name = "SIZE", value_parser = units::parse_disk_bytes, required_unless_present = "template")]
    size: Option<u64>,
    /// The file system of the disk
    #[arg(long, value_name = "KIND", value_enum, default_value_t = FileSystemArg::Ext4)]
    filesystem: FileSystemArg,
    /// The format of the layers: qcow2, or parallels for disks that ploop and Virtuozzo can use
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LayerFormatArg::Qcow2)]
    format: LayerFormatArg,
    /// Fill it from a folder, a tar archive (- is standard input), an OCI image layout, or an archive of docker save
    #[arg(long, value_name = "SOURCE")]
    from: Option<PathBuf>,
    /// The image in the layout, by its tag [default: the only one]
    #[arg(long, value_name = "TAG", requires = "from")]
    image: Option<String>,
    #[command(flatten)]
    source: TemplateSourceArgs,
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
            wish: "Create a container from an image that skopeo has copied to an OCI layout",
            line: "holdfast container create /srv/web1 20G --from /var/lib/images/nginx --image stable",
        },
        Example {
            wish: "Create a container from a tar archive",
            line: "holdfast container create /srv/web1 20G --from rootfs.tar.zst",
        },
        Example {
            wish: "Create a container from a template",
            line: "holdfast container create -r /srv/templates /srv/web1 --template debian12",
        },
        Example {
            wish: "Create a disk that the tools of Virtuozzo can use",
            line: "holdfast container create /vz/private/101/root.hdd 20G --format parallels",
        },
    ];
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
            size_bytes: self.size.unwrap_or_default(),
            format: format.name(),
            filesystem: self.filesystem.kind().map(FileSystemKind::name),
            file_count: None,
            template: None,
            signer: None,
            signed: None,
        };
        self.source.check()?;
        if let Some(template) = &self.source.template {
            let plan = TemplateContainerPlan {
                template,
                folder: &folder,
                size_bytes: self.size,
                format,
                dry_run: self.dry_run,
            };
            let made = self.source.create(&plan, context)?;
            return context.report(&created.with_template(&made));
        }
        self.check_options()?;
        let tools = container_tools(context);
        let request = CreateContainerRequest {
            folder: folder.clone(),
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
        if self.dry_run {
            check_create(&request)?;
            if let Some(from) = &self.from {
                context.work(1, |job| check_source(self.source(from, job)?, job))?;
            }
            return context.report(&created);
        }
        let _noted = crate::machines::runs::note_places([folder.as_path()], context);
        let file_count = self.create(&request, context)?;
        context.report(&ContainerCreated { file_count, ..created })
    }
}

impl CreateContainerArgs {
    fn check_options(&self) -> Result<(), Error> {
        let Some(from) = &self.from else {
            return Ok(());
        };
        if self.image.is_some() && from == Path::new("-") {
            return Err(Error::usage(
                "an image cannot be read from standard input",
                "save the archive in a file, and name it with --from FILE",
            ));
        }
        if self.filesystem == FileSystemArg::None {
            return Err(Error::usage(
                "--from needs a file system",
                "remove --filesystem none, or --from",
            ));
        }
        if rustix::process::geteuid().is_root() {
            return Ok(());
        }
        Err(Error::refused(
            Kind::Permission,
            "only root can fill a container",
            "run it as root, or create the container without --from",
        ))
    }

    /// Creates the container, and returns the number of files that it was filled with.
    fn create(&self, request: &CreateContainerRequest<'_>, context: &Context) -> Result<Option<u64>, Error> {
        let Some(from) = &self.from else {
            context.work(1, |job| create_container(request, None, job))?;
            return Ok(None);
        };
        let mut filled = None;
        context.work(1, |job| {
            let mut fill = |root: &Path| {
                let report = fill_root(root, self.source(from, job)?, job)?;
                let facts = facts_of(from, &report);
                filled = Some(report);
                Ok(facts)
            };
            create_container(request, Some(&mut fill), job)
        })?;
        let Some(report) = filled else { return Ok(None) };
        for loss in &report.losses {
            context.console().warning(&format!("{}: {}", loss.path, loss.reason));
        }
        let unlisted = report.loss_count - report.losses.len() as u64;
        if unlisted > 0 {
            context
                .console()
                .warning(&format!("{unlisted} more were not carried over"));
        }
        Ok(Some(report.counts.file_count))
    }

    fn source(&self, from: &Path, job: Job<'_>) -> Result<ContentSource, holdfast_engine::Error> {
        if from == Path::new("-") {
            return Ok(ContentSource::Tar(TarInput::Stream(Box::new(std::io::stdin()))));
        }
        let is_folder = from.is_dir();
        let is_image = self.image.is_some()
            || if is_folder {
                from.join("oci-layout").is_file()
            } else {
                is_image_archive(from, job)?
            };
        Ok(if is_image {
            ContentSource::Image {
                layout: from.to_owned(),
                choice: ImageChoice {
                    reference: self.image.clone(),
                    ..ImageChoice::default()
                },
            }
        } else if is_folder {
            ContentSource::Directory(from.to_owned())
        } else {
            ContentSource::Tar(TarInput::File(from.to_owned()))
        })
    }
}

/// What a container records of its source.
fn facts_of(from: &Path, report: &FillReport) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([("source".to_owned(), from.display().to_string())]);
    if let Some(image) = &report.image {
        let document = serde_json::json!({
            "reference": image.reference,
            "digest": image.digest,
            "platform": image.platform,
            "environment": image.environment,
            "entrypoint": image.entrypoint,
            "command": image.command,
            "user": image.user,
            "working_directory": image.working_directory,
            "exposed_ports": image.exposed_ports,
            "volumes": image.volumes,
            "stop_signal": image.stop_signal,
            "labels": image.labels,
        });
        facts.insert("oci.config".to_owned(), document.to_string());
    }
    facts
}

/// Report of `container create`.
#[derive(Debug, Serialize)]
struct ContainerCreated {
    dry_run: bool,
    container: String,
    size_bytes: u64,
    format: &'static str,
    filesystem: Option<&'static str>,
    /// Files that it was filled with.
    file_count: Option<u64>,
    /// The template of its disk, with the digest of the content.
    template: Option<String>,
    /// The signer of the template.
    signer: Option<String>,
    #[serde(skip)]
    signed: Option<SignedDocument>,
}

impl ContainerCreated {
    fn with_template(self, made: &TemplateContainer) -> Self {
        let signed = SignedDocument::new(&made.signed);
        let statement = &made.statement;
        Self {
            size_bytes: made.size_bytes,
            filesystem: made.file_system.map(FileSystemKind::name),
            template: Some(format!("{}@{}", statement.label, statement.content().short())),
            signer: signed.signer.clone(),
            signed: Some(signed),
            ..self
        }
    }
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
        if let (Some(template), Some(signed)) = (&self.template, &self.signed) {
            let copied = if self.dry_run { "to be copied" } else { "copied" };
            page.styled(
                signed.style(),
                &format!("{copied} from the template {template}, {}", signed.full()),
            );
        }
        if let Some(count) = self.file_count {
            page.line(&format!("filled with {}", units::counted(count, "file", "files")));
        }
    }
}
