//! Features, limits, and the configuration space of a virtio block device (section 5.2.4). Pure.

/// The largest number of queues of a device.
pub const QUEUE_COUNT_MAX: u16 = 256;
/// The largest ring: QEMU permits no larger one.
pub(super) const QUEUE_SIZE_MAX: u16 = 1024;
/// The unit of positions and of the capacity, for all sizes of sectors.
pub(super) const SECTOR_BYTES: u64 = 512;
/// Ranges of one request to discard or to write zeroes.
pub(super) const RANGE_COUNT_MAX: u32 = 32;
/// Sectors of one of these ranges: 1 GiB.
pub(super) const RANGE_SECTOR_COUNT_MAX: u32 = 1 << 21;
/// Data segments of a request. With header and status, a request fits into a ring of 128, QEMU's default.
pub(super) const SEGMENT_COUNT_MAX: u32 = 126;
/// Bytes of a segment.
pub(super) const SEGMENT_BYTES_MAX: u32 = 1 << 20;
/// Bytes of data that a request transfers.
pub(super) const TRANSFER_BYTES_MAX: u64 = SEGMENT_COUNT_MAX as u64 * SEGMENT_BYTES_MAX as u64;

/// Bytes of the configuration space that the device has: up to the limits of write zeroes. The rest reads as zero.
const SPACE_BYTES: usize = 60;
/// The largest configuration space of the protocol.
const SPACE_BYTES_MAX: usize = 256;
/// The offset of the only byte that drivers may change: whether the device has a write cache.
const WRITE_CACHE_OFFSET: u32 = 32;

pub(super) mod features {
    pub(in super::super) const SIZE_MAX: u64 = 1 << 1;
    pub(in super::super) const SEG_MAX: u64 = 1 << 2;
    pub(in super::super) const RO: u64 = 1 << 5;
    pub(in super::super) const BLK_SIZE: u64 = 1 << 6;
    pub(in super::super) const FLUSH: u64 = 1 << 9;
    pub(in super::super) const TOPOLOGY: u64 = 1 << 10;
    pub(in super::super) const CONFIG_WCE: u64 = 1 << 11;
    pub(in super::super) const MQ: u64 = 1 << 12;
    pub(in super::super) const DISCARD: u64 = 1 << 13;
    pub(in super::super) const WRITE_ZEROES: u64 = 1 << 14;
    pub(in super::super) const INDIRECT_DESC: u64 = 1 << 28;
    pub(in super::super) const EVENT_IDX: u64 = 1 << 29;
    pub(in super::super) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(in super::super) const VERSION_1: u64 = 1 << 32;
}

/// Size of the logical blocks that a guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VhostSectorSize {
    /// 512 bytes.
    #[default]
    Bytes512,
    /// 4096 bytes. A guest that was installed on sectors of 512 bytes does not find its partitions.
    Bytes4096,
}

impl VhostSectorSize {
    /// The size in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Bytes512 => 512,
            Self::Bytes4096 => 4096,
        }
    }
}

/// Whether the guest can change the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuestAccess {
    ReadOnly,
    Writable,
}

/// Whether completed writes may be in a cache until the next flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteCache {
    WriteBack,
    WriteThrough,
}

/// What a guest can learn about its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DiskProperties {
    /// Size in bytes; a multiple of the sector size.
    pub(super) size_bytes: u64,
    pub(super) sector_size: VhostSectorSize,
    /// Bytes that the device writes efficiently; a power of two.
    pub(super) block_size_bytes: u32,
    pub(super) access: GuestAccess,
    pub(super) queue_count: u16,
}

impl DiskProperties {
    /// The features that are offered.
    pub(super) fn features(&self) -> u64 {
        use features::{
            BLK_SIZE, CONFIG_WCE, DISCARD, EVENT_IDX, FLUSH, INDIRECT_DESC, MQ, PROTOCOL_FEATURES, RO, SEG_MAX,
            SIZE_MAX, TOPOLOGY, VERSION_1, WRITE_ZEROES,
        };
        let ring = INDIRECT_DESC | EVENT_IDX | VERSION_1 | PROTOCOL_FEATURES;
        let disk = SIZE_MAX | SEG_MAX | BLK_SIZE | TOPOLOGY | MQ | FLUSH;
        let access = match self.access {
            GuestAccess::ReadOnly => RO,
            GuestAccess::Writable => CONFIG_WCE | DISCARD | WRITE_ZEROES,
        };
        ring | disk | access
    }

