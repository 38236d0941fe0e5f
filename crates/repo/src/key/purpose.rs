//! The purposes of derived keys.

/// The purpose of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Sealing the frames of packs.
    PackSealing,
    /// Sealing index segments.
    IndexSealing,
    /// Sealing the configuration and the manifests of snapshots.
    ManifestSealing,
    /// Sealing the markers with which writers and gc coordinate.
    MarkerSealing,
    /// The keyed hash that detects changed blocks.
    BlockHash,
    /// The keyed hash that identifies chunks.
    ChunkId,
    /// The seed of the stream chunker's table, so that chunk lengths do not reveal the content.
    StreamCut,
}

impl Purpose {
    /// Every purpose; its code is its position here, counted from 1.
    pub const ALL: [Self; 7] = [
        Self::PackSealing,
        Self::IndexSealing,
        Self::ManifestSealing,
        Self::MarkerSealing,
        Self::BlockHash,
        Self::ChunkId,
        Self::StreamCut,
    ];

    /// The context of BLAKE3's key derivation; contexts must never be changed or reused.
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

    /// The code of the purpose in stored objects.
    pub(crate) const fn code(self) -> u16 {
        self as u16 + 1
    }
}
