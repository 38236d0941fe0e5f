//! Encodes and decodes L2 entries.
//!
//! ```text
//! bit 63      copied: the host cluster is used once, and may be written in place
//! bit 62      compressed
//! bit 0       reads as zero (version 3, standard entries only)
//! bits 9-55   host offset; 0 means none, except in an external data file
//! others      reserved; they must be 0, and readers ignore them
//!
//! compressed  x = 62 - (cluster_bits - 8)
//!             bits 0..x    host offset of the first byte, in any position
//!             bits x..62   512-byte sectors that the data touches after the first one
//!
//! second word of an extended entry
//! bits 0-31   subcluster is allocated
//! bits 32-63  subcluster reads as zero
//! ```

use super::geometry::{L2Kind, OFFSET_MASK, Qcow2Geometry};
use crate::model::mapped_extent::Compressed;

/// Bit 63 of L1 and L2 entries.
pub(crate) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;

/// The problem of an entry with the copied flag that has lost its offset, as by a flipped bit: it reads as absent, and
/// its cluster looks leaked.
pub(crate) const LOST_PLACE: &str = "it has the copied flag, but no host offset";

/// Reserved bits of L1 entries.
pub(crate) const L1_RESERVED: u64 = !(COPIED | OFFSET_MASK);

/// A stored L2 entry; the second word is 0 in images without extended entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct L2Entry {
    pub(crate) word: u64,
    pub(crate) bitmap: u64,
}

/// A decoded [`L2Entry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterKind {
    /// Reads from the backing file, or as zero.
    Unallocated,
    /// Reads as zero; a host cluster may be preallocated.
    Zero {
        host: Option<HostCluster>,
    },
    /// Stored uncompressed.
    Data {
        host: HostCluster,
    },
    Compressed(Compressed),
    /// Extended entry: each subcluster has its own state.
    Subclusters {
        host: Option<HostCluster>,
        allocated: u32,
        zero: u32,
    },
}

/// The host cluster of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostCluster {
    pub(crate) offset: u64,
    pub(crate) sharing: Sharing,
}

/// Whether a host cluster may be written in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Yes: its refcount is 1.
    Exclusive,
    /// No: a snapshot may use it, too.
    Shared,
}

impl Compressed {
    /// The sectors that it touches, which refcounts count.
    pub(crate) fn sectors(self) -> std::ops::Range<u64> {
        self.offset & !511..self.offset + self.length_bytes
    }
}

/// Where the data of an image is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataLocation {
    /// In the image file.
    Inside,
    /// In an external data file, where 0 is a valid offset.
    External,
}

impl ClusterKind {
    /// The uncompressed host cluster, if there is one.
    pub(crate) fn host(self) -> Option<HostCluster> {
        match self {
            Self::Data { host } => Some(host),
            Self::Zero { host } | Self::Subclusters { host, .. } => host,
            Self::Unallocated | Self::Compressed(_) => None,
        }
    }

    /// The host offset, if it is invalid: in a data file every cluster must have the offset that it has on the disk,
    /// according to the specification of external data files. QEMU refuses others, and no refcount would show that two
    /// entries share one.
    pub(crate) fn invalid_host_offset(self, place: DataLocation, disk_offset: u64) -> Option<u64> {
        let host = self.host().filter(|_| place == DataLocation::External)?;
        (host.offset != disk_offset).then_some(host.offset)
    }
}

impl L2Entry {
    /// A fully allocated cluster.
    pub(crate) fn data(offset: u64, geometry: Qcow2Geometry) -> Self {
        Self {
            word: offset | COPIED,
            bitmap: match geometry.l2_kind {
                L2Kind::Standard => 0,
                L2Kind::Extended => u64::from(u32::MAX),
            },
        }
    }

    /// A cluster that reads as zero and takes no space (version 3).
    pub(crate) fn zero(geometry: Qcow2Geometry) -> Self {
        match geometry.l2_kind {
            L2Kind::Standard => Self { word: ZERO, bitmap: 0 },
            L2Kind::Extended => Self {
                word: 0,
                bitmap: u64::from(u32::MAX) << 32,
            },
        }
    }

