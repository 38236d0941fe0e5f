//! The encoding of a key slot.
//!
//! | offset | bytes | |
//! |---:|---:|---|
//! | 0 | 8 | `HFKEYSLT` |
//! | 8 | 2 | version: 1 |
//! | 10 | 1 | opens with: 1 password, 2 key file, 3 nothing |
//! | 11 | 1 | cipher: 1 AES-256-GCM, 2 ChaCha20-Poly1305 |
//! | 12 | 4 | Argon2id: memory in KiB; zero in all but slots for passwords |
//! | 16 | 4 | Argon2id: iterations; likewise |
//! | 20 | 4 | Argon2id: lanes; likewise |
//! | 24 | 8 | when it was made, in seconds since 1970 |
//! | 32 | 32 | salt |
//! | 64 | 4 | bytes of the label |
//! | 68 | 4 | bytes of the payload |
//! | 72 | | label, UTF-8 |
//! | | | payload: sealed, tag included |
//! | | 32 | BLAKE3 of all before |
//!
//! Numbers are little-endian. The payload is the master secret (32 bytes) and the configuration of the repository. It
//! is sealed with the slot's key and the nonce zero (the salt makes the key unique), and the tag also authenticates all
//! bytes before it. The hash at the end distinguishes damage from a wrong password; it protects only against
//! accidents.

use zeroize::Zeroizing;

use super::password::SALT_BYTES;
use super::random::{Randomness, random};
use super::secret::SECRET_BYTES;
use super::{
    Cipher, Credential, CredentialKind, KdfParameters, KeyError, MasterSecret, Result, SealingKey, TAG_LENGTH,
};
use crate::key::slot_info::{SlotId, SlotInfo};

const MAGIC: &[u8; 8] = b"HFKEYSLT";
const VERSION: u16 = 1;
const VERSION_AT: usize = MAGIC.len();
const KIND_AT: usize = VERSION_AT + 2;
const CIPHER_AT: usize = KIND_AT + 1;
const MEMORY_AT: usize = CIPHER_AT + 1;
const ITERATIONS_AT: usize = MEMORY_AT + 4;
const LANES_AT: usize = ITERATIONS_AT + 4;
const CREATED_AT: usize = LANES_AT + 4;
const SALT_AT: usize = CREATED_AT + 8;
const LABEL_LENGTH_AT: usize = SALT_AT + SALT_BYTES;
const PAYLOAD_LENGTH_AT: usize = LABEL_LENGTH_AT + 4;
const LABEL_AT: usize = PAYLOAD_LENGTH_AT + 4;
const HASH_BYTES: usize = 32;
const _: () = assert!(LABEL_AT == 72);

const NONCE: [u8; 12] = [0; 12];

/// Longest label, in bytes.
pub const LABEL_BYTES_MAX: usize = 256;
/// Maximum length of the configuration in a slot, in bytes.
pub const CONFIG_BYTES_MAX: usize = 64 << 10;
/// Longest slot, in bytes.
pub const SLOT_BYTES_MAX: u64 =
    (LABEL_AT + LABEL_BYTES_MAX + SECRET_BYTES + CONFIG_BYTES_MAX + TAG_LENGTH + HASH_BYTES) as u64;

/// A slot with a valid checksum that was not opened yet.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) info: SlotInfo,
    cipher: Cipher,
    salt: [u8; SALT_BYTES],
    /// The associated data of the payload's seal.
    associated: Vec<u8>,
    payload: Vec<u8>,
}

/// The content of a slot.
#[derive(Debug)]
pub(super) struct SlotContents {
    pub(super) master: MasterSecret,
    pub(super) config: Vec<u8>,
}

