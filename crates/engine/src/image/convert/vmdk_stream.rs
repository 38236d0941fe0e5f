//! Writes a disk as a VMDK with compressed grains, to a file or a pipe.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use holdfast_block::{BlockDevice, Error as DeviceError};
use holdfast_image::{
    CreateOptions, Error as ImageError, FillReport, ImageId, Storage, StreamOptions, StreamReport,
    write_stream_optimized,
};
use holdfast_repo::Environment;

use super::{ConvertRequest, steps, threads, unless_interrupted};
use crate::image::new_image::NewImage;
use crate::job::{Error, Job, Result};

const GRAIN_BYTES: u64 = 65_536;

pub(super) fn to_file(
    request: &ConvertRequest,
    device: &dyn BlockDevice,
    options: &CreateOptions,
    environment: &Environment,
    job: Job<'_>,
) -> Result<(NewImage, Option<FillReport>)> {
    let level = match request.storage {
        Storage::Compressed { level } => level,
        Storage::Plain => None,
    };
    let (image, mut file) = NewImage::begin(
        &request.target,
        request.overwrite,
        options,
        environment,
        |partial, _| File::create_new(partial).map_err(|source| file_error("create", partial, source)),
    )?;
    image.report_cleared(job.progress);
    let written = write(device, &name_of(&request.target), &mut file, level, job)?;
    file.sync_all()
        .map_err(|source| file_error("write", &request.target, source))?;
    let compressed_bytes = (written.grain_count * GRAIN_BYTES).min(written.size_bytes);
    let filled = FillReport {
        plain_bytes: 0,
        compressed_bytes,
        compressed_stored_bytes: written.file_bytes,
        zero_bytes: device.size_bytes().saturating_sub(compressed_bytes),
    };
    Ok((image, Some(filled)))
}

pub(super) fn to_stream(
    device: &dyn BlockDevice,
    origin: &Path,
    stream: &mut dyn Write,
    level: Option<u32>,
    job: Job<'_>,
) -> Result<()> {
    let name = name_of(&origin.with_extension("vmdk"));
    let written = write(device, &name, stream, level, job);
    written.map_err(|error| match error {
        Error::Image(ImageError::Device(DeviceError::Io {
            action: "write",
            source,
            ..
        })) => Error::Stdout(source),
        other => other.on(origin),
    })?;
    stream.flush().map_err(Error::Stdout)
}

fn write(
    device: &dyn BlockDevice,
    name: &str,
    stream: &mut dyn Write,
    level: Option<u32>,
    job: Job<'_>,
) -> Result<StreamReport> {
    let options = StreamOptions {
        name,
        id: ImageId::random()?,
        level,
        threads: threads(job),
    };
    let written = write_stream_optimized(device, stream, &options, &mut steps(device, job));
    unless_interrupted(written, job)
}

/// The name of the image in its descriptor, which is a text of lines.
fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.replace(|character: char| character.is_control() || character == '"', "_")
}

fn file_error(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::File {
        action,
        path: path.to_owned(),
        source,
    }
}
