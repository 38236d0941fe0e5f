//! Plans a conversion: everything is checked, and nothing is written.

use holdfast_block::{BlockDevice, ExtentKind};
use holdfast_image::{Format, Note, Storage};

use super::device::check_block_device;
use super::source::Source;
use super::{ConvertRequest, ConvertSource, base_of, create_options, open_source, with_medium};
use crate::files::block_target::is_block_device;
use crate::files::room::warn_of_missing_room;
use crate::image::new_image::NewImage;
use crate::job::{Job, Result};

/// Extents per query.
const EXTENT_COUNT_MAX: usize = 1024;

/// Plan of a conversion.
#[derive(Debug, Clone)]
pub struct ConvertPlan {
    /// The format of the target.
    pub format: Format,
    /// Size of the new disk.
    pub size_bytes: u64,
    /// Bytes stored as data in the source; none for a stream, which is not read.
    pub data_bytes: Option<u64>,
    /// Remarks about the source.
    pub notes: Vec<Note>,
}

/// Plans a conversion. A stream is not read.
///
/// # Errors
/// Those of [`convert`](super::convert) before it writes.
pub fn plan_convert(source: ConvertSource<'_>, request: &ConvertRequest, job: Job<'_>) -> Result<ConvertPlan> {
    let source = open_source(source, request, job)?;
    job.interrupt.check()?;
    let size_bytes = check_target(request, &source, job).map_err(|error| with_medium(error, &source, request))?;
    let data_bytes = match &source {
        Source::Stream(_) => None,
        _ => Some(data_bytes(source.device(), job)?),
    };
    if let (Some(data_bytes), Storage::Plain) = (data_bytes, request.storage) {
        warn_of_missing_room([(request.target.as_path(), data_bytes)], "the conversion", job.progress);
    }
    Ok(ConvertPlan {
        format: request.format,
        size_bytes,
        data_bytes,
        notes: source.notes(),
    })
}

/// Checks that the target can be written; returns the size of the new disk.
fn check_target(request: &ConvertRequest, source: &Source<'_>, job: Job<'_>) -> Result<u64> {
    if is_block_device(&request.target) {
        check_block_device(request, source)?;
        return Ok(source.device().size_bytes());
    }
    let options = create_options(request, source, job);
    base_of(request)?;
    NewImage::check(&request.target, request.overwrite, &options)
        .map_err(|error| source.of_size(error, request.format))?;
    Ok(options.size_bytes)
}

fn data_bytes(device: &dyn BlockDevice, job: Job<'_>) -> Result<u64> {
    let (mut at, end, mut data_bytes) = (0, device.size_bytes(), 0);
    while at < end {
        job.interrupt.check()?;
        let extents = device.extents(at..end, EXTENT_COUNT_MAX)?;
        let data = extents.iter().filter(|extent| extent.kind == ExtentKind::Data);
        data_bytes += data.map(|extent| extent.length).sum::<u64>();
        at = extents.end();
    }
    Ok(data_bytes)
}