    /// A cluster with subclusters, stored at `offset`.
    pub(crate) fn subclusters(offset: u64, allocated: u32, zero: u32) -> Self {
        Self {
            word: offset | COPIED,
            bitmap: u64::from(zero) << 32 | u64::from(allocated),
        }
    }

    /// A compressed cluster of `length_bytes` at `offset`.
    pub(crate) fn compressed(offset: u64, length_bytes: u64, geometry: Qcow2Geometry) -> Self {
        let shift = compressed_shift(geometry);
        let extra_sectors = (offset + length_bytes - 1) / 512 - offset / 512;
        Self {
            word: COMPRESSED | extra_sectors << shift | offset,
            bitmap: 0,
        }
    }

    /// Reserved bits that are set. A compressed entry has none, and in an extended one the bitmap marks zeroes.
    pub(crate) fn reserved(self, geometry: Qcow2Geometry) -> u64 {
        let zero = match geometry.l2_kind {
            L2Kind::Standard => ZERO,
            L2Kind::Extended => 0,
        };
        if self.word & COMPRESSED != 0 {
            return 0;
        }
        self.word & !(COPIED | OFFSET_MASK | zero)
    }

    /// Decodes the entry; an invalid one gives the reason.
    pub(crate) fn meaning(self, geometry: Qcow2Geometry, place: DataLocation) -> Result<ClusterKind, String> {
        if self.word & COMPRESSED != 0 {
            return self.compressed_meaning(geometry, place);
        }
        let offset = self.word & OFFSET_MASK;
        if !geometry.is_aligned(offset) {
            return Err(format!("host offset {offset} is not a multiple of the cluster size"));
        }
        let sharing = if self.word & COPIED == 0 {
            Sharing::Shared
        } else {
            Sharing::Exclusive
        };
        let is_allocated = offset != 0 || (place == DataLocation::External && sharing == Sharing::Exclusive);
        let host = is_allocated.then_some(HostCluster { offset, sharing });
        match (geometry.l2_kind, host) {
            (L2Kind::Extended, host) => self.subcluster_meaning(host),
            (L2Kind::Standard, host) if self.word & ZERO != 0 => Ok(ClusterKind::Zero { host }),
            (L2Kind::Standard, Some(host)) => Ok(ClusterKind::Data { host }),
            (L2Kind::Standard, None) => Ok(ClusterKind::Unallocated),
        }
    }

    fn compressed_meaning(self, geometry: Qcow2Geometry, place: DataLocation) -> Result<ClusterKind, String> {
        if place == DataLocation::External {
            return Err("compressed cluster in an image with an external data file".to_owned());
        }
        if self.bitmap != 0 {
            return Err("compressed cluster with subclusters".to_owned());
        }
        let shift = compressed_shift(geometry);
        let offset = self.word & ((1 << shift) - 1);
        let sectors = ((self.word & (COMPRESSED - 1)) >> shift) + 1;
        Ok(ClusterKind::Compressed(Compressed {
            offset,
            length_bytes: sectors * 512 - offset % 512,
        }))
    }

    fn subcluster_meaning(self, host: Option<HostCluster>) -> Result<ClusterKind, String> {
        let [zero, allocated] = self.bitmap_halves();
        if zero & allocated != 0 {
            return Err(format!(
                "subclusters both allocated and zero: {zero:#010x} and {allocated:#010x}"
            ));
        }
        if allocated != 0 && host.is_none() {
            return Err(format!(
                "subclusters {allocated:#010x} allocated without a host cluster"
            ));
        }
        Ok(match (host, allocated, zero) {
            (None, _, 0) => ClusterKind::Unallocated,
            (host, 0, u32::MAX) => ClusterKind::Zero { host },
            (Some(host), u32::MAX, _) => ClusterKind::Data { host },
            (host, allocated, zero) => ClusterKind::Subclusters { host, allocated, zero },
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "the halves of a 64-bit word")]
    fn bitmap_halves(self) -> [u32; 2] {
        [(self.bitmap >> 32) as u32, self.bitmap as u32]
    }
}

fn compressed_shift(geometry: Qcow2Geometry) -> u32 {
    62 - (geometry.cluster_bits - 8)
}

/// End of the host offsets that a compressed entry can have.
pub(crate) fn compressed_offset_end(geometry: Qcow2Geometry) -> u64 {
    // Writers respect the limit of standard entries, too.
    (1 << compressed_shift(geometry)).min(1 << 56)
}

#[cfg(test)]
mod tests {
    use super::{COPIED, ClusterKind, Compressed, DataLocation, HostCluster, L2Entry, Sharing};
    use crate::formats::qcow2::geometry::{L2Kind, Qcow2Geometry};

