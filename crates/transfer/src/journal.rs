//! The journal of a receiver: what it holds, durably.
//!
//! The journal is a file beside the image, to which entries are appended. docs/format/transfer.md describes it byte by
//! byte. An entry that a power failure has cut off, and all after it, do not count.

#![deny(clippy::indexing_slicing)]

use std::collections::BTreeMap;

use holdfast_block::to_usize;

use crate::digest::{Digest, UnitState};
use crate::layout::UnitLayout;
use crate::wire::{DiskId, FieldReader, FieldWriter, ReceiverId, SessionId};
use crate::{Error, Result};

/// The version of the journal that this program writes.
pub const JOURNAL_VERSION: u16 = 1;
/// First bytes of the first entry.
const MAGIC: [u8; 4] = *b"HFLJ";
const BEGIN: u8 = 1;
const SYNC: u8 = 2;
const OWNER: u8 = 3;

/// The copy that a receiver holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyIdentity {
    /// What distinguishes this receiver from others of the same session.
    pub receiver: ReceiverId,
    /// The session of the sender.
    pub session: SessionId,
    /// The disk.
    pub disk: DiskId,
    /// Its dimensions.
    pub layout: UnitLayout,
}

/// A synchronization that is durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyncEntry {
    /// Its number.
    pub number: u64,
    /// The units that changed since the last one.
    pub units: Vec<UnitState>,
}

/// An entry of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalEntry {
    /// The first entry: a copy begins, and nothing is held.
    Begin(CopyIdentity),
    /// Data was made durable.
    Sync(SyncEntry),
    /// The receiver owns the disk.
    Owner {
        /// The seal that was committed.
        seal: u64,
    },
}

impl JournalEntry {
    /// Appends the bytes of the entry to `output`.
    pub fn encode(&self, output: &mut Vec<u8>) {
        let start = output.len();
        output.extend_from_slice(&[0; 4]);
        let to = &mut FieldWriter(output);
        match self {
            Self::Begin(copy) => {
                to.u8(BEGIN);
                to.bytes(&MAGIC);
                to.u16(JOURNAL_VERSION);
                to.bytes(&copy.receiver.0);
                to.bytes(&copy.session.0);
                to.bytes(&copy.disk.0);
                to.u64(copy.layout.size_bytes());
                to.u32(copy.layout.unit_bytes());
            }
            Self::Sync(sync) => {
                to.u8(SYNC);
                to.u64(sync.number);
                for state in &sync.units {
                    to.u64(state.unit);
                    to.u8(u8::from(state.digest.is_some()));
                    to.bytes(&state.digest.unwrap_or(Digest([0; 32])).0);
                }
            }
            Self::Owner { seal } => {
                to.u8(OWNER);
                to.u64(*seal);
            }
        }
        let body_bytes = output.len() - start - 4;
        let length = u32::try_from(body_bytes).expect("2^25 units of 41 bytes are less than 2^32");
        let (_, entry) = output.split_at_mut(start);
        if let Some(place) = entry.first_chunk_mut() {
            *place = length.to_le_bytes();
        }
        let checksum = crc32c::crc32c(entry);
        output.extend_from_slice(&checksum.to_le_bytes());
    }

    fn decode(body: &[u8], offset: u64) -> Result<Self> {
        let impossible = |detail| Error::Journal { offset, detail };
        let mut from = FieldReader::new(body, "journal entry");
        let kind = from.u8()?;
        let entry = match kind {
            BEGIN => {
                if from.array()? != MAGIC {
                    return Err(impossible("it is not the journal of a receiver"));
                }
                let found = from.u16()?;
                if found != JOURNAL_VERSION {
                    let known = JOURNAL_VERSION;
                    return Err(Error::JournalVersion { found, known });
                }
                let receiver = ReceiverId(from.array()?);
                let (session, disk) = (SessionId(from.array()?), DiskId(from.array()?));
                let (size_bytes, unit_bytes) = (from.u64()?, from.u32()?);
                Self::Begin(CopyIdentity {
                    receiver,
                    session,
                    disk,
                    layout: UnitLayout::new(size_bytes, unit_bytes)?,
                })
            }
            SYNC => {
                let number = from.u64()?;
                let mut rest = FieldReader::new(from.rest(), "journal entry");
                let mut units = Vec::new();
                while let Some(state) = decode_unit(&mut rest)? {
                    units.push(state);
                }
                Self::Sync(SyncEntry { number, units })
            }
            OWNER => Self::Owner { seal: from.u64()? },
            _ => return Err(impossible("its kind is unknown")),
        };
        from.finish()?;
        Ok(entry)
    }
}

/// The next unit of a synchronization; `None` at the end.
fn decode_unit(from: &mut FieldReader<'_>) -> Result<Option<UnitState>> {
    if from.is_empty() {
        return Ok(None);
    }
    let (unit, is_known, digest) = (from.u64()?, from.u8()?, Digest(from.array()?));
    let digest = match is_known {
        0 => None,
        1 => Some(digest),
        _ => return Err(from.malformed("the state of a unit is neither 0 nor 1")),
    };
    Ok(Some(UnitState { unit, digest }))
}

/// What a journal says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalState {
    /// The copy.
    pub copy: CopyIdentity,
    /// The last synchronization; 0 if there was none.
    pub sync: u64,
    /// The digests of the units that are held.
    pub units: BTreeMap<u64, Digest>,
    /// The seal with which the receiver became the owner of the disk.
    pub owner: Option<u64>,
    /// Bytes of the complete entries. The caller cuts off what follows, before it appends.
    pub valid_bytes: u64,
}

