//! The master secret and the keys derived from it.

use std::fmt;
use std::fmt::Write as _;

use zeroize::Zeroizing;

use super::{Cipher, Randomness, Result, SealingKey};
use crate::key::purpose::Purpose;

/// Bytes of the master secret and of every key.
pub(super) const SECRET_BYTES: usize = 32;

/// The only secret of a repository: wiped from memory when dropped, and never displayed.
#[derive(Clone)]
pub struct MasterSecret(Zeroizing<[u8; SECRET_BYTES]>);

impl MasterSecret {
    /// A new secret.
    pub fn generate(randomness: &dyn Randomness) -> Result<Self> {
        let mut secret = Self::from_bytes([0; SECRET_BYTES]);
        randomness.fill(&mut *secret.0)?;
        Ok(secret)
    }

    pub(crate) fn from_bytes(bytes: [u8; SECRET_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(super) fn as_bytes(&self) -> &[u8; SECRET_BYTES] {
        &self.0
    }

    /// The keys derived from the secret.
    pub fn keyring(&self) -> Keyring {
        Keyring {
            keys: Purpose::ALL.map(|purpose| Zeroizing::new(blake3::derive_key(purpose.context(), &*self.0))),
        }
    }
}

impl PartialEq for MasterSecret {
    /// Runs in constant time.
    fn eq(&self, other: &Self) -> bool {
        aws_lc_rs::constant_time::verify_slices_are_equal(&*self.0, &*other.0).is_ok()
    }
}

impl Eq for MasterSecret {}

impl fmt::Debug for MasterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterSecret(..)")
    }
}

/// The keys of a repository, one per purpose; wiped from memory when dropped, and never displayed.
#[derive(Clone)]
pub struct Keyring {
    keys: [Zeroizing<[u8; SECRET_BYTES]>; Purpose::ALL.len()],
}

impl Keyring {
    /// The key for `purpose`.
    pub fn key(&self, purpose: Purpose) -> &[u8; SECRET_BYTES] {
        &self.keys[purpose.index()]
    }

    /// The fingerprint keys.
    pub fn fingerprints(&self) -> FingerprintSecret {
        FingerprintSecret(FINGERPRINTS.map(|purpose| self.keys[purpose.index()].clone()))
    }

    /// The same keys, but with the fingerprint keys in `secret`.
    #[must_use]
    pub fn with_fingerprints(mut self, secret: &FingerprintSecret) -> Self {
        for (purpose, key) in FINGERPRINTS.into_iter().zip(&secret.0) {
            self.keys[purpose.index()].clone_from(key);
        }
        self
    }

    /// The key that seals one object: derived from the key for `purpose` and the object's own `salt`.
    ///
    /// With a random salt of 32 bytes no two objects share a key, so that nonces only need to be unique within an
    /// object.
    pub fn object_key(&self, purpose: Purpose, salt: &[u8; 32], cipher: Cipher) -> SealingKey {
        let mut hasher = blake3::Hasher::new_derive_key("holdfast 2026 repository v1 object key");
        hasher.update(self.key(purpose));
        hasher.update(salt);
        SealingKey::new(cipher, &Zeroizing::new(*hasher.finalize().as_bytes()))
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keyring(..)")
    }
}

/// The purposes of fingerprints; their keys seal nothing.
const FINGERPRINTS: [Purpose; 3] = [Purpose::BlockHash, Purpose::ChunkId, Purpose::StreamCut];

/// The fingerprint keys: repositories that share them cut and identify the same bytes alike.
///
/// Nothing is sealed with them. They are wiped from memory when dropped, and never displayed.
#[derive(Clone)]
pub struct FingerprintSecret([Zeroizing<[u8; SECRET_BYTES]>; FINGERPRINTS.len()]);

