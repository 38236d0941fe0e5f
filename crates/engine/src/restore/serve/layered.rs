//! An overlay and the device below it as one device: ranges that the overlay does not contain are reported as the
//! device below reports them.
//!
//! An overlay reports such ranges as *absent*. Reported to a client as a hole, the client would take the snapshot's
//! data there for zeroes; reported as data, it would read every hole of the snapshot.

use std::ops::Range;

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentKind, ExtentList, FileDeviceMut, OverlayDevice, Result};

/// An overlay in a file, over a base that has no further layers below it.
pub(super) struct OverlayLayer<B>(pub(super) OverlayDevice<B, FileDeviceMut>);

impl<B: BlockDevice> BlockDevice for OverlayLayer<B> {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.0.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let own = self.0.extents(range.clone(), extent_count_max)?;
        let mut whole = ExtentList::new(range.start, extent_count_max);
        for extent in &own {
            if extent.kind != ExtentKind::Absent {
                if !whole.push(extent.length, extent.kind) {
                    return Ok(whole);
                }
                continue;
            }
            let end = extent.offset + extent.length;
            while whole.end() < end {
                let below = self.0.backing().extents(whole.end()..end, extent_count_max)?;
                for part in below.within(whole.end()..end) {
                    let kind = match part.kind {
                        ExtentKind::Absent => ExtentKind::Zero,
                        kind => kind,
                    };
                    if !whole.push(part.length, kind) {
                        return Ok(whole);
                    }
                }
            }
        }
        Ok(whole)
    }

    fn block_size_bytes(&self) -> u32 {
        self.0.block_size_bytes()
    }
}

impl<B: BlockDevice> BlockDeviceMut for OverlayLayer<B> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.0.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.0.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.0.trim(range)
    }

    fn flush(&self) -> Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::{
        BackingId, BlockDevice as _, BlockDeviceMut as _, ExtentKind, FileDeviceMut, IoMode, MemoryDevice,
        OverlayDevice, OverlayOptions,
    };

    use super::OverlayLayer;

    const SIZE_BYTES: u64 = 4 << 20;

    /// Data of the snapshot is reported as data where the overlay has none.
    #[test]
    fn the_layers_below_are_reported() {
        let below = MemoryDevice::new(SIZE_BYTES);
        below.write_at(&vec![5; 1 << 20], 1 << 20).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let options = OverlayOptions::new(BackingId([0; 16]));
        let store_bytes = options.store_size_bytes(SIZE_BYTES).unwrap();
        let store = FileDeviceMut::create_new(&folder.path().join("o"), store_bytes, IoMode::Buffered).unwrap();
        let layered = OverlayLayer(OverlayDevice::create(below, store, options).unwrap());
        layered.write_at(&vec![6; 1 << 20], 3 << 20).unwrap();
        for (offset, is_data) in [(0_u64, false), (1 << 20, true), (2 << 20, false), (3 << 20, true)] {
            for extent_count_max in [1, 100] {
                let list = layered.extents(offset..offset + (1 << 20), extent_count_max).unwrap();
                let mut kinds = list.iter().map(|extent| extent.kind);
                assert!(
                    kinds.all(|kind| (kind == ExtentKind::Data) == is_data),
                    "at {offset}: {list:?}"
                );
                assert!(!list.is_full() || list.end() > offset);
            }
        }
        let all = layered.extents(0..SIZE_BYTES, 100).unwrap();
        assert_eq!(all.end(), SIZE_BYTES);
    }
}
