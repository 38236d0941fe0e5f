//! Holes of files.

use std::ops::Range;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::open::{Medium, OpenFile};
use crate::{Error, ExtentKind, ExtentList, Result};

/// The result of `SEEK_DATA`.
enum NextData {
    At(u64),
    /// There is only a hole up to the end of the file.
    None,
    /// The file system does not support `SEEK_DATA`.
    Unknown,
}

impl OpenFile {
    /// Finds extents by `SEEK_DATA` and `SEEK_HOLE`. If the file system, or a block device, does not support them,
    /// everything is data.
    pub(super) fn extents(&self, range: &Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        if self.medium == Medium::BlockDevice {
            list.push(range.end.saturating_sub(range.start), ExtentKind::Data);
            return Ok(list);
        }
        while list.end() < range.end {
            let (data, hole) = match self.next_data(list.end())? {
                NextData::At(data) => (data, self.next_hole(data)?),
                NextData::None => (range.end, range.end),
                NextData::Unknown => (list.end(), range.end),
            };
            let zero = data.min(range.end) - list.end();
            if !list.push(zero, ExtentKind::Zero) {
                break;
            }
            let data_end = hole.min(range.end);
            if !list.push(data_end.saturating_sub(list.end()), ExtentKind::Data) {
                break;
            }
        }
        Ok(list)
    }

    fn next_data(&self, offset: u64) -> Result<NextData> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(offset)) {
            Ok(data) => Ok(NextData::At(data.max(offset))),
            // Either a hole up to the end, or the offset does not exist: a truncated file must not be reported as
            // zeroes.
            Err(Errno::NXIO) => {
                let metadata = self
                    .file
                    .metadata()
                    .map_err(|error| Error::io("look for the size", offset, error))?;
                if metadata.len() < self.size_bytes {
                    return Err(self.shrunk(metadata.len().max(offset)));
                }
                Ok(NextData::None)
            }
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(NextData::Unknown),
            Err(errno) => Err(Error::io("look for data", offset, errno)),
        }
    }

    /// The end of the data at `data`, at least one block later: the data may be removed between the two calls.
    fn next_hole(&self, data: u64) -> Result<u64> {
        let least = data.saturating_add(self.block_size_bytes.into());
        match rustix::fs::seek(&self.file, SeekFrom::Hole(data)) {
            Ok(hole) if hole > data => Ok(hole),
            Ok(_) | Err(Errno::NXIO) => Ok(least),
            Err(errno) => Err(Error::io("look for a hole", data, errno)),
        }
    }
}
