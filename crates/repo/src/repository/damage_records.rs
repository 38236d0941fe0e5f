//! Damage records: known damage, so that writers do not refer to it and the next backup replaces it.
//!
//! Scrub and repair put an object `scrub/damage.<pack>.<random>` for every pack that is damaged or missing. Its name
//! alone makes the pack unusable for writers: they find none of its chunks, treat no block of it as unchanged and share
//! no page of it, so the next backup of the same data stores the data again. Its content lists the chunks of the pack,
//! which may otherwise be lost with the directory of the pack, or with the index. *Healing* looks each of them up in
//! the usable packs, and if one is stored again, writes a relocation from the old location to the new one: old
//! snapshots become readable again.
//!
//! Plaintext (integers named *n* are of variable length, see `wire`):
//!
//! ```text
//! u8   format version, 1
//! u8   1 when only some frames are damaged, 0 when nothing of the pack can be trusted
//! n    damaged frames, n each
//! n    chunks, each:  n frame, n offset, n length, u8 bytes of its identity (16 or 32), the identity
//! ```
//!
//! A record is deleted together with its pack: repair deletes a damaged pack once it contains nothing that a snapshot
//! needs.
//!
//! # Requirements for gc
//!
//! - A pack with a damage record is never rewritten by copying its frames as they are, and its bytes are never used
//!   without the checks that repair makes; it should be left to repair.
//! - It may be deleted like any other when no snapshot needs bytes of it *after relocations*. Its damage records
//!   are deleted afterwards, as are those of missing packs that no snapshot needs.
//! - The destination of a relocation is live if a snapshot refers to its source; a relocation can be deleted when no
//!   live snapshot refers to the pack of its source.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::error::{Error, Result};
use crate::format::chunker::CHUNK_BYTES_MAX;
use crate::format::codec::FRAME_BYTES_MAX;
use crate::format::index::{IndexEntry, PREFIX_LENGTH, Prefix, prefix_of};
use crate::format::pack::{Directory, FRAME_COUNT_MAX};
use crate::id::{ChunkId, PackId};
use crate::repository::Repository;
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::vault::Vault;
use crate::wire::{Decoder, Malformed, put_varint};

const FORMAT_VERSION: u8 = 1;
const NAME_START: &str = "damage.";

/// Maximum length of a damage record that is read: many times the chunks of a pack of the largest size.
pub(crate) const DAMAGE_BYTES_MAX: u64 = 64 << 20;

/// The known part of a chunk's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KnownIdentity {
    /// The first bytes, from the index: with a keyed hash, accidental collisions are impossible in practice.
    Prefix(Prefix),
    /// The complete id, from the directory of the pack.
    Whole(ChunkId),
}

impl KnownIdentity {
    pub(crate) fn prefix(&self) -> Prefix {
        match self {
            Self::Prefix(prefix) => *prefix,
            Self::Whole(id) => prefix_of(id),
        }
    }

    pub(crate) fn is(&self, id: &ChunkId) -> bool {
        match self {
            Self::Prefix(prefix) => *prefix == prefix_of(id),
            Self::Whole(known) => known == id,
        }
    }
}

/// The damaged part of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DamageExtent {
    /// It is missing, or nothing of it is readable.
    Whole,
    /// These frames, or their prints; if empty, only its header or trailer.
    Frames(BTreeSet<u32>),
}

/// The recorded damage of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DamageRecord {
    pub(crate) extent: DamageExtent,
    /// The chunks of the pack, by frame and offset: length and identity.
    pub(crate) chunks: BTreeMap<(u32, u32), (u32, KnownIdentity)>,
}

impl DamageRecord {
    pub(crate) fn new(extent: DamageExtent) -> Self {
        Self {
            extent,
            chunks: BTreeMap::new(),
        }
    }

    /// Adds the chunks that a directory lists.
    pub(crate) fn add_directory(&mut self, directory: &Directory) {
        for (number, frame) in (0u32..).zip(directory.frames()) {
            let mut offset = 0;
            for chunk in directory.chunks(frame) {
                self.chunks
                    .insert((number, offset), (chunk.length, KnownIdentity::Whole(chunk.id)));
                offset += chunk.length;
            }
        }
    }

    /// Adds a chunk from the index, unless its complete id is known already.
    pub(crate) fn add_entry(&mut self, entry: &IndexEntry) {
        self.chunks
            .entry((entry.location.frame, entry.location.offset))
            .or_insert((entry.length, KnownIdentity::Prefix(entry.prefix)));
    }