impl FingerprintSecret {
    /// The stored form of the keys: concatenated.
    pub(crate) fn to_hex(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(FINGERPRINTS.len() * SECRET_BYTES * 2));
        for byte in self.0.iter().flat_map(|key| key.iter()) {
            // Writing to a string cannot fail.
            write!(text, "{byte:02x}").ok();
        }
        text
    }

    /// The keys that are stored as `text`; `None` if it is invalid.
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let (digits, rest) = text.as_bytes().as_chunks::<2>();
        if !rest.is_empty() || digits.len() != FINGERPRINTS.len() * SECRET_BYTES {
            return None;
        }
        let mut secret = Self(std::array::from_fn(|_| Zeroizing::new([0; SECRET_BYTES])));
        let bytes = secret.0.iter_mut().flat_map(|key| key.iter_mut());
        for (byte, [high, low]) in bytes.zip(digits) {
            let digit = |digit: u8| {
                char::from(digit)
                    .to_digit(16)
                    .and_then(|value| u8::try_from(value).ok())
            };
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Some(secret)
    }
}

impl PartialEq for FingerprintSecret {
    /// Runs in constant time.
    fn eq(&self, other: &Self) -> bool {
        let same = |(ours, theirs): (&Zeroizing<[u8; SECRET_BYTES]>, &Zeroizing<[u8; SECRET_BYTES]>)| {
            aws_lc_rs::constant_time::verify_slices_are_equal(&**ours, &**theirs).is_ok()
        };
        self.0.iter().zip(&other.0).filter(|pair| same(*pair)).count() == FINGERPRINTS.len()
    }
}

impl Eq for FingerprintSecret {}

impl fmt::Debug for FingerprintSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FingerprintSecret(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_purpose_has_its_own_key_and_code() {
        let keyring = MasterSecret::from_bytes([7; 32]).keyring();
        let keys: BTreeSet<_> = Purpose::ALL.map(|purpose| *keyring.key(purpose)).into();
        assert_eq!(keys.len(), Purpose::ALL.len());
        for (code, purpose) in (1..).zip(Purpose::ALL) {
            assert_eq!(purpose.code(), code);
        }
        let other = MasterSecret::from_bytes([8; 32]).keyring();
        assert!(Purpose::ALL.iter().all(|purpose| !keys.contains(other.key(*purpose))));
    }

    /// All existing repositories depend on these.
    #[test]
    fn derived_keys_never_change() {
        let keyring = MasterSecret::from_bytes([7; 32]).keyring();
        let hex = |bytes: &[u8; 32]| blake3::Hash::from_bytes(*bytes).to_hex().to_string();
        let keys = Purpose::ALL.map(|purpose| hex(keyring.key(purpose)));
        assert_eq!(
            keys.join("\n"),
            include_str!("../../tests/fixtures/keys/keyring-v1.txt").trim_end()
        );
    }

    #[test]
    fn secrets_are_not_shown() {
        let secret = MasterSecret::from_bytes([7; 32]);
        let keyring = secret.keyring();
        assert_eq!(
            format!("{secret:?} {keyring:?} {:?}", keyring.fingerprints()),
            "MasterSecret(..) Keyring(..) FingerprintSecret(..)"
        );
    }

    #[test]
    fn other_fingerprints_change_recognition_but_not_sealing() {
        let other = MasterSecret::from_bytes([8; 32]).keyring();
        let ours = MasterSecret::from_bytes([7; 32]).keyring();
        let text = other.fingerprints().to_hex();
        let like = ours
            .clone()
            .with_fingerprints(&FingerprintSecret::from_hex(&text).unwrap());
        for purpose in Purpose::ALL {
            let from = if FINGERPRINTS.contains(&purpose) { &other } else { &ours };
            assert_eq!(like.key(purpose), from.key(purpose), "{purpose:?}");
        }
        assert!(like.fingerprints() == other.fingerprints() && like.fingerprints() != ours.fingerprints());
        for wrong in [&text[1..], &text[2..], "", &text.replace('a', "g")] {
            assert!(FingerprintSecret::from_hex(wrong).is_none());
        }
    }
}
