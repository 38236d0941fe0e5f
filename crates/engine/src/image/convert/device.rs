//! Writes a disk over a block device.

use holdfast_block::{BlockDevice as _, SliceDevice};
use holdfast_image::{FillReport, Format, TargetContent, fill_device};

use super::source::Source;
use super::{ConvertRequest, VerifyImage, steps, threads, unless_interrupted, verify};
use crate::files::block_target::{LockedDevice, open_block_target};
use crate::image::sector_size::warn_of_other_sectors;
use crate::job::{Error, Job, Result};

/// Opens the target and checks that it may be overwritten; nothing is written.
pub(super) fn check_block_device(request: &ConvertRequest, source: &Source<'_>) -> Result<LockedDevice> {
    let path = &request.target;
    if request.format != Format::Raw {
        return Err(Error::DeviceFormat {
            path: path.clone(),
            format: request.format.to_string(),
        });
    }
    open_block_target(path, request.overwrite, source.device().size_bytes())
}

/// Writes over a block device.
pub(super) fn to_block_device(
    request: &ConvertRequest,
    source: &Source<'_>,
    job: Job<'_>,
) -> Result<Option<FillReport>> {
    let (path, device) = (&request.target, source.device());
    let target = check_block_device(request, source)?;
    warn_of_other_sectors(&*target, source.sector_bytes(request), &source.name(path), job.progress);
    let fill = || -> Result<FillReport> {
        let filled = fill_device(
            device,
            &*target,
            TargetContent::Unknown,
            threads(job),
            &mut steps(device, job),
        );
        let filled = unless_interrupted(filled, job)?;
        target.check_alone()?;
        source.check_end()?;
        if request.verify == VerifyImage::Yes {
            verify(
                device,
                &SliceDevice::new(&*target, 0..device.size_bytes())?,
                request,
                job,
            )?;
        }
        Ok(filled)
    };
    let filled = fill().inspect_err(|_| {
        job.progress.warning(&format!(
            "{} holds a part of the new disk over what it held before: convert again before it is used",
            path.display()
        ));
    })?;
    let spare_bytes = target.size_bytes() - device.size_bytes();
    if spare_bytes > 0 {
        job.progress.warning(&format!(
            "{} is larger than the disk: its last {spare_bytes} bytes were left as they were",
            path.display()
        ));
    }
    Ok(Some(filled))
}
