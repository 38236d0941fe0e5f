//! Converts an image to another format, or to other options.

mod device;
mod plan;
mod source;
mod vmdk_stream;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, Error as DeviceError, FileDeviceMut, IoMode};
use holdfast_image::{
    BlockOptions, BulkWriter, Continue, CreateOptions, Error as ImageError, FillOptions, FillReport, Format, Image,
    Note, OpenOptions, Qcow2Options, Storage, TargetContent, create_bulk, fill, fill_above, fill_device, open,
    open_mut,
};
use holdfast_repo::Environment;

use super::compare::compare;
use super::consistency::warn_of_inconsistencies;
use super::new_image::NewImage;
use super::sector_size::{kept_sector, sector_of_image, warn_of_lost_sector};
use crate::files::block_target::{Overwrite, is_block_device};
use crate::files::ordered_stream::write_to_stream;
use crate::files::stream_device::StreamDevice;
use crate::job::{Error, Interrupted, Job, Result, Unit};
use device::to_block_device;
pub use plan::{ConvertPlan, plan_convert};
pub(crate) use source::refuse_to_replace_source;
use source::{Source, device_of, files_of, report_dropped, warn_of_writers, warn_of_wrong_name};

/// What to convert.
pub enum ConvertSource<'a> {
    /// An image.
    Image {
        /// Its path.
        path: PathBuf,
        /// Read the disk from this internal snapshot instead of its present state.
        snapshot: Option<String>,
    },
    /// A raw disk that is read from a stream.
    Stream {
        /// The stream.
        stream: &'a mut (dyn Read + Send),
        /// Its size.
        size_bytes: u64,
    },
    /// Any other disk; it is read once, from start to end.
    Device(&'a dyn BlockDevice),
    /// The same, with a check at the end, before the new image gets its name: an error aborts the conversion.
    Checked(&'a dyn BlockDevice, &'a dyn Fn() -> Result<()>),
}

/// The target of a conversion.
#[derive(Debug, Clone)]
pub struct ConvertRequest {
    /// How to open images.
    pub open: OpenOptions,
    /// The image to create, or the block device to overwrite.
    pub target: PathBuf,
    /// Its format.
    pub format: Format,
    /// Options for qcow2.
    pub qcow2: Qcow2Options,
    /// Options for the other formats except raw.
    pub blocks: BlockOptions,
    /// Whether clusters are compressed.
    pub storage: Storage,
    /// What to do if the target exists.
    pub overwrite: Overwrite,
    /// Whether the new image is read back before it gets its name.
    pub verify: VerifyImage,
}

/// Whether a new image is read back and compared with its source before it gets its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyImage {
    /// It is read back.
    Yes,
    /// It is not read back.
    No,
}

/// Result of a conversion.
#[derive(Debug, Clone)]
pub struct ConvertReport {
    /// Size of the new disk, which some formats round up; for a block device, the bytes written.
    pub size_bytes: u64,
    /// How the image was filled; none if the file system shares the blocks with the source.
    pub filled: Option<FillReport>,
    /// Bytes that the new file uses on its storage; none for a block device.
    pub allocated_bytes: Option<u64>,
    /// Whether it was read back.
    pub verify: VerifyImage,
    /// How long it took.
    pub duration: Duration,
    /// Remarks about the source.
    pub notes: Vec<Note>,
}

/// Converts an image.
///
/// The new image is written under a temporary name, made durable, compared with the source if requested, and only then
/// renamed: the target is never incomplete. After an interruption or an error nothing is left. Only a block device is
/// written directly, and has mixed content until this returns.
pub fn convert(
    source: ConvertSource<'_>,
    request: &ConvertRequest,
    environment: &Environment,
    job: Job<'_>,
) -> Result<ConvertReport> {
    convert_and(source, request, &|_| Ok(()), environment, job)
}