    /// `length` bytes of the configuration space from `offset` on; `None` outside it.
    pub(super) fn space(&self, cache: WriteCache, offset: u32, length: u32) -> Option<Vec<u8>> {
        let mut space = self.fields(cache);
        space.resize(SPACE_BYTES_MAX, 0);
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(length).ok()?)?;
        space.get(start..end).map(<[u8]>::to_vec)
    }

    /// The fields in their order: `struct virtio_blk_config`.
    fn fields(&self, cache: WriteCache) -> Vec<u8> {
        let sector_size = self.sector_size.bytes();
        let blocks = (self.block_size_bytes.max(sector_size) / sector_size).clamp(1, 1 << 15);
        let exponent = u8::try_from(blocks.ilog2()).unwrap_or(0);
        let minimum = u16::try_from(blocks).unwrap_or(1);
        let alignment = sector_size / 512;
        let mut space = Vec::with_capacity(SPACE_BYTES_MAX);
        space.extend((self.size_bytes / SECTOR_BYTES).to_le_bytes());
        space.extend(SEGMENT_BYTES_MAX.to_le_bytes());
        space.extend(SEGMENT_COUNT_MAX.to_le_bytes());
        // Cylinders, heads and sectors: obsolete.
        space.extend([0; 4]);
        space.extend(sector_size.to_le_bytes());
        // Topology: size of physical blocks, offset of the first one, smallest and best size of requests.
        space.extend([exponent, 0]);
        space.extend(minimum.to_le_bytes());
        space.extend(blocks.to_le_bytes());
        space.extend([u8::from(cache == WriteCache::WriteBack), 0]);
        space.extend(self.queue_count.to_le_bytes());
        let (range_sectors, range_count) = match self.access {
            GuestAccess::ReadOnly => (0, 0),
            GuestAccess::Writable => (RANGE_SECTOR_COUNT_MAX, RANGE_COUNT_MAX),
        };
        for field in [range_sectors, range_count, alignment, range_sectors, range_count] {
            space.extend(field.to_le_bytes());
        }
        // Write zeroes may release space.
        space.extend([u8::from(self.access == GuestAccess::Writable), 0, 0, 0]);
        debug_assert_eq!(space.len(), SPACE_BYTES, "the layout of the specification");
        space
    }

    /// The cache that a driver chooses by writing to the configuration space; `None` if it may not write these bytes.
    pub(super) fn chosen_cache(&self, offset: u32, bytes: &[u8]) -> Option<WriteCache> {
        match (self.access, offset, bytes) {
            (GuestAccess::Writable, WRITE_CACHE_OFFSET, [0]) => Some(WriteCache::WriteThrough),
            (GuestAccess::Writable, WRITE_CACHE_OFFSET, [1]) => Some(WriteCache::WriteBack),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DiskProperties, GuestAccess, SPACE_BYTES, VhostSectorSize, WriteCache, features};

    const DISK: DiskProperties = DiskProperties {
        size_bytes: 8 << 30,
        sector_size: VhostSectorSize::Bytes512,
        block_size_bytes: 4096,
        access: GuestAccess::Writable,
        queue_count: 4,
    };

    fn number(bytes: &[u8]) -> u64 {
        bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// Offsets of `struct virtio_blk_config` in section 5.2.4.
    #[test]
    fn fields_are_where_drivers_expect_them() {
        let field = |offset: u32, length: u32| number(&DISK.space(WriteCache::WriteBack, offset, length).unwrap());
        for (offset, length, value, name) in [
            (0, 8, 8 << 21, "capacity"),
            (8, 4, 1 << 20, "size_max"),
            (12, 4, 126, "seg_max"),
            (20, 4, 512, "blk_size"),
            (24, 1, 3, "physical_block_exp"),
            (25, 1, 0, "alignment_offset"),
            (26, 2, 8, "min_io_size"),
            (28, 4, 8, "opt_io_size"),
            (32, 1, 1, "writeback"),
            (34, 2, 4, "num_queues"),
            (36, 4, 1 << 21, "max_discard_sectors"),
            (40, 4, 32, "max_discard_seg"),
            (44, 4, 1, "discard_sector_alignment"),
            (48, 4, 1 << 21, "max_write_zeroes_sectors"),
            (52, 4, 32, "max_write_zeroes_seg"),
            (56, 1, 1, "write_zeroes_may_unmap"),
            (60, 196, 0, "the rest"),
        ] {
            assert_eq!(field(offset, length), value, "{name}");
        }
        assert_eq!(DISK.fields(WriteCache::WriteBack).len(), SPACE_BYTES);
        for (offset, length) in [(256, 1), (0, 257), (255, 2), (u32::MAX, 1), (1, u32::MAX)] {
            assert_eq!(DISK.space(WriteCache::WriteBack, offset, length), None);
        }
    }

    #[test]
    fn large_sectors_have_no_physical_exponent() {
        let disk = DiskProperties {
            sector_size: VhostSectorSize::Bytes4096,
            ..DISK
        };
        let space = disk.space(WriteCache::WriteThrough, 0, 60).unwrap();
        assert_eq!(number(&space[20..24]), 4096);
        assert_eq!((space[24], number(&space[26..28]), space[32]), (0, 1, 0));
        assert_eq!(
            number(&space[44..48]),
            8,
            "discards are aligned to sectors of the guest"
        );
        assert_eq!(number(&space[..8]), 8 << 21, "the capacity is in units of 512 bytes");
    }

    #[test]
    fn only_the_cache_can_be_written() {
        let readable = DiskProperties {
            access: GuestAccess::ReadOnly,
            ..DISK
        };
        assert_eq!(DISK.chosen_cache(32, &[0]), Some(WriteCache::WriteThrough));
        assert_eq!(DISK.chosen_cache(32, &[1]), Some(WriteCache::WriteBack));
        for (disk, offset, bytes) in [
            (&DISK, 32, &[2][..]),
            (&DISK, 31, &[0]),
            (&DISK, 33, &[0]),
            (&DISK, 32, &[0, 0]),
            (&DISK, 32, &[]),
            (&DISK, 0, &[0; 60]),
            (&readable, 32, &[0]),
        ] {
            assert_eq!(disk.chosen_cache(offset, bytes), None, "{offset} {bytes:?}");
        }
        assert_eq!(
            readable.features() & (features::DISCARD | features::WRITE_ZEROES | features::CONFIG_WCE),
            0
        );
        assert_ne!(readable.features() & features::RO, 0);
        assert_eq!(DISK.features() & features::RO, 0);
    }
}
