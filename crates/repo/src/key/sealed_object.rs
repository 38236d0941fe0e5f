//! Small objects, each sealed under its own key: the configuration, manifests, markers.
//!
//! | offset | bytes | |
//! |---:|---:|---|
//! | 0 | 8 | `HFSEALED` |
//! | 8 | 1 | version: 1 |
//! | 9 | 1 | cipher: 1 AES-256-GCM, 2 ChaCha20-Poly1305 |
//! | 10 | 2 | purpose |
//! | 12 | 4 | zero |
//! | 16 | 32 | salt |
//! | 48 | 8 | bytes of the plaintext |
//! | 56 | | ciphertext |
//! | | 16 | tag |
//!
//! Numbers are little-endian. The key is [`Keyring::object_key`] of the purpose and the salt, the nonce is zero, and
//! the tag also authenticates the first 56 bytes and the name of the object: an object under the name of another does
//! not open.

use super::random::{Randomness, random};
use super::{Cipher, KeyError, Keyring, Purpose, Result, TAG_LENGTH};
use crate::store::ObjectName;

const MAGIC: &[u8; 8] = b"HFSEALED";
const VERSION: u8 = 1;
const VERSION_AT: usize = MAGIC.len();
const CIPHER_AT: usize = VERSION_AT + 1;
const PURPOSE_AT: usize = CIPHER_AT + 1;
const RESERVED_AT: usize = PURPOSE_AT + 2;
const SALT_AT: usize = RESERVED_AT + 4;
const LENGTH_AT: usize = SALT_AT + SALT_BYTES;
const HEADER_BYTES: usize = LENGTH_AT + 8;
const SALT_BYTES: usize = 32;
const _: () = assert!(HEADER_BYTES == 56);

/// A constant nonce is safe, since each key seals only once.
const NONCE: [u8; 12] = [0; 12];

/// Number of bytes by which a sealed object is longer than its plaintext.
pub const SEALED_OVERHEAD_BYTES: u64 = (HEADER_BYTES + TAG_LENGTH) as u64;

/// The sealed bytes of the object `name` with `plaintext`.
pub fn seal_object(
    keyring: &Keyring,
    purpose: Purpose,
    cipher: Cipher,
    name: &ObjectName,
    plaintext: &[u8],
    randomness: &dyn Randomness,
) -> Result<Vec<u8>> {
    let salt: [u8; SALT_BYTES] = random(randomness)?;
    let mut header = Vec::with_capacity(HEADER_BYTES + plaintext.len() + TAG_LENGTH);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&[VERSION, cipher.code()]);
    header.extend_from_slice(&purpose.code().to_le_bytes());
    header.extend_from_slice(&[0; SALT_AT - RESERVED_AT]);
    header.extend_from_slice(&salt);
    header.extend_from_slice(&(plaintext.len() as u64).to_le_bytes());
    let mut body = plaintext.to_vec();
    let key = keyring.object_key(purpose, &salt, cipher);
    key.seal(NONCE, &associated(&header, name), &mut body);
    let mut object = header;
    object.extend_from_slice(&body);
    Ok(object)
}

/// The plaintext of `object`, which is stored under `name`.
pub fn open_object(keyring: &Keyring, purpose: Purpose, name: &ObjectName, object: &[u8]) -> Result<Vec<u8>> {
    let damaged = |detail| KeyError::Damaged {
        name: name.clone(),
        detail,
    };
    if !object.starts_with(MAGIC) {
        return Err(damaged("it does not start like a sealed object"));
    }
    let (header, body) = object
        .split_at_checked(HEADER_BYTES)
        .ok_or_else(|| damaged("it ends within its header"))?;
    if header[VERSION_AT] != VERSION {
        return Err(KeyError::Version {
            name: name.clone(),
            version: header[VERSION_AT].into(),
            known: VERSION.into(),
        });
    }
    let cipher = Cipher::from_code(header[CIPHER_AT]).ok_or_else(|| damaged("it names an unknown cipher"))?;
    let actual = u16::from_le_bytes([header[PURPOSE_AT], header[PURPOSE_AT + 1]]);
    if actual != purpose.code() {
        return Err(KeyError::WrongPurpose {
            name: name.clone(),
            expected: purpose,
            actual,
        });
    }
    let length = u64::from_le_bytes(header[LENGTH_AT..].try_into().expect("the last 8 bytes"));
    if length.checked_add(TAG_LENGTH as u64) != Some(body.len() as u64) {
        return Err(damaged("it is longer or shorter than it says"));
    }
    let salt = header[SALT_AT..LENGTH_AT].try_into().expect("32 bytes");
    let mut plaintext = body.to_vec();
    keyring
        .object_key(purpose, salt, cipher)
        .open(NONCE, &associated(header, name), &mut plaintext)
        .map_err(|_| KeyError::WrongKeyOrDamaged { name: name.clone() })?;
    Ok(plaintext)
}