/// Like [`convert`], and calls `change` on the new file before it gets its name; the function makes its changes
/// durable. Not called for a block device.
pub(crate) fn convert_and(
    source: ConvertSource<'_>,
    request: &ConvertRequest,
    change: &dyn Fn(&Path) -> Result<()>,
    environment: &Environment,
    job: Job<'_>,
) -> Result<ConvertReport> {
    let start = job.clock.now();
    let opened = open_source(source, request, job)?;
    job.interrupt.check()?;
    let made = if is_block_device(&request.target) {
        to_block_device(request, &opened, job).map(|filled| ConvertedImage {
            filled,
            allocated_bytes: None,
            size_bytes: opened.device().size_bytes(),
        })
    } else {
        to_file(request, &opened, change, environment, job).map_err(|error| opened.of_size(error, request.format))
    };
    let made = made.map_err(|error| with_medium(error, &opened, request))?;
    Ok(ConvertReport {
        size_bytes: made.size_bytes,
        filled: made.filled,
        allocated_bytes: made.allocated_bytes,
        verify: request.verify,
        duration: job.clock.now().saturating_sub(start),
        notes: opened.notes(),
    })
}

/// Opens the source, and warns of problems with it.
fn open_source<'a>(source: ConvertSource<'a>, request: &ConvertRequest, job: Job<'_>) -> Result<Source<'a>> {
    Ok(match source {
        ConvertSource::Image { path, snapshot } => {
            let image = open(&path, &request.open)?;
            refuse_to_replace_source(&image, &request.target)?;
            let device = device_of(&image, snapshot.as_deref())?;
            warn_of_wrong_name(&image, job);
            warn_of_writers(&image, job);
            warn_of_inconsistencies(&path, &request.open, &files_of(&image), job.progress)?;
            report_dropped(&image, job);
            Source::Image {
                sector_bytes: sector_of_image(&path, &image)?,
                path,
                image: Box::new(image),
                device,
            }
        }
        ConvertSource::Stream { stream, size_bytes } => Source::Stream(StreamDevice::new(stream, size_bytes)),
        ConvertSource::Device(device) => Source::Device(device),
        ConvertSource::Checked(device, check) => Source::Checked(device, check),
    })
}

/// Format of a disk in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamForm {
    /// Its raw bytes.
    Raw,
    /// A VMDK of compressed grains.
    Vmdk {
        /// Compression level, 1 to 12; a good default if not given.
        level: Option<u32>,
    },
}

/// Writes the disk in the image at `path` to a stream.
pub fn convert_to_stream(
    path: &Path,
    options: &OpenOptions,
    snapshot: Option<&str>,
    stream: &mut dyn Write,
    form: StreamForm,
    job: Job<'_>,
) -> Result<Vec<Note>> {
    let image = open(path, options)?;
    let device = device_of(&image, snapshot)?;
    warn_of_wrong_name(&image, job);
    warn_of_writers(&image, job);
    warn_of_inconsistencies(path, options, &files_of(&image), job.progress)?;
    report_dropped(&image, job);
    let sector_bytes = sector_of_image(path, &image)?;
    warn_of_lost_sector(sector_bytes, &path.display().to_string(), job.progress);
    match form {
        StreamForm::Raw => {
            job.progress.phase("converting", Unit::Bytes);
            job.progress.total(device.size_bytes());
            write_to_stream(&*device, stream, job).map_err(|error| error.on(path))?;
        }
        StreamForm::Vmdk { level } => vmdk_stream::to_stream(&*device, path, stream, level, job)?,
    }
    Ok(image.notes().to_vec())
}

/// Result, as in [`ConvertReport`].
struct ConvertedImage {
    filled: Option<FillReport>,
    allocated_bytes: Option<u64>,
    size_bytes: u64,
}

fn to_file(
    request: &ConvertRequest,
    source: &Source<'_>,
    change: &dyn Fn(&Path) -> Result<()>,
    environment: &Environment,
    job: Job<'_>,
) -> Result<ConvertedImage> {
    let device = source.device();
    let options = create_options(request, source, job);
    let base = base_of(request)?;
    let (image, filled) = match request.format {
        Format::Qcow2 => {
            let (image, writer) = NewImage::begin(
                &request.target,
                request.overwrite,
                &options,
                environment,
                |partial, options| Ok(create_bulk(partial, options)?),
            )?;
            image.report_cleared(job.progress);
            let filled = fill_bulk(device, base.as_ref(), writer, request.storage, job)?;
            (image, Some(filled))
        }
        Format::Vmdk if request.storage != Storage::Plain => {
            vmdk_stream::to_file(request, device, &options, environment, job)?
        }
        Format::Raw => convert_to_raw(request, source, &options, environment, job)?,
        _ => convert_to_blocks(request, device, &options, environment, job)?,
    };
    source.check_end()?;
    if request.verify == VerifyImage::Yes {
        let written = open(image.partial(), &reopen(request, image.partial_data()))?;
        verify(device, &written, request, job)?;
    }
    job.interrupt.check()?;
    change(image.partial())?;
    job.interrupt.check()?;
    image.finish()?;
    let opened = open(&request.target, &reopen(request, None))?;
    let more_bytes = opened.size_bytes().saturating_sub(device.size_bytes());
    if more_bytes > 0 {
        job.progress.note(&format!(
            "{} holds whole sectors only: the new disk has {more_bytes} bytes more than the old one",
            request.format
        ));
    }
    Ok(ConvertedImage {
        filled,
        allocated_bytes: opened.layers()[0].allocated_bytes,
        size_bytes: opened.size_bytes(),
    })
}

