//! A disk of which only the changes are transferred, over its previous content.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, DirtyBitmap, ExtentList, Result, to_usize};

/// A disk: changes are read from a stream, and the rest from the previous snapshot.
pub(super) struct SinceDevice {
    /// The changes.
    pub(super) stream: Arc<dyn BlockDevice>,
    /// The previous content, of the same size.
    pub(super) base: Arc<dyn BlockDevice>,
    /// The ranges that the stream contains.
    pub(super) changed: DirtyBitmap,
}

impl SinceDevice {
    /// The first part of a range that comes from one source, and that source.
    fn part(&self, range: &Range<u64>) -> (Range<u64>, &dyn BlockDevice) {
        match self
            .changed
            .next_dirty(range.start)
            .filter(|next| next.start < range.end)
        {
            None => (range.clone(), &*self.base),
            Some(next) if next.start > range.start => (range.start..next.start, &*self.base),
            Some(next) => (range.start..next.end.min(range.end), &*self.stream),
        }
    }
}

impl BlockDevice for SinceDevice {
    fn size_bytes(&self) -> u64 {
        self.base.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let mut at = offset;
        let mut rest = buffer;
        while !rest.is_empty() {
            let (part, device) = self.part(&(at..at + rest.len() as u64));
            let (now, later) = rest.split_at_mut(to_usize(part.end - part.start));
            device.read_at(now, at)?;
            at = part.end;
            rest = later;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        if range.is_empty() {
            return Ok(ExtentList::new(range.start, extent_count_max));
        }
        let (part, device) = self.part(&range);
        device.extents(part, extent_count_max)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::{BlockDevice as _, DirtyBitmap, MemoryDevice};

    use super::SinceDevice;

    #[test]
    fn what_has_changed_comes_from_the_stream() {
        let device = |byte| Arc::new(MemoryDevice::from_bytes(&[byte; 8192]));
        let mut changed = DirtyBitmap::new(8192, 1024).unwrap();
        changed.set(1024..3072);
        changed.set(7168..8192);
        let disk = SinceDevice {
            stream: device(2),
            base: device(1),
            changed,
        };
        let mut bytes = [0; 8192 - 100];
        disk.read_at(&mut bytes, 100).unwrap();
        for (at, byte) in (100..).zip(bytes) {
            let is_changed = (1024..3072).contains(&at) || at >= 7168;
            assert_eq!(byte, if is_changed { 2 } else { 1 }, "{at}");
        }
        assert_eq!(disk.extents(100..8192, 8).unwrap().end(), 1024);
        assert_eq!(disk.extents(2000..8192, 8).unwrap().end(), 3072);
    }
}
