//! The repository's parsers for fuzzing, without the seals; see [`holdfast_block::hostile`].
//!
//! An attacker with the keys, or in an unencrypted repository, can seal any bytes. Seals and checksums therefore do not
//! protect a parser, and all parsers here receive bytes as they are *after* decryption.

mod map;
mod pack;
mod plaintexts;
mod small;

use holdfast_block::LruCache;
use holdfast_block::hostile::{Outcome, Parser};

pub use map::{map, map_inner, map_leaf};
pub use pack::{frame, pack, pack_directory, pack_ends};
pub use plaintexts::{Plaintext, plaintext, plaintexts, reseal};
pub use small::{
    condemned, config, damage_record, forgotten, manifest, object_name, relocation, scrub_record, waits, writer,
};

use crate::format::index::SegmentReader;
use crate::format::index::segment::forged;
use crate::format::index::{SegmentKeys, segment_name};
use crate::id::SegmentId;
use crate::key::{self, Cipher, Credential, Keyring, MasterSecret, PaperKey, Purpose};
use crate::store::{MemoryStore, ObjectKind, ObjectName, Store};

const fn parser(name: &'static str, feed: fn(&[u8]) -> Outcome) -> Parser {
    Parser { name, feed }
}

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    parser("condemned", condemned),
    parser("config", config),
    parser("damage_record", damage_record),
    parser("forgotten", forgotten),
    parser("frame", frame),
    parser("index_segment", index_segment),
    parser("key_slot", key_slot),
    parser("manifest", manifest),
    parser("map", map),
    parser("map_inner", map_inner),
    parser("map_leaf", map_leaf),
    parser("object_name", object_name),
    parser("pack", pack),
    parser("pack_directory", pack_directory),
    parser("pack_ends", pack_ends),
    parser("paper_key", paper_key),
    parser("relocation", relocation),
    parser("scrub_record", scrub_record),
    parser("sealed_object", sealed_object),
    parser("waits", waits),
    parser("writer", writer),
];

/// A well-known keyring.
fn keyring() -> Keyring {
    MasterSecret::from_bytes([0x48; 32]).keyring()
}

fn outcome_of<T, E>(result: &Result<T, E>) -> Outcome {
    match result {
        Ok(_) => Outcome::Decoded,
        Err(_) => Outcome::Refused,
    }
}

/// A key slot, with a corrected hash at its end; opened if it needs no secret.
///
/// A password slot is not opened: its cost is bounded by the limits on its parameters, and not fuzzed.
pub fn key_slot(bytes: &[u8]) -> Outcome {
    let store = MemoryStore::new();
    let name = ObjectName::new(ObjectKind::Key, "0123456789abcdef").expect("16 digits are a name");
    let object = [bytes, blake3::hash(bytes).as_bytes()].concat();
    store.put(&name, &object).expect("memory is never full");
    let listing = key::list(&store).expect("damage is listed, not an error");
    assert_eq!(
        listing.slots.len() + listing.damaged.len(),
        1,
        "a slot is whole or damaged"
    );
    for credential in [Credential::Open, Credential::KeyFile(&[0x5a; 32])] {
        if let Ok(unlocked) = key::unlock(&store, credential) {
            assert!(
                unlocked.config.len() <= key::CONFIG_BYTES_MAX,
                "a configuration over its limit"
            );
        }
    }
    if listing.damaged.is_empty() {
        Outcome::Decoded
    } else {
        Outcome::Refused
    }
}

/// A paper key, as typed.
pub fn paper_key(bytes: &[u8]) -> Outcome {
    let decoded = PaperKey::decode(&String::from_utf8_lossy(bytes));
    if let Ok(master) = &decoded {
        let again = PaperKey::decode(PaperKey::encode(master).text());
        assert_eq!(again.ok().as_ref(), Some(master), "it reads as another secret");
    }
    outcome_of(&decoded)
}

/// A small sealed object, as stored.
pub fn sealed_object(bytes: &[u8]) -> Outcome {
    let opened = key::open_object(&keyring(), Purpose::MarkerSealing, &ObjectName::config(), bytes);
    if let Ok(plaintext) = &opened {
        assert_eq!(
            plaintext.len() as u64 + key::SEALED_OVERHEAD_BYTES,
            bytes.len() as u64,
            "all of it was sealed"
        );
    }
    outcome_of(&opened)
}

/// A segment of the index, with sealed sections and a corrected trailer.
pub fn index_segment(bytes: &[u8]) -> Outcome {
    let (store, segment) = (MemoryStore::new(), SegmentId::from_bytes([3; 16]));
    let keys = SegmentKeys {
        cipher: Cipher::Aes256Gcm,
        keyring: keyring(),
    };
    let Some(object) = forged::forge(&keys, segment, bytes) else {
        return Outcome::Refused;
    };
    store
        .put(&segment_name(segment), &object)
        .expect("memory is never full");
    let Ok(reader) = SegmentReader::open(&store, &keys, segment) else {
        return Outcome::Refused;
    };
    let pages = std::sync::Mutex::new(LruCache::new(1 << 20));
    let mut outcome = Outcome::Decoded;
    for pack in reader.packs().iter().take(64) {
        if let Ok(Some(table)) = reader.frame_table(&store, *pack)
            && let Ok(directory) = crate::format::pack::decode_frame_table(&table)
        {
            assert!(
                crate::format::pack::encode_frame_table(&directory).len() <= table.len(),
                "more than was read"
            );
        }
    }
    for number in 0..reader.page_count() {
        let Ok(entries) = reader.page(&store, number) else {
            outcome = Outcome::Refused;
            continue;
        };
        for entry in entries.iter().take(2) {
            let found = reader.find(&store, &pages, &entry.prefix).unwrap_or_default();
            assert!(found.iter().all(|other| other.prefix == entry.prefix), "another chunk");
        }
    }
    outcome
}