    /// Whether `frame` is damaged.
    pub(crate) fn covers(&self, frame: u32) -> bool {
        match &self.extent {
            DamageExtent::Whole => true,
            DamageExtent::Frames(frames) => frames.contains(&frame),
        }
    }

    /// Merges another record of the same pack.
    pub(crate) fn merge(&mut self, other: Self) {
        match (&mut self.extent, other.extent) {
            (DamageExtent::Frames(frames), DamageExtent::Frames(more)) => frames.extend(more),
            (extent, _) => *extent = DamageExtent::Whole,
        }
        for (place, chunk) in other.chunks {
            let known = self.chunks.entry(place).or_insert(chunk);
            if matches!(known.1, KnownIdentity::Prefix(_)) {
                *known = chunk;
            }
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let none = BTreeSet::new();
        let (partial, frames) = match &self.extent {
            DamageExtent::Whole => (0, &none),
            DamageExtent::Frames(frames) => (1, frames),
        };
        let mut bytes = vec![FORMAT_VERSION, partial];
        put_varint(&mut bytes, frames.len() as u64);
        for frame in frames {
            put_varint(&mut bytes, (*frame).into());
        }
        put_varint(&mut bytes, self.chunks.len() as u64);
        for (&(frame, offset), (length, identity)) in &self.chunks {
            for value in [frame, offset, *length] {
                put_varint(&mut bytes, value.into());
            }
            match identity {
                KnownIdentity::Prefix(prefix) => {
                    bytes.push(16);
                    bytes.extend_from_slice(prefix);
                }
                KnownIdentity::Whole(id) => {
                    bytes.push(32);
                    bytes.extend_from_slice(id.as_bytes());
                }
            }
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> std::result::Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        if decoder.u8()? != FORMAT_VERSION {
            return decoder.fail("has an unknown version");
        }
        let partial = match decoder.u8()? {
            0 => false,
            1 => true,
            _ => return decoder.fail("has an unknown extent"),
        };
        let frame_limit = FRAME_COUNT_MAX as u64;
        let mut frames = BTreeSet::new();
        for _ in 0..decoder.count(1)? {
            frames.insert(bounded_u32(decoder.varint_at_most(frame_limit)?));
        }
        let mut record = Self::new(if partial {
            DamageExtent::Frames(frames)
        } else {
            DamageExtent::Whole
        });
        for _ in 0..decoder.count(4 + PREFIX_LENGTH)? {
            let frame = bounded_u32(decoder.varint_at_most(frame_limit)?);
            let offset = bounded_u32(decoder.varint_at_most(FRAME_BYTES_MAX as u64)?);
            let length = bounded_u32(decoder.varint_at_most(CHUNK_BYTES_MAX)?);
            if (offset + length) as usize > FRAME_BYTES_MAX {
                return decoder.fail("has a chunk that reaches past the end of a frame");
            }
            let identity = match decoder.u8()? {
                16 => KnownIdentity::Prefix(decoder.array()?),
                32 => KnownIdentity::Whole(ChunkId::from_bytes(decoder.array()?)),
                _ => return decoder.fail("has an identity of unknown length"),
            };
            record.chunks.insert((frame, offset), (length, identity));
        }
        decoder.finish()?;
        Ok(record)
    }
}

fn bounded_u32(value: u64) -> u32 {
    u32::try_from(value).expect("the limit of the field is below 2^32")
}

/// The pack of a damage record, from its name.
pub(crate) fn damaged_pack(name: &ObjectName) -> Option<PackId> {
    name.name().strip_prefix(NAME_START)?.split_once('.')?.0.parse().ok()
}

/// Puts a record about `pack`.
pub(crate) fn put_damage(vault: &Vault, pack: PackId, record: &DamageRecord) -> Result<()> {
    let random = u64::from_le_bytes(vault.environment.draw()?);
    let name =
        ObjectName::new(ObjectKind::Scrub, &format!("{NAME_START}{pack}.{random:016x}")).map_err(StoreError::from)?;
    vault.put_sealed(&name, &record.encode())?;
    Ok(())
}

/// The names of all damage records, by pack.
pub(crate) fn damage_names(vault: &Vault) -> Result<BTreeMap<PackId, Vec<ObjectName>>> {
    let mut names: BTreeMap<PackId, Vec<ObjectName>> = BTreeMap::new();
    for name in vault.names(ObjectKind::Scrub)? {
        if let Some(pack) = damaged_pack(&name) {
            names.entry(pack).or_default().push(name);
        }
    }
    Ok(names)
}

/// Deletes all records of `pack`.
pub(crate) fn clear_damage(vault: &Vault, pack: PackId) -> Result<()> {
    let names = damage_names(vault)?.remove(&pack).unwrap_or_default();
    names.iter().try_for_each(|name| vault.store.delete(name))?;
    Ok(())
}

/// Packs that new snapshots must not refer to.
pub(crate) fn damaged_packs(vault: &Vault) -> Result<HashSet<PackId>> {
    Ok(damage_names(vault)?.into_keys().collect())
}

impl Repository {
    /// Whether any stored data is known to be damaged; then backups store the affected parts again.
    pub fn has_known_damage(&self) -> Result<bool> {
        Ok(!damaged_packs(&self.vault)?.is_empty())
    }
}

impl Repository {
    /// Registers `warn`, which is called once for each pack that is read although its directory or trailer is
    /// damaged.
    pub fn warn_of_damage(&self, warn: impl Fn(&str) + Send + Sync + 'static) {
        self.packs.set_warn(Box::new(warn));
    }
}

/// The merged records of one pack; and the errors of unreadable records, which make the whole pack suspect.
pub(crate) fn read_damage(vault: &Vault, names: &[ObjectName]) -> Result<(Option<DamageRecord>, Vec<Error>)> {
    let mut merged: Option<DamageRecord> = None;
    let mut errors = Vec::new();
    for name in names {
        let read = vault.get_sealed(name, DAMAGE_BYTES_MAX).and_then(|bytes| {
            DamageRecord::decode(&bytes).map_err(|error| Error::malformed(name, 0, "damage record", error))
        });
        let record = match read {
            Ok(record) => record,
            Err(Error::Store(StoreError::NotFound { .. })) => continue,
            Err(error) if error.is_about_one_object() => {
                errors.push(error);
                DamageRecord::new(DamageExtent::Whole)
            }
            Err(error) => return Err(error),
        };
        match &mut merged {
            None => merged = Some(record),
            Some(merged) => merged.merge(record),
        }
    }
    Ok((merged, errors))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{DamageExtent, DamageRecord, KnownIdentity};
    use crate::id::ChunkId;

    fn record(frames: &[u32], chunks: &[(u8, u8, bool)]) -> DamageRecord {
        let mut record = DamageRecord::new(DamageExtent::Frames(frames.iter().copied().collect()));
        for &(frame, id, whole) in chunks {
            let identity = if whole {
                KnownIdentity::Whole(ChunkId::from_bytes([id; 32]))
            } else {
                KnownIdentity::Prefix([id; 16])
            };
            record
                .chunks
                .insert((frame.into(), u32::from(frame) * 512), (4096, identity));
        }
        record
    }

    #[test]
    fn more_precise_records_win_and_damage_only_grows() {
        let mut merged = record(&[1, 2], &[(1, 7, false), (2, 8, true)]);
        merged.merge(record(&[3], &[(1, 7, true), (2, 8, false), (9, 9, false)]));
        assert_eq!(merged, record(&[1, 2, 3], &[(1, 7, true), (2, 8, true), (9, 9, false)]));
        assert!(merged.covers(3) && !merged.covers(4));
        merged.merge(DamageRecord::new(DamageExtent::Whole));
        assert!(merged.covers(4));
        merged.merge(record(&[1], &[]));
        assert!(merged.covers(4));
    }

    proptest! {
        #[test]
        fn records_round_trip(frames in proptest::collection::vec(0u32..65536, 0..9),
                              chunks in proptest::collection::vec(any::<(u8, u8, bool)>(), 0..40)) {
            let record = record(&frames, &chunks);
            prop_assert_eq!(DamageRecord::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn hostile_records_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200),
                                       flips in proptest::collection::vec(any::<(u16, u8)>(), 0..6)) {
            assert!(DamageRecord::decode(&bytes).is_ok() || DamageRecord::decode(&bytes).is_err());
            let mut damaged = record(&[1, 5], &[(1, 2, true), (3, 4, false)]).encode();
            for (at, flip) in flips {
                let at = usize::from(at) % damaged.len();
                damaged[at] ^= flip;
            }
            if let Ok(decoded) = DamageRecord::decode(&damaged) {
                prop_assert_eq!(DamageRecord::decode(&decoded.encode()), Ok(decoded));
            }
        }
    }
}