    fn geometry(cluster_bits: u32, l2_kind: L2Kind) -> Qcow2Geometry {
        Qcow2Geometry {
            cluster_bits,
            refcount_order: 4,
            l2_kind,
        }
    }

    #[test]
    fn compressed_entry_covers_whole_sectors() {
        for cluster_bits in 9..=21 {
            let geometry = geometry(cluster_bits, L2Kind::Standard);
            for (offset, length_bytes) in [
                (65_536, 1),
                (65_537, 511),
                (65_537, 512),
                (70_000, 1 << (cluster_bits - 1)),
            ] {
                let entry = L2Entry::compressed(offset, length_bytes, geometry);
                let Ok(ClusterKind::Compressed(found)) = entry.meaning(geometry, DataLocation::Inside) else {
                    panic!("not compressed: {entry:x?}");
                };
                assert_eq!(found.offset, offset);
                assert!(found.length_bytes >= length_bytes && found.length_bytes < length_bytes + 512);
                assert_eq!((offset + found.length_bytes) % 512, 0);
            }
        }
    }

    #[test]
    fn offset_zero_is_valid_in_a_data_file_only() {
        let geometry = geometry(16, L2Kind::Standard);
        let entry = L2Entry {
            word: COPIED,
            bitmap: 0,
        };
        assert_eq!(
            entry.meaning(geometry, DataLocation::Inside),
            Ok(ClusterKind::Unallocated)
        );
        let host = HostCluster {
            offset: 0,
            sharing: Sharing::Exclusive,
        };
        assert_eq!(
            entry.meaning(geometry, DataLocation::External),
            Ok(ClusterKind::Data { host })
        );
    }

    #[test]
    fn reserved_bits_of_entries() {
        let standard = geometry(16, L2Kind::Standard);
        let extended = geometry(16, L2Kind::Extended);
        let reserved = |word, geometry| L2Entry { word, bitmap: 0 }.reserved(geometry);
        let plain = COPIED | 0x00ff_ffff_ffff_0000;
        assert_eq!((reserved(plain, standard), reserved(plain, extended)), (0, 0));
        assert_eq!((reserved(plain | 1, standard), reserved(plain | 1, extended)), (0, 1));
        for bit in [1, 3, 8, 56, 60, 61] {
            assert_eq!(reserved(plain | 1 << bit, standard), 1 << bit);
            assert_eq!(reserved(1 << bit, extended), 1 << bit);
        }
        // The maximum number of sectors, at an odd offset.
        let compressed = L2Entry::compressed(0x10fff, 65_535, standard);
        assert_eq!((compressed.reserved(standard), compressed.reserved(extended)), (0, 0));
    }

    #[test]
    fn inconsistent_name_and_content_is_refused() {
        let standard = geometry(16, L2Kind::Standard);
        let extended = geometry(16, L2Kind::Extended);
        let unaligned = L2Entry {
            word: 0x10200,
            bitmap: 0,
        };
        assert!(unaligned.meaning(standard, DataLocation::Inside).is_err());
        let both = L2Entry {
            word: 0x10000,
            bitmap: 1 << 32 | 1,
        };
        assert!(both.meaning(extended, DataLocation::Inside).is_err());
        let without_host = L2Entry { word: 0, bitmap: 1 };
        assert!(without_host.meaning(extended, DataLocation::Inside).is_err());
        let outside = L2Entry::compressed(0x10000, 10, standard);
        assert!(outside.meaning(standard, DataLocation::External).is_err());
        assert_eq!(
            outside.meaning(standard, DataLocation::Inside),
            Ok(ClusterKind::Compressed(Compressed {
                offset: 0x10000,
                length_bytes: 512
            }))
        );
    }
}
