//! The purposes of derived keys.

/// What a key is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Sealing the frames of packs.
    PackSealing,
    /// Sealing index segments.
    IndexSealing,
    /// Sealing the configuration and the manifests of snapshots.
    ManifestSealing,
    /// Sealing the markers by which writers and gc agree.
    MarkerSealing,
    /// The keyed hash by which changed blocks are found.
    BlockHash,
    /// The keyed hash that is the identity of a chunk.
    ChunkId,
    /// The seed of the table that cuts streams into chunks, so that lengths of chunks do not tell what is in them.
    StreamCut,
}

impl Purpose {
    /// Every purpose; the code of one is its place here, counted from 1.
    pub const ALL: [Self; 7] = [
        Self::PackSealing,
        Self::IndexSealing,
        Self::ManifestSealing,
        Self::MarkerSealing,
        Self::BlockHash,
        Self::ChunkId,
        Self::StreamCut,
    ];

    /// The context of BLAKE3's key derivation; never change one, never use one twice.
    pub(super) const fn context(self) -> &'static str {
        match self {
            Self::PackSealing => "holdfast 2026 repository v1 pack sealing",
            Self::IndexSealing => "holdfast 2026 repository v1 index sealing",
            Self::ManifestSealing => "holdfast 2026 repository v1 manifest sealing",
            Self::MarkerSealing => "holdfast 2026 repository v1 marker sealing",
            Self::BlockHash => "holdfast 2026 repository v1 block hash",
            Self::ChunkId => "holdfast 2026 repository v1 chunk id",
            Self::StreamCut => "holdfast 2026 repository v1 stream cut seed",
        }
    }

    pub(super) const fn index(self) -> usize {
        self as usize
    }

    /// The number that stands for the purpose in stored objects.
    pub(crate) const fn code(self) -> u16 {
        self as u16 + 1
    }
}