/// The bytes of a slot; `info.parameters` must be present for passwords and only for them.
pub(super) fn encode(
    info: &SlotInfo,
    cipher: Cipher,
    credential: Credential<'_>,
    contents: &SlotContents,
    randomness: &dyn Randomness,
) -> Result<Vec<u8>> {
    assert!(
        info.parameters.is_some() == (info.kind == CredentialKind::Password) && info.kind == credential.kind(),
        "a slot says what it is"
    );
    credential.check()?;
    let (label, config) = (info.label.as_bytes(), &contents.config);
    if label.len() > LABEL_BYTES_MAX {
        return Err(KeyError::LabelTooLong {
            length: label.len() as u64,
            length_max: LABEL_BYTES_MAX as u64,
        });
    }
    if config.len() > CONFIG_BYTES_MAX {
        return Err(KeyError::ConfigTooLong {
            length: config.len() as u64,
            length_max: CONFIG_BYTES_MAX as u64,
        });
    }
    let length = |bytes: usize| u32::try_from(bytes).expect("bounded above").to_le_bytes();
    let salt: [u8; SALT_BYTES] = random(randomness)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([info.kind.code(), cipher.code()]);
    let stored = info
        .parameters
        .map_or([0; 3], |known| [known.memory_kib, known.iterations, known.lanes]);
    bytes.extend(stored.iter().flat_map(|number| number.to_le_bytes()));
    bytes.extend(info.created_unix_seconds.to_le_bytes());
    bytes.extend(salt);
    bytes.extend(length(label.len()));
    bytes.extend(length(SECRET_BYTES + config.len() + TAG_LENGTH));
    bytes.extend(label);

    let key = credential.slot_key(info.parameters.unwrap_or_default(), &salt)?;
    // Allocated in full at once, so that no copy of the secret remains in memory when it grows.
    let mut payload = Vec::with_capacity(SECRET_BYTES + config.len() + TAG_LENGTH);
    payload.extend(contents.master.as_bytes());
    payload.extend(config);
    SealingKey::new(cipher, &key).seal(NONCE, &bytes, &mut payload);
    bytes.extend(payload);
    bytes.extend(blake3::hash(&bytes).as_bytes());
    Ok(bytes)
}

impl Slot {
    /// The slot `id` from its bytes.
    pub(super) fn parse(id: SlotId, bytes: &[u8]) -> Result<Self> {
        let name = || id.object();
        let damaged = |detail| KeyError::Damaged { name: name(), detail };
        if !bytes.starts_with(MAGIC) {
            return Err(damaged("it does not start like a key slot"));
        }
        let Some((body, hash)) = bytes
            .split_last_chunk::<HASH_BYTES>()
            .filter(|(body, _)| body.len() >= LABEL_AT)
        else {
            return Err(damaged("it ends within its header"));
        };
        let u32_at = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().expect("4 bytes of the header"));
        // Before the hash, which another version may not have.
        let version = u16::from_le_bytes([body[VERSION_AT], body[VERSION_AT + 1]]);
        if version != VERSION {
            return Err(KeyError::Version {
                name: name(),
                version: version.into(),
                known: VERSION.into(),
            });
        }
        if blake3::hash(body) != *hash {
            return Err(damaged("its checksum does not fit"));
        }
        let kind =
            CredentialKind::from_code(body[KIND_AT]).ok_or_else(|| damaged("it opens with something unknown"))?;
        let cipher = Cipher::from_code(body[CIPHER_AT]).ok_or_else(|| damaged("it names an unknown cipher"))?;
        let parameters = KdfParameters {
            memory_kib: u32_at(MEMORY_AT),
            iterations: u32_at(ITERATIONS_AT),
            lanes: u32_at(LANES_AT),
        };
        let parameters = (kind == CredentialKind::Password).then_some(parameters);
        parameters.map_or(Ok(()), KdfParameters::check)?;
        let (label_length, payload_length) = (u32_at(LABEL_LENGTH_AT) as usize, u32_at(PAYLOAD_LENGTH_AT) as usize);
        let rest = &body[LABEL_AT..];
        if label_length > LABEL_BYTES_MAX || rest.len() != label_length + payload_length {
            return Err(damaged("its parts are longer or shorter than it says"));
        }
        let label = str::from_utf8(&rest[..label_length]).map_err(|_| damaged("its label is no text"))?;
        Ok(Self {
            info: SlotInfo {
                id,
                kind,
                label: label.to_owned(),
                created_unix_seconds: u64::from_le_bytes(body[CREATED_AT..SALT_AT].try_into().expect("8 bytes")),
                parameters,
            },
            cipher,
            salt: body[SALT_AT..LABEL_LENGTH_AT].try_into().expect("32 bytes"),
            associated: body[..LABEL_AT + label_length].to_vec(),
            payload: rest[label_length..].to_vec(),
        })
    }

    /// The content of the slot; `None` if `credential` is not the one that it was created with.
    pub(super) fn open(&self, credential: Credential<'_>) -> Result<Option<SlotContents>> {
        if credential.kind() != self.info.kind {
            return Ok(None);
        }
        let key = credential.slot_key(self.info.parameters.unwrap_or_default(), &self.salt)?;
        let mut payload = Zeroizing::new(self.payload.clone());
        if SealingKey::new(self.cipher, &key)
            .open(NONCE, &self.associated, &mut payload)
            .is_err()
        {
            return Ok(None);
        }
        let Some((master, config)) = payload.split_first_chunk::<SECRET_BYTES>() else {
            return Err(KeyError::Damaged {
                name: self.info.id.object(),
                detail: "its payload is too short for a secret",
            });
        };
        Ok(Some(SlotContents {
            master: MasterSecret::from_bytes(*master),
            config: config.to_vec(),
        }))
    }
}

