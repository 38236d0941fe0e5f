//! Authenticated encryption.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

/// The tag does not match the key, the nonce, the associated data and the ciphertext.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("sealed with another key, or damaged")]
pub struct NotSealed;

/// Bytes that a seal adds.
pub const TAG_LENGTH: usize = 16;

/// The cipher of a repository; both have keys of 32, nonces of 12 and tags of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Cipher {
    /// AES-256-GCM (NIST SP 800-38D), where the CPU has AES instructions.
    #[default]
    Aes256Gcm,
    /// ChaCha20-Poly1305 (RFC 8439), elsewhere.
    ChaCha20Poly1305,
}

impl Cipher {
    /// The code of the cipher in stored objects.
    pub const fn code(self) -> u8 {
        match self {
            Self::Aes256Gcm => 1,
            Self::ChaCha20Poly1305 => 2,
        }
    }

    /// The cipher with this code.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Aes256Gcm),
            2 => Some(Self::ChaCha20Poly1305),
            _ => None,
        }
    }

    fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Aes256Gcm => &AES_256_GCM,
            Self::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        }
    }
}

impl fmt::Display for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aes256Gcm => "AES-256-GCM",
            Self::ChaCha20Poly1305 => "ChaCha20-Poly1305",
        })
    }
}

/// A key for sealing and opening; it may be shared by threads.
///
/// The caller must never use a nonce twice.
pub struct SealingKey {
    key: LessSafeKey,
}

impl SealingKey {
    /// The key with these bytes.
    pub fn new(cipher: Cipher, key: &[u8; 32]) -> Self {
        let key = UnboundKey::new(cipher.algorithm(), key).expect("every 32 bytes are a key of both ciphers");
        Self {
            key: LessSafeKey::new(key),
        }
    }

    /// Encrypts `buffer` in place and appends the tag, which also authenticates `associated`.
    pub fn seal(&self, nonce: [u8; 12], associated: &[u8], buffer: &mut Vec<u8>) {
        buffer.reserve_exact(TAG_LENGTH);
        self.key
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(associated), buffer)
            .expect("what fits into memory is below the limits of both ciphers (64 GiB)");
    }

    /// Checks the tag at the end of `buffer`, removes it and decrypts the rest in place.
    ///
    /// [`NotSealed`] if the tag does not match the key, the nonce, `associated` and the bytes; `buffer` is then empty.
    pub fn open(&self, nonce: [u8; 12], associated: &[u8], buffer: &mut Vec<u8>) -> Result<(), NotSealed> {
        let opened = self
            .open_slice(nonce, associated, buffer)
            .map(|plaintext| plaintext.len());
        buffer.truncate(*opened.as_ref().unwrap_or(&0));
        opened.map(|_| ())
    }

    /// Like [`open`](Self::open) for a slice: returns the plaintext at the start of `buffer`.
    ///
    /// After [`NotSealed`] the content of `buffer` is undefined.
    pub fn open_slice<'a>(
        &self,
        nonce: [u8; 12],
        associated: &[u8],
        buffer: &'a mut [u8],
    ) -> Result<&'a mut [u8], NotSealed> {
        self.key
            .open_in_place(Nonce::assume_unique_for_key(nonce), Aad::from(associated), buffer)
            .map_err(|_| NotSealed)
    }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealingKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::*;

    const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

    #[test]
    fn codes_are_kept() {
        for cipher in CIPHERS {
            assert_eq!(Cipher::from_code(cipher.code()), Some(cipher));
        }
        assert_eq!(Cipher::from_code(0), None);
        assert_eq!(Cipher::from_code(3), None);
    }

    /// NIST's test case 14 of GCM, and RFC 8439, section 2.8.2.
    #[test]
    fn the_ciphers_match_the_standards() {
        let mut buffer = vec![0; 16];
        SealingKey::new(Cipher::Aes256Gcm, &[0; 32]).seal([0; 12], b"", &mut buffer);
        let expected = 0xcea7_403d_4d60_6b6e_074e_c5d3_baf3_9d18_u128.to_be_bytes();
        assert_eq!(buffer[..16], expected);
        assert_eq!(
            buffer[16..],
            0xd0d1_c8a7_9999_6bf0_265b_98b5_d48a_b919_u128.to_be_bytes()
        );

        let key = std::array::from_fn(|at| 0x80 + u8::try_from(at).unwrap());
        let nonce = [7, 0, 0, 0, 0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47];
        let associated = [0x50, 0x51, 0x52, 0x53, 0xc0, 0xc1, 0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7];
        let mut buffer =
            b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, \
            sunscreen would be it."
                .to_vec();
        SealingKey::new(Cipher::ChaCha20Poly1305, &key).seal(nonce, &associated, &mut buffer);
        assert_eq!(
            buffer[114..],
            0x1ae1_0b59_4f09_e26a_7e90_2ecb_d060_0691_u128.to_be_bytes()
        );
    }

    proptest! {
        #[test]
        fn only_sealed_data_opens(
            key in any::<[u8; 32]>(),
            nonce in any::<[u8; 12]>(),
            plaintext in proptest::collection::vec(any::<u8>(), 0..200),
            associated in proptest::collection::vec(any::<u8>(), 0..40),
            flip in any::<proptest::sample::Index>(),
        ) {
            for cipher in CIPHERS {
                let seal_key = SealingKey::new(cipher, &key);
                let mut sealed = plaintext.clone();
                seal_key.seal(nonce, &associated, &mut sealed);
                prop_assert_eq!(sealed.len(), plaintext.len() + TAG_LENGTH);

                let mut opened = sealed.clone();
                seal_key.open(nonce, &associated, &mut opened).unwrap();
                prop_assert_eq!(&opened, &plaintext);

                let bit = flip.index(sealed.len() * 8);
                let mut damaged = sealed.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(seal_key.open(nonce, &associated, &mut damaged).is_err());
                prop_assert!(damaged.is_empty());

                let mut other_nonce = nonce;
                other_nonce[bit % 12] ^= 1;
                prop_assert!(seal_key.open_slice(other_nonce, &associated, &mut sealed.clone()).is_err());
                let other_associated = [&associated[..], b"x"].concat();
                prop_assert!(seal_key.open_slice(nonce, &other_associated, &mut sealed.clone()).is_err());
                let mut other_key = key;
                other_key[bit % 32] ^= 1;
                let other = SealingKey::new(cipher, &other_key);
                prop_assert!(other.open_slice(nonce, &associated, &mut sealed.clone()).is_err());
                let short = bit % sealed.len();
                prop_assert!(seal_key.open_slice(nonce, &associated, &mut sealed.clone()[..short]).is_err());
            }
        }
    }
}
