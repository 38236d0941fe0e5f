//! Clones of images.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::{
    CloneImageRequest, CloneKind, CloneWay, Execution, GuestIdentity, ImageClone, ImageCloner, Job, Unit,
};
use holdfast_host::{LocalTools, Tools};
use holdfast_image::{Backing, Format, OpenOptions};
use serde::Serialize;

use super::{SYSPREP_TIME_OUT, sysprep_program};
use crate::context::Context;
use crate::errors::Error;
use crate::machines::runs;
use crate::output::Page;
use crate::process::time;
use crate::units;

/// How images are cloned.
#[derive(Debug, clap::Args)]
pub(super) struct ImageCloneArgs {
    /// For an image: make an overlay that depends on it, even where the file system could share data
    #[arg(long, conflicts_with = "copy")]
    overlay: bool,
    /// For an image: copy all data
    #[arg(long)]
    copy: bool,
    /// For an image: allow a backing file in another folder; may be repeated
    #[arg(long = "allow-file", visible_alias = "allow", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// For an image: its format (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = crate::args::parse_format)]
    format: Option<Format>,
}

/// Whether clones get their own identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sysprep {
    /// Run virt-sysprep.
    Yes,
    /// Do not run virt-sysprep.
    No,
}

/// A clone of an image.
#[derive(Debug, Serialize)]
pub(super) struct ImageCloneDocument {
    path: String,
    /// `shared`, `overlay` or `copied`.
    kind: &'static str,
    format: &'static str,
    size_bytes: u64,
    id: Option<String>,
    own_bytes: Option<u64>,
    shared_bytes: Option<u64>,
    duration_ms: u64,
}

impl ImageCloneDocument {
    fn planned(path: &str, kind: CloneKind, format: Format, size_bytes: u64) -> Self {
        Self {
            path: path.to_owned(),
            kind: name_of(kind),
            format: format.name(),
            size_bytes,
            id: None,
            own_bytes: None,
            shared_bytes: None,
            duration_ms: 0,
        }
    }

    fn made(clone: &ImageClone) -> Self {
        Self {
            path: clone.path.display().to_string(),
            kind: name_of(clone.kind),
            format: clone.format.name(),
            size_bytes: clone.size_bytes,
            id: clone.id.map(|id| id.to_string()),
            own_bytes: clone.own_bytes,
            shared_bytes: clone.shared_bytes,
            duration_ms: units::millis(clone.duration),
        }
    }

    pub(super) fn human_planned(&self, page: &mut Page) {
        page.line(&format!(
            "{}  would be made: {}, {}: {} disk",
            self.path,
            self.format,
            self.kind,
            units::bytes(self.size_bytes)
        ));
    }

    pub(super) fn human(&self, page: &mut Page) {
        let (format, kind) = (self.format, self.kind);
        let mut parts = vec![format!("{} disk", units::bytes(self.size_bytes))];
        parts.extend(
            self.own_bytes
                .map(|bytes| format!("{} of its own", units::bytes(bytes))),
        );
        parts.extend(self.shared_bytes.map(|bytes| format!("{} shared", units::bytes(bytes))));
        let duration = Duration::from_millis(self.duration_ms);
        parts.push(units::duration(duration));
        page.line(&format!("{}  {format}, {kind}: {}", self.path, parts.join(", ")));
    }
}

