//! The seals of the sections of a pack.
//!
//! Every pack has its own key, derived from the repository's pack key and the pack's identity, which is random and used
//! once. Every section is sealed once under it, with a nonce that identifies the section. Therefore no nonce is used
//! twice under one key, sections cannot be exchanged within a pack, and packs cannot be exchanged.

use crate::id::PackId;
use crate::key::{Cipher, SealingKey};

/// The sealed sections of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PackSection {
    /// The stored bytes of a frame.
    Frame(u32),
    /// The prints of a frame's blocks.
    Prints(u32),
    /// The directory.
    Directory,
}

impl PackSection {
    /// Nonce: byte 0 is 1, 2 or 3 for frame, prints and directory, bytes 8 to 11 the number of the frame, the rest zero.
    fn nonce(self) -> [u8; 12] {
        let (kind, number) = match self {
            Self::Frame(number) => (1, number),
            Self::Prints(number) => (2, number),
            Self::Directory => (3, 0),
        };
        let mut nonce = [0; 12];
        nonce[0] = kind;
        nonce[8..].copy_from_slice(&number.to_le_bytes());
        nonce
    }
}

/// The key of one pack.
pub(crate) struct PackKey(SealingKey);

impl PackKey {
    /// The key of `pack`: keyed BLAKE3 of its identity under the repository's pack key.
    pub(crate) fn new(cipher: Cipher, repository_pack_key: &[u8; 32], pack: PackId) -> Self {
        let key = blake3::keyed_hash(repository_pack_key, pack.as_bytes());
        Self(SealingKey::new(cipher, key.as_bytes()))
    }

    /// Seals `bytes` in place; they grow by the tag.
    pub(crate) fn seal(&self, section: PackSection, bytes: &mut Vec<u8>) {
        self.0.seal(section.nonce(), &[], bytes);
    }

    /// Opens `bytes` in place and removes the tag; returns false if authentication fails, and the content is then
    /// undefined.
    #[must_use]
    pub(crate) fn open(&self, section: PackSection, bytes: &mut Vec<u8>) -> bool {
        self.0.open(section.nonce(), &[], bytes).is_ok()
    }
}
