//! The source of a conversion.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::BlockDevice;
use holdfast_host::is_written_by_others;
use holdfast_image::{Error as ImageError, Format, FormatSource, Image, LayerInfo, Note};

use super::ConvertRequest;
use crate::files::stream_device::StreamDevice;
use crate::job::{Error, Job, Result};

pub(super) fn device_of(image: &Image, snapshot: Option<&str>) -> Result<Arc<dyn BlockDevice>> {
    Ok(match snapshot {
        Some(name) => image.snapshot(name)?,
        None => image.device(),
    })
}

/// All files that an image is read from.
pub(super) fn files_of(image: &Image) -> Vec<PathBuf> {
    image.layers().iter().flat_map(LayerInfo::files).collect()
}

/// An open source.
pub(super) enum Source<'a> {
    Image {
        path: PathBuf,
        image: Box<Image>,
        device: Arc<dyn BlockDevice>,
        sector_bytes: u64,
    },
    Stream(StreamDevice<'a>),
    Device(&'a dyn BlockDevice),
    Checked(&'a dyn BlockDevice, &'a dyn Fn() -> Result<()>),
}

impl Source<'_> {
    pub(super) fn device(&self) -> &dyn BlockDevice {
        match self {
            Self::Image { device, .. } => &**device,
            Self::Stream(device) => device,
            Self::Device(device) | Self::Checked(device, _) => *device,
        }
    }

    /// Remarks about the source.
    pub(super) fn notes(&self) -> Vec<Note> {
        match self {
            Self::Image { image, .. } => image.notes().to_vec(),
            Self::Stream(_) | Self::Device(_) | Self::Checked(..) => Vec::new(),
        }
    }

    /// Size of its sectors; for a source that is not an image, the requested one.
    pub(super) fn sector_bytes(&self, request: &ConvertRequest) -> u64 {
        match self {
            Self::Image { sector_bytes, .. } => *sector_bytes,
            Self::Stream(_) | Self::Device(_) | Self::Checked(..) => request.blocks.sector_bytes,
        }
    }

    /// Its name in warnings.
    pub(super) fn name(&self, target: &Path) -> String {
        match self {
            Self::Image { path, .. } => path.display().to_string(),
            Self::Stream(_) | Self::Device(_) | Self::Checked(..) => format!("the disk of {}", target.display()),
        }
    }

    /// Converts an error about the disk size: a size given by an option is a wrong option, the size of a source disk is not.
    pub(super) fn of_size(&self, error: Error, format: Format) -> Error {
        match (error, self) {
            (
                Error::Image(ImageError::InvalidOption { option: "size", detail }),
                Self::Image { .. } | Self::Device(_) | Self::Checked(..),
            ) => does_not_fit(self.device().size_bytes(), format, detail),
            (error, _) => error,
        }
    }

    /// At the end of the read: checks that nothing follows.
    pub(super) fn check_end(&self) -> Result<()> {
        match self {
            Self::Image { .. } | Self::Device(_) => Ok(()),
            Self::Stream(device) => device.check_end(),
            Self::Checked(_, check) => check(),
        }
    }
}

fn does_not_fit(size_bytes: u64, format: Format, detail: String) -> Error {
    Error::DiskDoesNotFit {
        size_bytes,
        format: format.to_string(),
        detail,
    }
}

/// Warns of a file with the extension of a format but other content: its header is damaged, or its name is wrong.
pub(super) fn warn_of_wrong_name(source: &Image, job: Job<'_>) {
    let top = &source.layers()[0];
    let extension = top.path.extension().and_then(OsStr::to_str).and_then(Format::from_name);
    if let (Format::Raw, FormatSource::Content, Some(named)) = (top.format, top.format_source, extension)
        && named != Format::Raw
    {
        job.progress.warning(&format!(
            "{} has the name of a {named} image, but not its header: it is read as a raw disk (--format raw says that it is one)",
            top.path.display()
        ));
    }
}

/// Warns of files that another process may write to while they are read.
pub(super) fn warn_of_writers(source: &Image, job: Job<'_>) {
    for path in files_of(source).iter().filter(|path| is_written_by_others(path)) {
        job.progress.warning(&format!(
            "{} is in use: a machine may write to it while it is read, and what is read is of no one instant then",
            path.display()
        ));
    }
}

/// Only the disk is converted: a warning lists what else the image holds.
pub(super) fn report_dropped(source: &Image, job: Job<'_>) {
    const NAME_COUNT_MAX: usize = 8;
    let top = &source.layers()[0];
    let mut kinds: Vec<(&str, Vec<String>)> = Vec::new();
    if let Some(qcow2) = &top.qcow2 {
        let snapshots = qcow2.snapshots.iter().map(|snapshot| snapshot.name.clone());
        kinds.push(("internal snapshots", snapshots.collect()));
        kinds.push((
            "bitmaps",
            qcow2.bitmaps.iter().map(|bitmap| bitmap.name.clone()).collect(),
        ));
    }
    if let Some(delta) = &top.delta {
        let snapshots = delta.snapshots.iter().map(|snapshot| snapshot.id.to_string());
        kinds.push(("snapshots", snapshots.collect()));
    }
    for (what, names) in kinds.iter().filter(|(_, names)| !names.is_empty()) {
        let more = if names.len() > NAME_COUNT_MAX { ", ..." } else { "" };
        let shown = names.len().min(NAME_COUNT_MAX);
        job.progress.note(&format!(
            "the {what} of {} are not carried over: {}{more}",
            top.path.display(),
            names[..shown].join(", ")
        ));
    }
}

/// Refuses to replace a file that the image is read from: other images may be based on it.
pub(crate) fn refuse_to_replace_source(source: &Image, target: &Path) -> Result<()> {
    let Ok(target) = target.canonicalize() else {
        return Ok(());
    };
    let is_part = |path: &Path| path.canonicalize().is_ok_and(|path| path == target);
    let is_read = |layer: &&LayerInfo| layer.files().iter().any(|path| is_part(path));
    match source.layers().iter().find(is_read) {
        Some(_) => Err(Error::TargetIsSource { path: target }),
        None => Ok(()),
    }
}
