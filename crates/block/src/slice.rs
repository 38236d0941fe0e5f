//! A part of a device as a device: a partition, or an image inside an archive.

use std::ops::Range;

use crate::device::range_length;
use crate::{BlockDevice, BlockDeviceMut, ExtentList, Result};

/// The bytes of one range of a device.
#[derive(Debug)]
pub struct SliceDevice<D> {
    device: D,
    start: u64,
    size_bytes: u64,
}

impl<D: BlockDevice> SliceDevice<D> {
    /// The bytes of `range` of `device`; [`Error::OutOfBounds`](crate::Error::OutOfBounds) if it reaches past the end.
    pub fn new(device: D, range: Range<u64>) -> Result<Self> {
        let size_bytes = range_length(&range);
        device.check_bounds(range.start, size_bytes)?;
        Ok(Self {
            device,
            start: range.start,
            size_bytes,
        })
    }

    /// Converts the range of a request to a range of the underlying device; an error if the request reaches past the
    /// end of the slice.
    fn below(&self, range: &Range<u64>) -> Result<Range<u64>> {
        let length = range_length(range);
        self.check_bounds(range.start, length)?;
        let start = self.start + range.start;
        Ok(start..start + length)
    }
}

impl<D: BlockDevice> BlockDevice for SliceDevice<D> {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.device.read_at(buffer, self.start + offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        for extent in self.device.extents(self.below(&range)?, extent_count_max)? {
            list.push(extent.length, extent.kind);
        }
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl<D: BlockDeviceMut> BlockDeviceMut for SliceDevice<D> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        self.device.write_at(data, self.start + offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.device.write_zeroes(self.below(&range)?)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.device.trim(self.below(&range)?)
    }

    fn flush(&self) -> Result<()> {
        self.device.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::SliceDevice;
    use crate::testing::conformance::Conformance;
    use crate::{BlockDevice, BlockDeviceMut, Error, MemoryDevice};

    #[test]
    fn conforms_at_an_odd_offset_and_leaves_its_neighbours_alone() {
        Conformance::new().check_mutable(|size| {
            let whole = MemoryDevice::new(size + 5000);
            whole
                .write_at(&vec![0xFF; 5000 + usize::try_from(size).unwrap()], 0)
                .unwrap();
            SliceDevice::new(whole, 1001..size + 1001).unwrap()
        });
        let whole = MemoryDevice::from_bytes(&[0xFF; 100]);
        let slice = SliceDevice::new(&whole, 10..20).unwrap();
        slice.write_zeroes(0..10).unwrap();
        slice.write_at(&[1; 10], 0).unwrap();
        slice.trim(5..10).unwrap();
        let bytes = whole.to_bytes();
        assert!(bytes[..10].iter().chain(&bytes[20..]).all(|byte| *byte == 0xFF));
    }

    #[test]
    fn a_slice_past_the_end_is_refused() {
        let whole = MemoryDevice::new(100);
        assert!(matches!(
            SliceDevice::new(&whole, 50..101),
            Err(Error::OutOfBounds { .. })
        ));
        assert_eq!(SliceDevice::new(&whole, 100..100).unwrap().size_bytes(), 0);
    }
}