/// Options to create the new file.
fn create_options(request: &ConvertRequest, source: &Source<'_>, job: Job<'_>) -> CreateOptions {
    let device = source.device();
    CreateOptions {
        format: request.format,
        size_bytes: device.size_bytes(),
        qcow2: request.qcow2.clone(),
        blocks: BlockOptions {
            sector_bytes: kept_sector(
                request.format,
                device.size_bytes(),
                source.sector_bytes(request),
                &source.name(&request.target),
                job.progress,
            ),
            ..request.blocks.clone()
        },
        name: request.target.file_name().map(OsStr::to_owned),
    }
    .of_whole_sectors()
}

/// The backing file of the new image; it must not be the file that the new image replaces.
fn base_of(request: &ConvertRequest) -> Result<Option<Image>> {
    let base = open_base(request)?;
    if let Some(base) = &base {
        refuse_to_replace_source(base, &request.target)?;
    }
    Ok(base)
}

/// Adds the path of the file to an error of a device: devices know only offsets.
fn with_medium(error: Error, source: &Source<'_>, request: &ConvertRequest) -> Error {
    let is_read = match &error {
        Error::Device(DeviceError::Io { action, .. })
        | Error::Image(ImageError::Device(DeviceError::Io { action, .. })) => {
            action.starts_with("read") || action.starts_with("look")
        }
        _ => false,
    };
    match source {
        Source::Image { path, .. } if is_read => error.on(path),
        Source::Stream(_) if is_read => error.on(Path::new("-")),
        // The device itself knows the origin of its bytes.
        Source::Device(_) | Source::Checked(..) if is_read => error,
        // The error is about the data, not about the image.
        Source::Checked(..) if matches!(error, Error::Template(_)) => error,
        _ => error.on(&request.target),
    }
}

/// The backing file of the new image; equal data need not be stored in the new image.
fn open_base(request: &ConvertRequest) -> Result<Option<Image>> {
    let Some(backing) = &request.qcow2.backing else {
        return Ok(None);
    };
    let path = request.target.with_file_name("").join(&backing.name);
    let options = OpenOptions {
        format: Some(backing.format),
        gate: request.open.gate.clone(),
        allow: request.open.allow.clone(),
        ..OpenOptions::default()
    };
    Ok(Some(open(&path, &options)?))
}

fn fill_bulk(
    device: &dyn BlockDevice,
    base: Option<&Image>,
    mut writer: BulkWriter,
    storage: Storage,
    job: Job<'_>,
) -> Result<FillReport> {
    let options = FillOptions {
        threads: threads(job),
        storage,
    };
    let mut steps = steps(device, job);
    let filled = match base {
        Some(base) => fill_above(device, base, &mut writer, &options, &mut steps),
        None => fill(device, &mut writer, &options, &mut steps),
    };
    let filled = unless_interrupted(filled, job)?;
    job.progress.phase("making it durable", Unit::Items);
    writer.finish()?;
    Ok(filled)
}

/// Starts an empty image, to be filled as a device.
fn begin_empty(
    request: &ConvertRequest,
    options: &CreateOptions,
    environment: &Environment,
    job: Job<'_>,
) -> Result<NewImage> {
    let (image, ()) = NewImage::begin(
        &request.target,
        request.overwrite,
        options,
        environment,
        |partial, options| Ok(holdfast_image::create(partial, options)?),
    )?;
    image.report_cleared(job.progress);
    Ok(image)
}

