//! Concatenates the extent files of an image to one address space.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{ExtentKind, ExtentList, Result};

use crate::file::ImageFile;

/// Address space of each file: larger than any file.
pub(crate) const WINDOW_BYTES: u64 = 1 << 48;

/// Files, each at a multiple of [`WINDOW_BYTES`].
pub(crate) struct Concatenated {
    pub(crate) files: Vec<Arc<dyn ImageFile>>,
}

impl Concatenated {
    /// Sum of the lengths of all files.
    pub(crate) fn sum_bytes(&self) -> Result<u64> {
        self.files
            .iter()
            .try_fold(0, |sum, file| Ok(file.length_bytes()? + sum))
    }

    /// The file whose window contains `offset`.
    pub(crate) fn at(&self, offset: u64) -> Result<&Arc<dyn ImageFile>> {
        let index = usize::try_from(offset / WINDOW_BYTES).unwrap_or(usize::MAX);
        self.files.get(index).ok_or_else(|| {
            holdfast_block::Error::io(
                "find a file",
                offset,
                std::io::Error::from(std::io::ErrorKind::NotFound),
            )
        })
    }

    fn file(&self, offset: u64) -> Result<(&dyn ImageFile, u64)> {
        Ok((&**self.at(offset)?, offset % WINDOW_BYTES))
    }
}

impl ImageFile for Concatenated {
    /// The end of the last file.
    fn length_bytes(&self) -> Result<u64> {
        let start = self.files.len().saturating_sub(1) as u64 * WINDOW_BYTES;
        Ok(start + self.at(start)?.length_bytes()?)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let (file, at) = self.file(offset)?;
        file.read_at(buffer, at)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let (file, at) = self.file(offset)?;
        file.write_at(data, at)
    }

    /// Sets the length of the file whose window contains it.
    fn set_length(&self, length_bytes: u64) -> Result<()> {
        let (file, at) = self.file(length_bytes)?;
        file.set_length(at)
    }

    fn punch(&self, range: Range<u64>) -> Result<()> {
        let (file, at) = self.file(range.start)?;
        file.punch(at..at + (range.end - range.start))
    }

    fn sync(&self) -> Result<()> {
        self.files.iter().try_for_each(|file| file.sync())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let (file, at) = self.file(range.start)?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        let length = range.end - range.start;
        let held = file.length_bytes()?.saturating_sub(at).min(length);
        if held > 0 {
            for extent in file.extents(at..at + held, extent_count_max)? {
                if !list.push(extent.length, extent.kind) {
                    return Ok(list);
                }
            }
        }
        if list.end() == range.start + held {
            list.push(length - held, ExtentKind::Zero);
        }
        Ok(list)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        let mut sum = 0;
        for file in &self.files {
            let Some(bytes) = file.allocated_bytes()? else {
                return Ok(None);
            };
            sum += bytes;
        }
        Ok(Some(sum))
    }
}
