//! `holdfast image mount`: the disk of an image as a raw file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use holdfast_engine::{ImageMount, MountedImage};
use holdfast_image::Format;
use serde::Serialize;

use super::options::GateArgs;
use crate::args::{Example, MountOptionArgs, SharedOptions, parse_format};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::{empty_mount_point, leave_terminal};
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
    #[command(flatten)]
    gate: GateArgs,
    #[command(flatten)]
    options: MountOptionArgs,
}

/// Arguments of `image mount-server`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageMountServerArgs {
    #[command(flatten)]
    mount: ImageMountArgs,
}

impl Verb for ImageMountArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Read the files of a virtual disk of VMware",
        line: "holdfast image mount web1.vmdk /mnt && mount -o ro,loop,offset=1M /mnt/web1.raw /media",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let folder = empty_mount_point(&self.folder)?;
        let opened = open(self)?;
        let progress = context.progress();
        opened.warn(&*progress)?;
        drop(progress);
        let report = ImageMounted::new(&self.image, &folder, &opened.content());
        if self.options.foreground {
            return self.serve_in_foreground(&opened, &folder, &report, context);
        }
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
        let ImageMountArgs {
            image, folder, options, ..
        } = &self.mount;
        let opened = open(&self.mount)?;
        let place = context.mount_place(image, folder, *options);
        let mut left = Ok(());
        context.work(1, |job| opened.serve(&place, job, &mut || left = leave_terminal()))?;
        left?;
        Ok(Exit::Ok)
    }
}

impl ImageMountArgs {
    fn serve_in_foreground(
        &self,
        opened: &ImageMount,
        folder: &Path,
        report: &ImageMounted,
        context: &Context,
    ) -> Result<Exit, Error> {
        let place = context.mount_place(&self.image, folder, self.options);
        let mut printed = Ok(Exit::Ok);
        context.work(1, |job| {
            opened.serve(&place, job, &mut || printed = context.report(report))
        })?;
        Ok(printed?.with_warning_count(context.console().warnings().len()))
    }

    /// The command line of the server. It does not detect the format again, and so does not warn of it again.
    fn server_words(&self, folder: &Path, format: &str) -> Result<Vec<OsString>, Error> {
        let image = std::path::absolute(&self.image).map_err(|source| Error::File {
            action: "look at",
            path: self.image.clone(),
            source,
        })?;
        let mut words: Vec<OsString> = vec!["image".into(), "mount-server".into(), image.into(), folder.into()];
        words.extend(["--format".into(), format.into()]);
        words.extend(self.gate.words()?);
        if self.options.allow_other {
            words.push("--allow-other".into());
        }
        Ok(words)
    }
}

fn open(args: &ImageMountArgs) -> Result<ImageMount, Error> {
    Ok(ImageMount::open(&args.image, &args.gate.open_options(args.format)?)?)
}

/// Report of `image mount`.
#[derive(Debug, Serialize)]
struct ImageMounted {
    image: String,
    format: &'static str,
    folder: String,
    /// The path of the file with the raw disk.
    file: String,
    size_bytes: u64,
}

impl ImageMounted {
    fn new(image: &Path, folder: &Path, content: &MountedImage) -> Self {
        Self {
            image: image.display().to_string(),
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
            "{} ({}) is mounted as {}, {}, read-only",
            self.image,
            self.format,
            self.file,
            units::bytes(self.size_bytes)
        ));
    }
}