fn convert_to_raw(
    request: &ConvertRequest,
    source: &Source<'_>,
    options: &CreateOptions,
    environment: &Environment,
    job: Job<'_>,
) -> Result<(NewImage, Option<FillReport>)> {
    let new = begin_empty(request, options, environment, job)?;
    if let Source::Image { path, image, .. } = source
        && image.layers()[0].format == Format::Raw
        && is_cloned(path, new.partial())?
    {
        job.progress
            .note("the file system shares the bytes of both files until one is written");
        return Ok((new, None));
    }
    let target = FileDeviceMut::open(new.partial(), IoMode::LargeDirect)?;
    let filled = fill_zeroed(source.device(), &target, job)?;
    target.flush()?;
    Ok((new, Some(filled)))
}

/// Creates an image that is filled by writes to its device.
fn convert_to_blocks(
    request: &ConvertRequest,
    device: &dyn BlockDevice,
    options: &CreateOptions,
    environment: &Environment,
    job: Job<'_>,
) -> Result<(NewImage, Option<FillReport>)> {
    let image = begin_empty(request, options, environment, job)?;
    let target = open_mut(image.partial(), &reopen(request, None))?;
    let filled = fill_zeroed(device, &target, job)?;
    Ok((image, Some(filled)))
}

/// Copies a disk to a new image, which reads as zeroes.
pub(crate) fn fill_zeroed(disk: &dyn BlockDevice, target: &dyn BlockDeviceMut, job: Job<'_>) -> Result<FillReport> {
    let content = TargetContent::Zeroes;
    let filled = fill_device(disk, target, content, threads(job), &mut steps(disk, job));
    unless_interrupted(filled, job)
}

/// Clones the file `source` to `target` by the file system, durably; returns whether that was possible.
fn is_cloned(source: &Path, target: &Path) -> Result<bool> {
    let failed = |source| Error::File {
        action: "clone",
        path: target.to_owned(),
        source,
    };
    let from = File::open(source).map_err(failed)?;
    if !from.metadata().map_err(failed)?.is_file() {
        return Ok(false);
    }
    let to = File::options().write(true).open(target).map_err(failed)?;
    if rustix::fs::ioctl_ficlone(&to, &from).is_err() {
        return Ok(false);
    }
    to.sync_all().map_err(failed)?;
    Ok(true)
}

fn verify(device: &dyn BlockDevice, written: &dyn BlockDevice, request: &ConvertRequest, job: Job<'_>) -> Result<()> {
    let report = compare(device, written, job)?;
    match report.first_difference {
        None => Ok(()),
        Some(offset) => Err(Error::WrittenWrong {
            path: request.target.clone(),
            offset,
            different_bytes: report.different_bytes,
        }),
    }
}

/// Options to open the new image, whose other files were named by the user; its data file may still have its temporary name.
fn reopen(request: &ConvertRequest, partial_data: Option<&Path>) -> OpenOptions {
    let mut allow = request.open.allow.clone();
    let folder = request.target.with_file_name("");
    allow.extend(request.qcow2.backing.iter().map(|backing| folder.join(&backing.name)));
    let data = request.qcow2.data_file.iter().filter(|_| partial_data.is_none());
    allow.extend(data.map(|data| folder.join(&data.name)));
    OpenOptions {
        format: Some(request.format),
        gate: request.open.gate.clone(),
        allow,
        data_file: partial_data.map(Path::to_owned),
        ..OpenOptions::default()
    }
}

fn threads(job: Job<'_>) -> NonZero<usize> {
    NonZero::new(job.thread_count).unwrap_or(NonZero::<usize>::MIN)
}

/// A callback that reports the progress of a copy of `device`, and stops the copy when the job is interrupted.
fn steps<'a>(device: &dyn BlockDevice, job: Job<'a>) -> impl FnMut(u64) -> Continue + 'a {
    job.progress.phase("converting", Unit::Bytes);
    job.progress.total(device.size_bytes());
    let mut reported = 0;
    move |reached| {
        job.progress.advance(reached - reported);
        reported = reached;
        if job.interrupt.is_requested() {
            Continue::Stop
        } else {
            Continue::Go
        }
    }
}

/// Converts the error of a stopped copy to that of an interruption.
fn unless_interrupted<T>(result: holdfast_image::Result<T>, job: Job<'_>) -> Result<T> {
    match result {
        Err(_) if job.interrupt.is_requested() => Err(Interrupted.into()),
        other => Ok(other?),
    }
}
