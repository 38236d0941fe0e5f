//! What a repository is: decided when it is made, never changed.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::key::Cipher;
use crate::store::ObjectName;

/// Version of the repository's format that this program writes, and the latest that it reads.
pub const REPOSITORY_VERSION: u32 = 1;

/// Longest configuration that is read.
pub(crate) const CONFIG_OBJECT_BYTES_MAX: u64 = 64 << 10;

/// The configuration of a repository.
///
/// It lies sealed in the object `config`, as JSON, and in every key slot, from where it can be brought back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepositoryConfig {
    format: u32,
    /// The repository.
    pub id: RepositoryId,
    /// When it was made, in milliseconds since 1970-01-01 UTC.
    pub created_ms: i64,
    #[serde(with = "cipher_name")]
    pub(crate) cipher: Cipher,
}

impl RepositoryConfig {
    pub(crate) fn new(id: RepositoryId, created_ms: i64, cipher: Cipher) -> Self {
        Self {
            format: REPOSITORY_VERSION,
            id,
            created_ms,
            cipher,
        }
    }

    /// What everything in the repository is sealed with.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// Version of the repository's format.
    pub fn format(&self) -> u32 {
        self.format
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a configuration is made of strings and numbers")
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let object = ObjectName::config();
        let damaged = |error: serde_json::Error| Error::damaged(&object, error.column() as u64, error.to_string());
        let version: Version = serde_json::from_slice(bytes).map_err(damaged)?;
        if version.format > REPOSITORY_VERSION {
            return Err(Error::FutureVersion {
                object,
                found: version.format,
                supported: REPOSITORY_VERSION,
            });
        }
        serde_json::from_slice(bytes).map_err(damaged)
    }
}

/// Ciphers by the names that the rest of the world gives them.
mod cipher_name {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::key::Cipher;

    const NAMES: [(&str, Cipher); 2] = [
        ("aes-256-gcm", Cipher::Aes256Gcm),
        ("chacha20-poly1305", Cipher::ChaCha20Poly1305),
    ];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
    pub(super) fn serialize<S: Serializer>(cipher: &Cipher, serializer: S) -> Result<S::Ok, S::Error> {
        let name = NAMES
            .iter()
            .find(|(_, other)| other == cipher)
            .expect("every cipher has a name")
            .0;
        serializer.serialize_str(name)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Cipher, D::Error> {
        let text = String::deserialize(deserializer)?;
        let known = NAMES.iter().find(|(name, _)| *name == text);
        known
            .map(|(_, cipher)| *cipher)
            .ok_or_else(|| serde::de::Error::custom(format!("unknown cipher {text}")))
    }
}
