//! The scrub record: when each pack was last read and found intact.
//!
//! Plaintext of the sealed object `scrub/read.<random>` (integers named *n* are of variable length, see `wire`):
//!
//! ```text
//! u8   format version, 1
//! n    packs, each:  16 bytes identity, n seconds since 1970 when it was read
//! ```
//!
//! Every scrub puts one object with its own results and all previous records, and then deletes the previous ones:
//! nothing is lost between concurrent scrubs, and the number of objects stays small. If a record is lost, packs are
//! read earlier than necessary.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::id::PackId;
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::vault::Vault;
use crate::wire::{Decoder, Malformed, put_varint};

const FORMAT_VERSION: u8 = 1;
const NAME_START: &str = "read.";

/// Longest record that is read: three million packs.
pub(crate) const READ_RECORD_BYTES_MAX: u64 = 64 << 20;

/// Latest time that a record may name: the year 9999.
const SECONDS_MAX: u64 = 253_402_300_799;

/// Times at which packs were last read, in seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ReadRecord {
    pub(crate) packs: BTreeMap<PackId, u64>,
}

impl ReadRecord {
    pub(crate) fn add(&mut self, pack: PackId, seconds: u64) {
        let known = self.packs.entry(pack).or_default();
        *known = seconds.min(SECONDS_MAX).max(*known);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        other.packs.iter().for_each(|(pack, seconds)| self.add(*pack, *seconds));
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![FORMAT_VERSION];
        put_varint(&mut bytes, self.packs.len() as u64);
        for (pack, seconds) in &self.packs {
            bytes.extend_from_slice(pack.as_bytes());
            put_varint(&mut bytes, *seconds);
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> std::result::Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        if decoder.u8()? != FORMAT_VERSION {
            return decoder.fail("has an unknown version");
        }
        let mut record = Self::default();
        for _ in 0..decoder.count(PackId::LENGTH + 1)? {
            let pack = PackId::from_bytes(decoder.array()?);
            record.add(pack, decoder.varint_at_most(SECONDS_MAX)?);
        }
        decoder.finish()?;
        Ok(record)
    }
}

/// Whether a name is that of a scrub record.
pub(crate) fn is_read_record(name: &ObjectName) -> bool {
    name.kind() == ObjectKind::Scrub && name.name().starts_with(NAME_START)
}

/// The union of all records, and the objects they were read from, including damaged ones.
pub(super) fn read_records(vault: &Vault) -> Result<(ReadRecord, Vec<ObjectName>)> {
    let mut merged = ReadRecord::default();
    let mut sources = Vec::new();
    for name in vault.names(ObjectKind::Scrub)?.into_iter().filter(is_read_record) {
        let read = vault.get_sealed(&name, READ_RECORD_BYTES_MAX).and_then(|bytes| {
            ReadRecord::decode(&bytes).map_err(|error| Error::malformed(&name, 0, "record of a scrub", error))
        });
        match read {
            Ok(record) => merged.merge(&record),
            Err(Error::Store(StoreError::NotFound { .. })) => continue,
            Err(error) if error.is_damage() => {}
            // A later release wrote it: it is kept and ignored.
            Err(error) if error.is_about_one_object() => continue,
            Err(error) => return Err(error),
        }
        sources.push(name);
    }
    Ok((merged, sources))
}

/// Replaces `sources` by `record`. The new object is durable before the old ones are deleted.
pub(super) fn replace_records(vault: &Vault, record: &ReadRecord, sources: &[ObjectName]) -> Result<()> {
    let random = u64::from_le_bytes(vault.environment.draw()?);
    let name = ObjectName::new(ObjectKind::Scrub, &format!("{NAME_START}{random:016x}")).map_err(StoreError::from)?;
    vault.put_sealed(&name, &record.encode())?;
    sources.iter().try_for_each(|name| vault.store.delete(name))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::ReadRecord;
    use crate::id::PackId;

    fn record(packs: &[(u8, u32)]) -> ReadRecord {
        let mut record = ReadRecord::default();
        for (pack, seconds) in packs {
            record.add(PackId::from_bytes([*pack; 16]), u64::from(*seconds));
        }
        record
    }

    #[test]
    fn of_two_records_the_later_reading_counts() {
        let mut merged = record(&[(1, 10), (2, 20)]);
        merged.merge(&record(&[(2, 5), (1, 11), (3, 1)]));
        assert_eq!(merged, record(&[(1, 11), (2, 20), (3, 1)]));
    }

    proptest! {
        #[test]
        fn records_round_trip(packs in proptest::collection::vec(any::<(u8, u32)>(), 0..40)) {
            let record = record(&packs);
            prop_assert_eq!(ReadRecord::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn merging_is_the_same_in_any_order(a in proptest::collection::vec(any::<(u8, u32)>(), 0..20),
                                            b in proptest::collection::vec(any::<(u8, u32)>(), 0..20)) {
            let (mut ab, mut ba) = (record(&a), record(&b));
            ab.merge(&record(&b));
            ba.merge(&record(&a));
            prop_assert_eq!(ab, ba);
        }

        #[test]
        fn hostile_records_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(decoded) = ReadRecord::decode(&bytes) {
                prop_assert_eq!(ReadRecord::decode(&decoded.encode()), Ok(decoded));
            }
        }
    }
}