impl ImageCloneArgs {
    /// Returns an error if an option for images only was given.
    pub(super) fn refuse(&self) -> Result<(), Error> {
        let own = [
            ("--overlay", self.overlay),
            ("--copy", self.copy),
            ("--allow-file", !self.files.is_empty()),
            ("--format", self.format.is_some()),
        ];
        match own.iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((option, _)) => Err(Error::usage(
                format!("{option} is for images, and a machine is cloned"),
                format!("leave {option} out, or name the file of an image"),
            )),
        }
    }

    /// Clones the image at `file` to each path in `names`.
    pub(super) fn clone_images(
        &self,
        file: &Path,
        names: &[String],
        sysprep: Sysprep,
        execution: Execution,
        context: &Context,
        threads: usize,
    ) -> Result<Vec<ImageCloneDocument>, Error> {
        let tools = LocalTools::new(Arc::clone(context.clock()), SYSPREP_TIME_OUT);
        let environment = context.environment();
        let open = OpenOptions {
            format: self.format,
            allow: self.files.clone(),
            backing: Backing::Follow,
            ..OpenOptions::default()
        };
        let made = names.iter().filter(|_| execution == Execution::Execute).map(Path::new);
        let _noted = runs::note_places(made, context);
        context.work(threads, |job| {
            let mut made = Vec::new();
            // If one of many names exists, no clone is made.
            if let Some(taken) = names.iter().find(|name| Path::new(name).symlink_metadata().is_ok()) {
                return Err(holdfast_engine::Error::TargetExists { path: taken.into() });
            }
            // An image with a wrong extension would be opened in another format.
            for name in names {
                Format::of_new_file(Path::new(name))?;
            }
            job.progress.phase("cloning", Unit::Items);
            job.progress.total(names.len() as u64);
            for name in names {
                let request = CloneImageRequest {
                    source: file.to_owned(),
                    open: open.clone(),
                    way: match (self.overlay, self.copy) {
                        (true, _) => CloneWay::Overlay,
                        (_, true) => CloneWay::Copy,
                        _ => CloneWay::Quick,
                    },
                    created_s: u64::try_from(time::now().as_second()).unwrap_or_default(),
                    guest: (sysprep == Sysprep::Yes).then(|| (guest_of(name, context), &tools as &dyn Tools)),
                };
                let cloner = ImageCloner::open(&request, &environment)?;
                if made.is_empty() {
                    cloner.warn_of_format(job);
                }
                if execution == Execution::DryRun {
                    let (kind, format) = cloner.plan(Path::new(name))?;
                    made.push(ImageCloneDocument::planned(name, kind, format, cloner.size_bytes()));
                    continue;
                }
                let clone = cloner
                    .clone_to(Path::new(name), job)
                    .inspect_err(|_| warn_of_existing_clones(&made, job))?;
                job.progress.advance(1);
                made.push(ImageCloneDocument::made(&clone));
            }
            note_overlays(file, &made, job);
            warn_of_names(&made, job);
            Ok(made)
        })
    }
}

fn name_of(kind: CloneKind) -> &'static str {
    match kind {
        CloneKind::Shared => "shared",
        CloneKind::Overlay => "overlay",
        CloneKind::Copied => "copied",
    }
}

/// If one of many clones fails, the earlier ones remain, and a note lists them.
fn warn_of_existing_clones(made: &[ImageCloneDocument], job: Job<'_>) {
    if let (Some(first), Some(last)) = (made.first(), made.last()) {
        job.progress.warning(&format!(
            "{} that were made before stay: {} to {}",
            units::count(made.len() as u64),
            first.path,
            last.path
        ));
    }
}

fn note_overlays(file: &Path, made: &[ImageCloneDocument], job: Job<'_>) {
    let folder = file.parent();
    let mut overlays = made.iter().filter(|clone| clone.kind == "overlay").peekable();
    if overlays.peek().is_none() {
        return;
    }
    job.progress.note(&format!(
        "{} is now a backing file: do not write to it while overlays of it exist",
        file.display()
    ));
    if overlays.any(|clone| Path::new(&clone.path).parent() != folder) {
        job.progress.note(&format!(
            "the overlay is in another folder: pass --allow-file {} when you read it",
            file.display()
        ));
    }
}

/// Warns of names whose extension does not match the format: programs that go by the extension misread such images, and
/// a guest can make a raw image look like any format.
fn warn_of_names(made: &[ImageCloneDocument], job: Job<'_>) {
    let is_called_otherwise = |clone: &&ImageCloneDocument| {
        let extension = Path::new(&clone.path)
            .extension()
            .and_then(|extension| extension.to_str());
        let named = extension.and_then(|extension| Format::from_name(&extension.to_ascii_lowercase()));
        named.is_some_and(|named| named.name() != clone.format)
    };
    if let Some(clone) = made.iter().find(is_called_otherwise) {
        job.progress.warning(&format!(
            "{} is called otherwise than what it is, which is {}: say its format wherever you use it, or name it after that",
            clone.path, clone.format
        ));
    }
}

/// The identity of the guest, whose host name is the name of its image.
fn guest_of(name: &str, context: &Context) -> GuestIdentity {
    let stem = Path::new(name)
        .file_stem()
        .map(|stem| stem.to_string_lossy().into_owned());
    GuestIdentity {
        host_name: stem,
        program: sysprep_program(context),
    }
}
