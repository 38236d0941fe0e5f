//! Why the copy of a running machine is given up: the room for what its guest overwrites.

/// Why a copy was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GivenUp {
    /// The scratch files took more than they may.
    ScratchMax {
        /// What they took, in bytes.
        used_bytes: u64,
        /// What they may.
        max_bytes: u64,
    },
    /// Their file system was nearly full.
    NearlyFull {
        /// What they took, in bytes.
        used_bytes: u64,
        /// What was free.
        free_bytes: u64,
        /// What has to stay free.
        reserve_bytes: u64,
    },
}

impl std::fmt::Display for GivenUp {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ScratchMax { used_bytes, max_bytes } => {
                write!(
                    formatter,
                    "it took {used_bytes} bytes of the {max_bytes} that it may take"
                )
            }
            Self::NearlyFull {
                used_bytes,
                free_bytes,
                reserve_bytes,
            } => write!(
                formatter,
                "it took {used_bytes} bytes, and {free_bytes} were left of the {reserve_bytes} that have to stay free for others"
            ),
        }
    }
}
