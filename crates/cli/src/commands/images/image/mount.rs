//! `holdfast image mount`: the disk of an image as a raw file.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use holdfast_engine::{ImageMount, ImageWorkerRequest, MountedImage, WritableImageMount, serve_writable_image};
use holdfast_host::HandedProcess;
use holdfast_image::Format;
use serde::Serialize;

use super::options::GateArgs;
use crate::args::{Example, MountOptionArgs, SharedOptions, parse_format};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::{empty_mount_point, leave_stderr, leave_terminal};
use crate::context::server_process::leave_group;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `image mount`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageMountArgs {
    /// The image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// An empty folder
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Format (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Allow writes to the disk; the image is locked until it is unmounted
    #[arg(long)]
    writable: bool,
    #[command(flatten)]
    gate: GateArgs,
    #[command(flatten)]
    options: MountOptionArgs,
}

/// Arguments of `image mount-worker`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageMountWorkerArgs {
    /// The image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Its format
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    gate: GateArgs,
    /// Number of workers that have ended
    #[arg(long, value_name = "COUNT", default_value = "0")]
    predecessors: u32,
    /// Detach from standard error when the file can be used
    #[arg(long)]
    background: bool,
}

/// Arguments of `image mount-server`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageMountServerArgs {
    #[command(flatten)]
    mount: ImageMountArgs,
}

impl Verb for ImageMountArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Show a virtual disk of VMware as a raw file",
            line: "holdfast image mount web1.vmdk /mnt",
        },
        Example {
            wish: "Change the disk of a machine that is shut off",
            line: "holdfast image mount --writable web1.qcow2 /mnt",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let folder = empty_mount_point(&self.folder)?;
        let opened = OpenedImage::open(self)?;
        if let OpenedImage::ReadOnly(image) = &opened {
            image.warn(&*context.progress())?;
        }
        let report = ImageMounted::new(self, &folder, &opened.content());
        if self.options.foreground {
            let mut printed = Ok(Exit::Ok);
            opened.serve(self, &folder, context, &mut || printed = context.report(&report))?;
            return Ok(printed?.with_warning_count(context.console().warnings().len()));
        }
        // The server locks the image.
        drop(opened);
        match context.serve_in_background(self.server_words(&folder, report.format)?, &folder, None)? {
            None => context.report(&report),
            Some(exit) => Ok(exit),
        }
    }
}

impl Verb for ImageMountServerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The command image mount starts it",
        line: "holdfast image mount-server /images/web1.vmdk /mnt",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        leave_group();
        let mut left = Ok(());
        let opened = OpenedImage::open(&self.mount)?;
        opened.serve(&self.mount, &self.mount.folder, context, &mut || {
            left = leave_terminal();
        })?;
        left?;
        Ok(Exit::Ok)
    }
}

impl Verb for ImageMountWorkerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The command image mount --writable starts it",
        line: "holdfast image mount-worker /images/web1.qcow2 --format qcow2",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        leave_group();
        let handed = |file: &dyn AsFd| file.as_fd().try_clone_to_owned().map_err(Error::Stdin);
        let request = ImageWorkerRequest {
            path: self.image.clone(),
            options: self.gate.open_options(self.format)?,
            predecessor_count: self.predecessors,
            device: handed(&std::io::stdin())?,
            log: handed(&std::io::stdout())?.into(),
            events: context.mount_events(),
        };
        let mut left = Ok(());
        let mut ready = || {
            if self.background {
                left = leave_stderr();
            }
        };
        context.work(1, |job| serve_writable_image(request, job, &mut ready))?;
        left?;
        Ok(Exit::Ok)
    }
}

impl ImageMountArgs {
    /// The words that open the image in another process. It does not detect the format again.
    fn image_words(&self, format: &str) -> Result<Vec<OsString>, Error> {
        let image = std::path::absolute(&self.image).map_err(|source| Error::File {
            action: "look at",
            path: self.image.clone(),
            source,
        })?;
        let mut words = vec![image.into(), "--format".into(), format.into()];
        words.extend(self.gate.words()?);
        Ok(words)
    }

    fn server_words(&self, folder: &Path, format: &str) -> Result<Vec<OsString>, Error> {
        let mut words: Vec<OsString> = vec!["image".into(), "mount-server".into()];
        words.extend(self.image_words(format)?);
        words.push(folder.into());
        if self.writable {
            words.push("--writable".into());
        }
        if self.options.allow_other {
            words.push("--allow-other".into());
        }
        Ok(words)
    }
}

/// An image that is ready to be mounted.
enum OpenedImage {
    ReadOnly(Box<ImageMount>),
    Writable(Box<WritableImageMount>),
}

impl OpenedImage {
    fn open(args: &ImageMountArgs) -> Result<Self, Error> {
        let options = args.gate.open_options(args.format)?;
        Ok(if args.writable {
            Self::Writable(Box::new(WritableImageMount::open(&args.image, &options)?))
        } else {
            Self::ReadOnly(Box::new(ImageMount::open(&args.image, &options)?))
        })
    }

    fn content(&self) -> MountedImage {
        match self {
            Self::ReadOnly(image) => image.content(),
            Self::Writable(image) => image.content().clone(),
        }
    }

    /// Serves the disk until it is unmounted.
    fn serve(
        &self,
        args: &ImageMountArgs,
        folder: &Path,
        context: &Context,
        ready: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        let place = context.mount_place(&args.image, folder, args.options);
        match self {
            Self::ReadOnly(image) => context.work(1, |job| image.serve(&place, job, ready)),
            Self::Writable(image) => {
                let program = std::env::current_exe().map_err(|source| Error::File {
                    action: "find",
                    path: "/proc/self/exe".into(),
                    source,
                })?;
                let words = args.image_words(image.content().format.name())?;
                let launch = |predecessor_count: u32, device: OwnedFd, log: OwnedFd| {
                    let mut all: Vec<OsString> = vec!["image".into(), "mount-worker".into()];
                    all.extend(words.iter().cloned());
                    all.extend(["--predecessors".into(), predecessor_count.to_string().into()]);
                    if !args.options.foreground {
                        all.push("--background".into());
                    }
                    HandedProcess::start(&program.clone().into(), &all, device, log)
                };
                context.work(1, |job| image.supervise(&place, &launch, job, ready))
            }
        }
    }
}

/// Report of `image mount`.
#[derive(Debug, Serialize)]
struct ImageMounted {
    image: String,
    is_writable: bool,
    format: &'static str,
    folder: String,
    /// The path of the file with the raw disk.
    file: String,
    size_bytes: u64,
}

impl ImageMounted {
    fn new(args: &ImageMountArgs, folder: &Path, content: &MountedImage) -> Self {
        Self {
            image: args.image.display().to_string(),
            is_writable: args.writable,
            format: content.format.name(),
            folder: folder.display().to_string(),
            file: folder.join(&content.file).display().to_string(),
            size_bytes: content.size_bytes,
        }
    }
}

impl Report for ImageMounted {
    fn command(&self) -> &'static str {
        "image mount"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!(
            "{} ({}) is mounted as {}, {}, {}",
            self.image,
            self.format,
            self.file,
            units::bytes(self.size_bytes),
            if self.is_writable { "writable" } else { "read-only" }
        ));
    }
}
