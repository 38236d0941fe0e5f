//! Sizes and index arithmetic of an image.

/// Size of an L1 entry and of a refcount table entry.
pub(crate) const POINTER_BYTES: u64 = 8;
/// The host offset in L1 and L2 entries: bits 9 to 55.
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Subclusters of a cluster in an image with extended L2 entries.
pub(crate) const SUBCLUSTER_COUNT: u64 = 32;

/// Whether L2 entries describe subclusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum L2Kind {
    /// No: 8 bytes per cluster.
    Standard,
    /// Yes: 16 bytes per cluster; the second half says which of the 32 subclusters are allocated, and which are zero.
    Extended,
}

/// Sizes from the header, which never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Qcow2Geometry {
    /// log2 of the cluster size, 9 to 21.
    pub(crate) cluster_bits: u32,
    /// log2 of the width of a refcount in bits, 0 to 6.
    pub(crate) refcount_order: u32,
    pub(crate) l2_kind: L2Kind,
}

impl Qcow2Geometry {
    pub(crate) fn cluster_bytes(self) -> u64 {
        1 << self.cluster_bits
    }

    pub(crate) fn offset_in_cluster(self, offset: u64) -> u64 {
        offset & (self.cluster_bytes() - 1)
    }

    pub(crate) fn cluster_of(self, offset: u64) -> u64 {
        offset >> self.cluster_bits
    }

    pub(crate) fn offset_of(self, cluster: u64) -> u64 {
        cluster << self.cluster_bits
    }

    /// Clusters needed for `length_bytes`.
    pub(crate) fn clusters_for(self, length_bytes: u64) -> u64 {
        length_bytes.div_ceil(self.cluster_bytes())
    }

    pub(crate) fn is_aligned(self, offset: u64) -> bool {
        self.offset_in_cluster(offset) == 0
    }

    /// 64-bit words per L2 entry.
    pub(crate) fn l2_entry_words(self) -> u64 {
        match self.l2_kind {
            L2Kind::Standard => 1,
            L2Kind::Extended => 2,
        }
    }

    /// Guest clusters that one L2 table maps.
    pub(crate) fn l2_entries(self) -> u64 {
        self.cluster_bytes() / (POINTER_BYTES * self.l2_entry_words())
    }

    /// Guest bytes that one L2 table maps.
    pub(crate) fn l2_coverage_bytes(self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// L1 entries that a disk of `size_bytes` needs.
    pub(crate) fn l1_entries_for(self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.l2_coverage_bytes())
    }

    /// Size of a subcluster, or of a cluster if there are none.
    pub(crate) fn subcluster_bytes(self) -> u64 {
        match self.l2_kind {
            L2Kind::Standard => self.cluster_bytes(),
            L2Kind::Extended => self.cluster_bytes() / SUBCLUSTER_COUNT,
        }
    }

    /// Host clusters that one refcount block counts.
    pub(crate) fn refcount_block_entries(self) -> u64 {
        (self.cluster_bytes() * 8) >> self.refcount_order
    }

    /// The maximum refcount.
    pub(crate) fn refcount_max(self) -> u64 {
        match self.refcount_order {
            6 => u64::MAX,
            order => (1 << (1 << order)) - 1,
        }
    }
}
