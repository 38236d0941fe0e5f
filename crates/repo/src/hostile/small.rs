//! Small objects: configuration, manifests, and the records of writers, gc and scrub.

use holdfast_block::hostile::Outcome;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::outcome_of;
use crate::check::scrub::copied_manifest;
use crate::check::scrub::record::{ReadRecord, is_read_record};
use crate::format::config::RepositoryConfig;
use crate::format::pack::{Directory, Location, PackKind};
use crate::format::relocation::RelocationTable;
use crate::gc::Waits;
use crate::id::{PackId, WriterId};
use crate::repository::damage_records::{DamageRecord, damaged_pack};
use crate::repository::pending_deletes::{decode_condemned, encode_condemned};
use crate::repository::relocations::RelocationId;
use crate::store::{ObjectKind, ObjectName};
use crate::writers::forget::ForgottenRecord;
use crate::writers::lease::WriterRecord;

/// The plaintext of `config`.
pub fn config(bytes: &[u8]) -> Outcome {
    let decoded = RepositoryConfig::decode(bytes);
    if let Ok(config) = &decoded {
        let again = RepositoryConfig::decode(&config.encode());
        assert_eq!(again.ok().as_ref(), Some(config), "it reads as something else");
    }
    outcome_of(&decoded)
}

/// The plaintext of a snapshot's manifest, with the id that it contains.
pub fn manifest(bytes: &[u8]) -> Outcome {
    let carrier = |attachment: Vec<u8>| {
        let mut directory = Directory::new(PackKind::Tree, WriterId::from_bytes([1; 16]));
        directory.attachment = attachment;
        directory
    };
    let Some(manifest) = copied_manifest(&carrier(bytes.to_vec())) else {
        return Outcome::Refused;
    };
    let encoded = manifest.encode();
    let again = copied_manifest(&carrier(encoded.clone())).expect("what was encoded decodes");
    assert!(again.encode() == encoded, "it reads as something else");
    let logical_bytes = manifest.logical_bytes();
    for disk in &manifest.disks {
        assert!(disk.size_bytes <= logical_bytes, "a disk larger than all disks");
        manifest.disk(Some(&disk.name)).expect("a disk is found by its name");
    }
    manifest.statistics();
    Outcome::Decoded
}

/// Parses JSON as a `T`.
fn json<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Outcome {
    let Ok(record) = serde_json::from_slice::<T>(bytes) else {
        return Outcome::Refused;
    };
    let encode = |record: &T| serde_json::to_vec(record).expect("a record is made of strings and numbers");
    let encoded = encode(&record);
    let again: T = serde_json::from_slice(&encoded).expect("what was encoded decodes");
    assert!(encode(&again) == encoded, "it reads as something else");
    Outcome::Decoded
}

/// The plaintext of a writer's announcement, in `writers/` or `protected/`.
pub fn writer(bytes: &[u8]) -> Outcome {
    json::<WriterRecord>(bytes)
}

/// The plaintext of the record of a snapshot that was removed.
pub fn forgotten(bytes: &[u8]) -> Outcome {
    json::<ForgottenRecord>(bytes)
}

/// The plaintext of a list of writers that gc waits for.
pub fn waits(bytes: &[u8]) -> Outcome {
    json::<Waits>(bytes)
}

/// The plaintext of a list of condemned packs.
pub fn condemned(bytes: &[u8]) -> Outcome {
    let decoded = decode_condemned(bytes);
    if let Ok(packs) = &decoded {
        assert_eq!(encode_condemned(packs), bytes, "it is written in one way only");
    }
    outcome_of(&decoded)
}

/// The plaintext of a relocation.
pub fn relocation(bytes: &[u8]) -> Outcome {
    let mut table = RelocationTable::default();
    if table.decode_into(bytes).is_err() {
        return Outcome::Refused;
    }
    let mut again = RelocationTable::default();
    again.decode_into(&table.encode()).expect("what was encoded decodes");
    assert_eq!(again, table, "it reads as something else");
    for moved in table.moves().take(100) {
        let ends = [0, 1, moved.length.saturating_sub(1), moved.length];
        for offset in ends.map(|end| moved.offset.saturating_add(end)) {
            let pack = PackId::from_bytes([1; 16]);
            let frame = moved.frame;
            let (_, together) = table.find(Location { pack, frame, offset }, 4096);
            assert!((1..=4096).contains(&together), "following a relocation makes progress");
        }
    }
    Outcome::Decoded
}

/// The plaintext of a damage record.
pub fn damage_record(bytes: &[u8]) -> Outcome {
    let decoded = DamageRecord::decode(bytes);
    if let Ok(record) = &decoded {
        let again = DamageRecord::decode(&record.encode());
        assert_eq!(again.as_ref(), Ok(record), "it reads as something else");
        let mut merged = record.clone();
        merged.merge(record.clone());
        assert_eq!(&merged, record, "merged with itself it says something else");
    }
    outcome_of(&decoded)
}

/// The plaintext of a record of a scrub.
pub fn scrub_record(bytes: &[u8]) -> Outcome {
    let decoded = ReadRecord::decode(bytes);
    if let Ok(record) = &decoded {
        let again = ReadRecord::decode(&record.encode());
        assert_eq!(again.as_ref(), Ok(record), "it reads as something else");
    }
    outcome_of(&decoded)
}

/// The name of an object, as a store lists it.
pub fn object_name(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    let mut outcome = Outcome::Refused;
    let in_kinds = ObjectKind::ALL.iter().map(|kind| ObjectName::new(*kind, &text));
    for name in in_kinds.chain([text.parse()]).flatten() {
        let again: ObjectName = name.to_string().parse().expect("what was written is a name");
        assert_eq!(again, name, "it reads as another name");
        RelocationId::of(&name);
        damaged_pack(&name);
        is_read_record(&name);
        outcome = Outcome::Decoded;
    }
    outcome
}
