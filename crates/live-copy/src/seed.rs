//! Fills the target with a similar content before the copy begins, so that only the differences are sent.
//!
//! A raw file on the same file system is cloned, where the file system can. The content is only a guess: each unit is compared
//! by hash with the source.

use std::fs::File;
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, Clock, SliceDevice};
use holdfast_image::{Continue, Format, Image, OpenOptions, TargetContent, fill_device};

use crate::error::{Error, Result};
use crate::request::{Seed, SeedProgress};

/// Interval of the reports of the progress.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
const THREADS: NonZero<usize> = NonZero::new(2).expect("it is not zero");

/// Receives reports of the progress, and decides whether the copy of the seed continues.
pub(crate) type SeedWatch<'a> = dyn FnMut(SeedProgress) -> Continue + 'a;

/// How the target is filled.
pub(crate) struct SeedFill<'a> {
    pub(crate) seed: &'a Seed,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) watch: &'a mut SeedWatch<'a>,
}

impl SeedFill<'_> {
    /// Fills a new file, which reads as zeroes and has the size of the disk.
    pub(crate) fn fill_file(&mut self, file: &File, device: &dyn BlockDeviceMut) -> Result<()> {
        let image = self.open()?;
        if is_raw_file(&image) && self.is_cloned(file, device.size_bytes())? {
            return Ok(());
        }
        self.fill(&image, device, TargetContent::Zeroes)
    }

    /// Fills a new image.
    pub(crate) fn fill_image(&mut self, target: &dyn BlockDeviceMut) -> Result<()> {
        let image = self.open()?;
        self.fill(&image, target, TargetContent::Zeroes)
    }

    /// Fills a block device.
    pub(crate) fn fill_block_device(&mut self, device: &dyn BlockDeviceMut) -> Result<()> {
        let image = self.open()?;
        self.fill(&image, device, TargetContent::Unknown)
    }

    fn failed(&self, reason: String) -> Error {
        Error::Seed {
            path: self.seed.path.clone(),
            reason,
        }
    }

    fn open(&self) -> Result<Image> {
        let format = self.seed.format.as_deref().map(|name| {
            let found = Format::from_name(name);
            found.ok_or_else(|| self.failed(format!("its format, {name}, is not known")))
        });
        let options = OpenOptions {
            format: format.transpose()?,
            ..OpenOptions::default()
        };
        holdfast_image::open(&self.seed.path, &options).map_err(|error| self.failed(holdfast_block::error_text(&error)))
    }

    /// Clones the file of the seed; false if that is not possible.
    fn is_cloned(&self, file: &File, size_bytes: u64) -> Result<bool> {
        let from = File::open(&self.seed.path).map_err(|error| self.failed(error.to_string()))?;
        if rustix::fs::ioctl_ficlone(file, &from).is_err() {
            return Ok(false);
        }
        let sized = file.set_len(size_bytes).and_then(|()| file.sync_all());
        sized.map_err(|error| self.failed(error.to_string()))?;
        Ok(true)
    }

    fn fill(&mut self, image: &Image, device: &dyn BlockDeviceMut, content: TargetContent) -> Result<()> {
        let total_bytes = image.size_bytes().min(device.size_bytes());
        let seed = SliceDevice::new(image, 0..total_bytes)?;
        let mut reported = self.clock.now();
        let (clock, watch) = (self.clock, &mut *self.watch);
        let mut progress = |done_bytes| {
            let now = clock.now();
            if now.saturating_sub(reported) < REPORT_INTERVAL {
                return Continue::Go;
            }
            reported = now;
            watch(SeedProgress {
                done_bytes,
                total_bytes,
            })
        };
        let filled = fill_device(&seed, device, content, THREADS, &mut progress);
        match filled {
            Ok(_) => Ok(()),
            Err(holdfast_image::Error::Device(error)) if error.is_no_space() => Err(Error::SeedNoSpace {
                path: self.seed.path.clone(),
            }),
            Err(error) => Err(self.failed(holdfast_block::error_text(&error))),
        }
    }
}

/// Whether the image is one raw file, whose bytes are those of the disk.
fn is_raw_file(image: &Image) -> bool {
    match image.layers() {
        [layer] => layer.format == Format::Raw && layer.extent_files.is_empty() && is_file(&layer.path),
        _ => false,
    }
}

fn is_file(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.is_file())
}
