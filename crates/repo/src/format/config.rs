//! The configuration of a repository: fixed when it is created.

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::key::{Cipher, FingerprintSecret, Keyring, MasterSecret};
use crate::store::ObjectName;

/// The latest version of the repository's format that this program reads and writes.
///
/// A new repository has version 1, or 2 if it uses the fingerprint keys of another repository.
pub const REPOSITORY_VERSION: u32 = 2;

/// The version of repositories that derive all keys from their own secret.
const VERSION_OWN_FINGERPRINTS: u32 = 1;

/// Longest configuration that is read.
pub(crate) const CONFIG_OBJECT_BYTES_MAX: u64 = 64 << 10;

/// It is stored sealed in the object `config`, as JSON, and in every key slot, from which it can be restored.
///
/// It is stored sealed in the object `config`, as JSON, and in every key slot, from which it can be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepositoryConfig {
    format: u32,
    /// The repository.
    pub id: RepositoryId,
    /// Creation time, in milliseconds since 1970-01-01 UTC.
    pub created_ms: i64,
    #[serde(with = "cipher_name")]
    pub(crate) cipher: Cipher,
    /// The fingerprint keys, if they are not derived from the repository's own secret.
    #[serde(default, with = "fingerprint_text", skip_serializing_if = "Option::is_none")]
    pub(crate) fingerprints: Option<FingerprintSecret>,
}

impl RepositoryConfig {
    pub(crate) fn new(
        id: RepositoryId,
        created_ms: i64,
        cipher: Cipher,
        fingerprints: Option<FingerprintSecret>,
    ) -> Self {
        Self {
            format: if fingerprints.is_some() {
                REPOSITORY_VERSION
            } else {
                VERSION_OWN_FINGERPRINTS
            },
            id,
            created_ms,
            cipher,
            fingerprints,
        }
    }

    /// The keyring of the repository with this configuration and `master`.
    pub(crate) fn keyring(&self, master: &MasterSecret) -> Keyring {
        let keyring = master.keyring();
        match &self.fingerprints {
            None => keyring,
            Some(secret) => keyring.with_fingerprints(secret),
        }
    }

    /// The cipher of all sealed objects.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// Version of the repository's format.
    pub fn format(&self) -> u32 {
        self.format
    }

    pub(crate) fn encode(&self) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(serde_json::to_vec(self).expect("a configuration is made of strings and numbers"))
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
        let config: Self = serde_json::from_slice(bytes).map_err(damaged)?;
        // An earlier release would ignore them, and deduplicate nothing.
        if config.fingerprints.is_some() && config.format == VERSION_OWN_FINGERPRINTS {
            let detail = "it has fingerprints of another repository, which its version does not know";
            return Err(Error::damaged(&object, 0, detail));
        }
        Ok(config)
    }
}

/// The keys of fingerprints as hexadecimal text.
mod fingerprint_text {
    use serde::{Deserialize, Deserializer, Serializer};
    use zeroize::Zeroizing;

    use crate::key::FingerprintSecret;

    #[expect(clippy::ref_option, reason = "serde hands over a reference")]
    pub(crate) fn serialize<S: Serializer>(
        secret: &Option<FingerprintSecret>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match secret {
            Some(secret) => serializer.serialize_str(&secret.to_hex()),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<FingerprintSecret>, D::Error> {
        let text = Zeroizing::new(String::deserialize(deserializer)?);
        let secret = FingerprintSecret::from_hex(&text);
        let secret = secret.ok_or_else(|| serde::de::Error::custom("fingerprints are three keys of 32 bytes"))?;
        Ok(Some(secret))
    }
}

/// Ciphers by their usual names.
mod cipher_name {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::key::Cipher;

    const NAMES: [(&str, Cipher); 2] = [
        ("aes-256-gcm", Cipher::Aes256Gcm),
        ("chacha20-poly1305", Cipher::ChaCha20Poly1305),
    ];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
    pub(crate) fn serialize<S: Serializer>(cipher: &Cipher, serializer: S) -> Result<S::Ok, S::Error> {
        let name = NAMES
            .iter()
            .find(|(_, other)| other == cipher)
            .expect("every cipher has a name")
            .0;
        serializer.serialize_str(name)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Cipher, D::Error> {
        let text = String::deserialize(deserializer)?;
        let known = NAMES.iter().find(|(name, _)| *name == text);
        known
            .map(|(_, cipher)| *cipher)
            .ok_or_else(|| serde::de::Error::custom(format!("unknown cipher {text}")))
    }
}

#[cfg(test)]
mod tests {
    use super::RepositoryConfig;
    use crate::id::RepositoryId;
    use crate::key::{Cipher, MasterSecret};

    /// Existing repositories have these configurations.
    #[test]
    fn configurations_never_change() {
        let secret = MasterSecret::from_bytes([7; 32]).keyring().fingerprints();
        let id = RepositoryId::from_bytes([0xab; 16]);
        for (stored, fingerprints) in [
            (include_str!("../../tests/fixtures/config/config-v1.json"), None),
            (include_str!("../../tests/fixtures/config/config-v2.json"), Some(secret)),
        ] {
            let config = RepositoryConfig::new(id, 1_780_000_000_123, Cipher::Aes256Gcm, fingerprints);
            assert_eq!(std::str::from_utf8(&config.encode()).unwrap(), stored.trim_end());
            assert_eq!(RepositoryConfig::decode(stored.trim_end().as_bytes()).unwrap(), config);
        }
    }

    #[test]
    fn fingerprints_that_an_earlier_release_would_overlook_are_refused() {
        let stored = include_str!("../../tests/fixtures/config/config-v2.json").replace("\"format\":2", "\"format\":1");
        assert!(RepositoryConfig::decode(stored.as_bytes()).is_err_and(|error| error.is_damage()));
        let shortened = include_str!("../../tests/fixtures/config/config-v2.json").replacen(
            "\"fingerprints\":\"",
            "\"fingerprints\":\"0",
            1,
        );
        assert!(RepositoryConfig::decode(shortened.as_bytes()).is_err_and(|error| error.is_damage()));
    }
}
