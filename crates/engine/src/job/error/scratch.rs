//! Why the copy of a running machine was stopped: the scratch files for overwritten blocks became too large.

/// Why the copy was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScratchOverrun {
    /// The scratch files exceeded their limit.
    ScratchMax {
        /// Their size in bytes.
        used_bytes: u64,
        /// Their limit in bytes.
        max_bytes: u64,
    },
    /// Their file system was nearly full.
    NearlyFull {
        /// Size of the scratch files in bytes.
        used_bytes: u64,
        /// Free bytes of the file system.
        free_bytes: u64,
        /// Bytes that must stay free.
        reserve_bytes: u64,
    },
}

impl std::fmt::Display for ScratchOverrun {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ScratchMax { used_bytes, max_bytes } => {
                write!(formatter, "they use {used_bytes} bytes, and the limit is {max_bytes}")
            }
            Self::NearlyFull {
                used_bytes,
                free_bytes,
                reserve_bytes,
            } => write!(
                formatter,
                "they use {used_bytes} bytes, and {free_bytes} bytes are free, where {reserve_bytes} must stay free"
            ),
        }
    }
}