impl JournalState {
    /// Reads a journal; `None` if it has no complete entry, so that no copy was accepted.
    ///
    /// The caller makes the journal durable first, in case that a killed process wrote its end: what is read here must
    /// not vanish by a power failure after it was told to the sender.
    pub fn decode(journal: &[u8]) -> Result<Option<Self>> {
        let mut state: Option<Self> = None;
        let mut rest = journal;
        while let Some((body, next)) = next_body(rest) {
            let offset = (journal.len() - rest.len()) as u64;
            let impossible = |detail| Error::Journal { offset, detail };
            match (JournalEntry::decode(body, offset)?, &mut state) {
                (JournalEntry::Begin(copy), None) => state = Some(Self::begun(copy)),
                (JournalEntry::Sync(sync), Some(state)) => state.apply(sync).map_err(impossible)?,
                (JournalEntry::Owner { seal }, Some(state)) => state.owner = Some(seal),
                (JournalEntry::Begin(_), Some(_)) => return Err(impossible("the copy begins a second time")),
                (_, None) => return Err(impossible("the copy has not begun")),
            }
            rest = next;
            if let Some(state) = &mut state {
                state.valid_bytes = (journal.len() - rest.len()) as u64;
            }
        }
        Ok(state)
    }

    /// The state after the first entry.
    pub(crate) fn begun(copy: CopyIdentity) -> Self {
        Self {
            copy,
            sync: 0,
            units: BTreeMap::new(),
            owner: None,
            valid_bytes: 0,
        }
    }

    /// Applies a synchronization; the error is what is impossible about it.
    pub(crate) fn apply(&mut self, sync: SyncEntry) -> std::result::Result<(), &'static str> {
        self.sync = sync.number;
        for UnitState { unit, digest } in sync.units {
            if unit >= self.copy.layout.unit_count() {
                return Err("a unit is not on the disk");
            }
            match digest {
                Some(digest) => self.units.insert(unit, digest),
                None => self.units.remove(&unit),
            };
        }
        Ok(())
    }
}

/// The body of the next entry, and what follows the entry; `None` at the end, or if the entry is not complete.
fn next_body(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, _) = bytes.split_first_chunk()?;
    let covered_bytes = 4 + to_usize(u64::from(u32::from_le_bytes(*length)));
    let (covered, rest) = bytes.split_at_checked(covered_bytes)?;
    let (checksum, rest) = rest.split_first_chunk()?;
    let is_valid = crc32c::crc32c(covered) == u32::from_le_bytes(*checksum);
    let body = covered.get(4..).filter(|_| is_valid)?;
    Some((body, rest))
}

#[cfg(test)]
mod tests {
    use holdfast_block::{SeededRandom, to_usize};

    use super::{CopyIdentity, JournalEntry, JournalState, SyncEntry};
    use crate::digest::{Digest, UnitState};
    use crate::layout::UnitLayout;
    use crate::wire::{DiskId, ReceiverId, SessionId};

    fn entries() -> Vec<JournalEntry> {
        let copy = CopyIdentity {
            receiver: ReceiverId([4; 16]),
            session: SessionId([1; 16]),
            disk: DiskId([2; 16]),
            layout: UnitLayout::new(20_000, 4096).unwrap(),
        };
        let state = |unit, digest| UnitState { unit, digest };
        let known = Some(Digest([3; 32]));
        let sync = |number, units| JournalEntry::Sync(SyncEntry { number, units });
        vec![
            JournalEntry::Begin(copy),
            sync(1, vec![state(0, known), state(4, known)]),
            sync(2, vec![state(0, None), state(3, known)]),
            JournalEntry::Owner { seal: 1 },
        ]
    }

    #[test]
    fn a_journal_that_is_cut_anywhere_says_what_its_complete_entries_say() {
        let mut journal = Vec::new();
        let mut ends = vec![0];
        for entry in entries() {
            entry.encode(&mut journal);
            ends.push(journal.len());
        }
        for length in 0..=journal.len() {
            let complete = ends.iter().filter(|end| **end <= length).count() - 1;
            let state = JournalState::decode(&journal[..length]).unwrap();
            assert_eq!(state.is_some(), complete > 0);
            let Some(state) = state else { continue };
            assert_eq!(state.valid_bytes, ends[complete] as u64);
            assert_eq!(state.sync, [0, 0, 1, 2, 2][complete]);
            assert_eq!(state.owner, (complete == 4).then_some(1));
            let units: Vec<u64> = state.units.keys().copied().collect();
            assert_eq!(units, [&[] as &[u64], &[], &[0, 4], &[3, 4], &[3, 4]][complete]);
        }
    }

    #[test]
    fn damaged_journals_are_an_error_or_shorter_and_never_a_panic() {
        let mut journal = Vec::new();
        for entry in entries() {
            entry.encode(&mut journal);
        }
        let whole = JournalState::decode(&journal).unwrap();
        let mut random = SeededRandom::new(1);
        for _ in 0..20_000 {
            let mut damaged = journal.clone();
            let at = to_usize(random.below(damaged.len() as u64));
            damaged[at] ^= 1 << random.below(8);
            assert_ne!(JournalState::decode(&damaged).ok().flatten(), whole);
        }
        for _ in 0..20_000 {
            let length = to_usize(random.below(100));
            drop(JournalState::decode(&random.bytes(length)));
        }
    }
}