/// The associated data of the tag. The header has a fixed length, so the two parts cannot be confused.
fn associated(header: &[u8], name: &ObjectName) -> Vec<u8> {
    [header, name.to_string().as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::key::MasterSecret;
    use crate::key::random::Counting;
    use crate::store::ObjectKind;

    fn name(text: &str) -> ObjectName {
        ObjectName::new(ObjectKind::Snapshot, text).unwrap()
    }

    #[test]
    fn an_object_opens_under_its_name_purpose_and_key_alone() {
        let keyring = MasterSecret::from_bytes([1; 32]).keyring();
        let other = MasterSecret::from_bytes([2; 32]).keyring();
        let purpose = Purpose::ManifestSealing;
        for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
            let sealed = seal_object(&keyring, purpose, cipher, &name("a"), b"manifest", &Counting::new(1)).unwrap();
            assert_eq!(sealed.len() as u64, 8 + SEALED_OVERHEAD_BYTES);
            assert_eq!(
                open_object(&keyring, purpose, &name("a"), &sealed).unwrap(),
                b"manifest"
            );
            let wrong = |error: KeyError| matches!(error, KeyError::WrongKeyOrDamaged { .. });
            assert!(open_object(&keyring, purpose, &name("b"), &sealed).is_err_and(wrong));
            assert!(open_object(&other, purpose, &name("a"), &sealed).is_err_and(wrong));
            let elsewhere = ObjectName::new(ObjectKind::Forgotten, "a").unwrap();
            assert!(open_object(&keyring, purpose, &elsewhere, &sealed).is_err_and(wrong));
            assert!(matches!(
                open_object(&keyring, Purpose::MarkerSealing, &name("a"), &sealed),
                Err(KeyError::WrongPurpose { actual: 3, .. })
            ));
            let mut newer = sealed.clone();
            newer[VERSION_AT] = 2;
            assert!(matches!(
                open_object(&keyring, purpose, &name("a"), &newer),
                Err(KeyError::Version {
                    version: 2,
                    known: 1,
                    ..
                })
            ));
        }
    }

    #[test]
    fn objects_with_the_same_contents_have_nothing_in_common() {
        let keyring = MasterSecret::from_bytes([1; 32]).keyring();
        let randomness = Counting::new(1);
        let [a, b] = [(); 2].map(|()| {
            let purpose = Purpose::MarkerSealing;
            seal_object(&keyring, purpose, Cipher::default(), &name("a"), &[0; 64], &randomness).unwrap()
        });
        assert_ne!(a[SALT_AT..LENGTH_AT], b[SALT_AT..LENGTH_AT]);
        assert_ne!(a[HEADER_BYTES..], b[HEADER_BYTES..]);
    }

    proptest! {
        #[test]
        fn no_flipped_bit_cut_or_addition_goes_unnoticed(
            plaintext in proptest::collection::vec(any::<u8>(), 0..100),
            flip in any::<proptest::sample::Index>(),
        ) {
            let keyring = MasterSecret::from_bytes([1; 32]).keyring();
            let purpose = Purpose::MarkerSealing;
            let sealed =
                seal_object(&keyring, purpose, Cipher::default(), &name("a"), &plaintext, &Counting::new(1)).unwrap();
            prop_assert_eq!(&open_object(&keyring, purpose, &name("a"), &sealed).unwrap(), &plaintext);
            let bit = flip.index(sealed.len() * 8);
            let mut damaged = sealed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(open_object(&keyring, purpose, &name("a"), &damaged).is_err());
            prop_assert!(open_object(&keyring, purpose, &name("a"), &sealed[..bit / 8]).is_err());
            let longer = [&sealed[..], &[0]].concat();
            prop_assert!(open_object(&keyring, purpose, &name("a"), &longer).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let keyring = MasterSecret::from_bytes([1; 32]).keyring();
            let hostile = [&MAGIC[..], &[VERSION, 1, 4, 0], &bytes].concat();
            prop_assert!(open_object(&keyring, Purpose::MarkerSealing, &name("a"), &bytes).is_err());
            prop_assert!(open_object(&keyring, Purpose::MarkerSealing, &name("a"), &hostile).is_err());
        }
    }
}