impl SlotId {
    pub(crate) fn generate(randomness: &dyn Randomness) -> Result<Self> {
        Ok(Self(u64::from_be_bytes(random(randomness)?)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::key::random::Counting;

    const CHEAP: KdfParameters = KdfParameters {
        memory_kib: 8,
        iterations: 1,
        lanes: 1,
    };
    const PASSWORD: Credential<'_> = Credential::Password(b"correct horse");
    const KEY_FILE: Credential<'_> = Credential::KeyFile(&[0x5a; 32]);

    fn id() -> SlotId {
        SlotId(0x0123_4567_89ab_cdef)
    }

    fn info(credential: Credential<'_>, label: &str) -> SlotInfo {
        SlotInfo {
            id: id(),
            kind: credential.kind(),
            label: label.to_owned(),
            created_unix_seconds: 1_767_225_600,
            parameters: matches!(credential, Credential::Password(_)).then_some(CHEAP),
        }
    }

    fn contents() -> SlotContents {
        SlotContents {
            master: MasterSecret::from_bytes([7; 32]),
            config: b"configuration".to_vec(),
        }
    }

    fn bytes(credential: Credential<'_>, cipher: Cipher) -> Vec<u8> {
        let info = info(credential, "office");
        encode(&info, cipher, credential, &contents(), &Counting::new(1)).unwrap()
    }

    /// Slots of every released version must remain usable. The files were written by the version in their name.
    #[test]
    fn every_slot_ever_released_opens() {
        let fixtures: [(&str, &[u8], Credential<'_>, Cipher); 3] = [
            (
                "slot-v1-passphrase.bin",
                include_bytes!("../../tests/fixtures/keys/slot-v1-passphrase.bin"),
                PASSWORD,
                Cipher::Aes256Gcm,
            ),
            (
                "slot-v1-key-file.bin",
                include_bytes!("../../tests/fixtures/keys/slot-v1-key-file.bin"),
                KEY_FILE,
                Cipher::ChaCha20Poly1305,
            ),
            (
                "slot-v1-open.bin",
                include_bytes!("../../tests/fixtures/keys/slot-v1-open.bin"),
                Credential::Open,
                Cipher::Aes256Gcm,
            ),
        ];
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/keys");
        let files = std::fs::read_dir(folder).unwrap().filter(|entry| {
            let name = entry.as_ref().unwrap().file_name();
            name.to_string_lossy().starts_with("slot-")
        });
        assert_eq!(files.count(), fixtures.len(), "a fixture is not tested");
        for (name, stored, credential, cipher) in fixtures {
            assert_eq!(
                stored,
                bytes(credential, cipher),
                "{name}: version 1 is written differently now"
            );
            let slot = Slot::parse(id(), stored).unwrap();
            assert_eq!(slot.info, info(credential, "office"), "{name}");
            let opened = slot.open(credential).unwrap().expect("it opens");
            assert_eq!(opened.master, contents().master);
            assert_eq!(opened.config, contents().config);
        }
    }

    #[test]
    fn a_slot_opens_only_with_its_own_credential() {
        let slot = Slot::parse(id(), &bytes(PASSWORD, Cipher::default())).unwrap();
        for wrong in [
            Credential::Password(b"wrong"),
            Credential::KeyFile(b"correct horse"),
            Credential::Open,
        ] {
            assert!(slot.open(wrong).unwrap().is_none());
        }
        let slot = Slot::parse(id(), &bytes(KEY_FILE, Cipher::default())).unwrap();
        assert!(slot.open(Credential::KeyFile(&[0x5b; 32])).unwrap().is_none());
        assert!(slot.open(Credential::Password(&[0x5a; 32])).unwrap().is_none());
    }

    #[test]
    fn oversized_input_is_refused() {
        let long = info(PASSWORD, &"x".repeat(LABEL_BYTES_MAX + 1));
        let refused = encode(&long, Cipher::default(), PASSWORD, &contents(), &Counting::new(1));
        assert!(matches!(refused, Err(KeyError::LabelTooLong { .. })));
        let large = SlotContents {
            config: vec![0; CONFIG_BYTES_MAX + 1],
            ..contents()
        };
        let refused = encode(
            &info(KEY_FILE, ""),
            Cipher::default(),
            KEY_FILE,
            &large,
            &Counting::new(1),
        );
        assert!(matches!(refused, Err(KeyError::ConfigTooLong { .. })));
        let largest = SlotContents {
            config: vec![0; CONFIG_BYTES_MAX],
            ..contents()
        };
        let info = info(KEY_FILE, &"x".repeat(LABEL_BYTES_MAX));
        let bytes = encode(&info, Cipher::default(), KEY_FILE, &largest, &Counting::new(1)).unwrap();
        assert_eq!(bytes.len() as u64, SLOT_BYTES_MAX);
        assert!(Slot::parse(id(), &bytes).unwrap().open(KEY_FILE).unwrap().is_some());
    }

    /// A slot made by an attacker with access to the store, with a valid checksum.
    fn forged(mut bytes: Vec<u8>, at: usize, value: &[u8]) -> Vec<u8> {
        bytes.truncate(bytes.len() - HASH_BYTES);
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes.extend(blake3::hash(&bytes).as_bytes());
        bytes
    }

    #[test]
    fn a_hostile_slot_cannot_take_memory_or_time() {
        for (at, value) in [
            (MEMORY_AT, u32::MAX),
            (MEMORY_AT, (1 << 20) + 1),
            (MEMORY_AT, 0),
            (ITERATIONS_AT, 65),
            (ITERATIONS_AT, 0),
            (LANES_AT, 17),
            (LANES_AT, 0),
        ] {
            let hostile = forged(bytes(PASSWORD, Cipher::default()), at, &value.to_le_bytes());
            assert!(
                matches!(Slot::parse(id(), &hostile), Err(KeyError::Parameters { .. })),
                "{at} {value}"
            );
        }
        for (at, value) in [
            (LABEL_LENGTH_AT, u32::MAX),
            (PAYLOAD_LENGTH_AT, u32::MAX),
            (PAYLOAD_LENGTH_AT, 0),
        ] {
            let hostile = forged(bytes(PASSWORD, Cipher::default()), at, &value.to_le_bytes());
            assert!(
                matches!(Slot::parse(id(), &hostile), Err(KeyError::Damaged { .. })),
                "{at} {value}"
            );
        }
        let newer = forged(bytes(PASSWORD, Cipher::default()), VERSION_AT, &[2, 0]);
        assert!(matches!(
            Slot::parse(id(), &newer),
            Err(KeyError::Version {
                version: 2,
                known: 1,
                ..
            })
        ));
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        assert_eq!(id().to_string().parse::<SlotId>().unwrap(), id());
        assert_eq!(SlotId::from_object(&id().object()), Some(id()));
        for bad in ["", "0123", "0123456789ABCDEF", "+123456789abcdef", "0123456789abcdef0"] {
            assert!(bad.parse::<SlotId>().is_err(), "{bad}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn a_secret_survives_a_round_trip_and_damage_is_detected(
            secret in any::<[u8; 32]>(),
            config in proptest::collection::vec(any::<u8>(), 0..300),
            label in ".{0,40}",
            created in any::<u64>(),
            password in proptest::collection::vec(any::<u8>(), 1..40),
            flip in any::<proptest::sample::Index>(),
        ) {
            let credential = Credential::Password(&password);
            let info = SlotInfo { created_unix_seconds: created, ..info(credential, &label) };
            let contents = SlotContents { master: MasterSecret::from_bytes(secret), config };
            let bytes = encode(&info, Cipher::default(), credential, &contents, &Counting::new(created)).unwrap();
            let slot = Slot::parse(id(), &bytes).unwrap();
            prop_assert_eq!(&slot.info, &info);
            let opened = slot.open(credential).unwrap().unwrap();
            prop_assert!(opened.master == contents.master && opened.config == contents.config);

            let bit = flip.index(bytes.len() * 8);
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Slot::parse(id(), &damaged).is_err());
            prop_assert!(Slot::parse(id(), &bytes[..bit / 8]).is_err());

            // The seal holds even if the checksum is forged: an error, or the slot does not open. Costs have a separate
            // test.
            let at = bit / 8;
            if at < bytes.len() - HASH_BYTES && !(MEMORY_AT..CREATED_AT).contains(&at) {
                let hostile = forged(bytes, at, &[damaged[at]]);
                let opened = Slot::parse(id(), &hostile).and_then(|slot| slot.open(credential));
                prop_assert!(!matches!(opened, Ok(Some(_))), "bit {bit} is not under the seal");
            }
        }

        #[test]
        fn arbitrary_bytes_are_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let hostile = [&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat();
            prop_assert!(Slot::parse(id(), &bytes).is_err());
            prop_assert!(Slot::parse(id(), &hostile).is_err());
        }
    }
}
