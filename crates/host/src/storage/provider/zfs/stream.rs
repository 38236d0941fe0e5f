//! The gate in front of `zfs receive`.
//!
//! # The problem
//!
//! A stream contains more than the content of a snapshot: its name, properties of the dataset (its mount point,
//! whether set-user-id programs are allowed), other datasets, removals, and the snapshot of the pool from which it is
//! cloned. `zfs receive` applies all of it as root.
//!
//! # What passes
//!
//! The records of a stream, whose layout is in `docs/format/zfs-send-stream.md`: each of a known type, with data of
//! bounded size, until the last one.
//!
//! | in the stream | what is done |
//! |---|---|
//! | a snapshot with another name or GUID than announced | refused |
//! | several streams in one (`-R`, `-I`, `-p`): only these have properties | refused; allowed from this host itself, for the announced snapshots |
//! | a clone, which would be created from any snapshot of the pool with that GUID | refused |
//! | deduplicated blocks, which are read from any snapshot with that GUID | refused |
//! | redacted streams, and unknown features | refused |
//! | the rest of an interrupted stream, of an unexpected snapshot | refused |
//! | anything after the end | refused, and the end is withheld |

#[cfg(feature = "hostile")]
pub(crate) mod hostile;
#[cfg(test)]
mod tests;

use std::io;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::to_usize;

use super::super::incoming::{Flow, StreamGate, StreamRefusal, fill, is_at_end};
use super::is_snapshot_name;
use crate::storage::changed_blocks::send_stream::record::{
    BeginRecord, ByteOrder, DATASET_FILES, DATASET_VOLUME, RECORD_LENGTH, RecordKind, StreamRecord, feature,
    name_in_beginning,
};

/// The stream contains a clone.
const FLAG_CLONE: u32 = 1;
/// Case-insensitive names, records of freed objects, and records of attributes.
const FLAGS_KNOWN: u32 = 0b1110;
const FEATURES_REFUSED: u64 = feature::DEDUPLICATED | feature::REDACTED | feature::HOLDS;
/// Encryption keys, and the offset of a resumed stream. The begin record of several streams lists their snapshots.
const BEGINNING_BYTES_MAX: u64 = 64 << 20;
/// Size of the pieces in which data is passed on.
const PIECE_BYTES: u64 = 128 << 10;

type Result<T> = std::result::Result<T, StreamRefusal>;

/// The expected content of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ZfsAnnouncement {
    /// Names and GUIDs, in order; empty if nothing was announced. A GUID is empty if the sender has none.
    pub(super) snapshots: Vec<(String, String)>,
    /// Whether one stream may contain several of them.
    pub(super) joining: Joining,
}

/// Whether one stream may contain several snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joining {
    Allowed,
    Refused,
}

/// The received snapshots: names and GUIDs.
pub(super) type Arrivals = Arc<Mutex<Option<Vec<(String, u64)>>>>;

pub(super) struct ZfsGate {
    announced: ZfsAnnouncement,
    arrived: Arrivals,
    order: ByteOrder,
    offset: u64,
    brought: Vec<(String, u64)>,
    is_joined: bool,
    state: ZfsGateState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ZfsGateState {
    /// Before the begin record of a stream.
    Outside,
    /// In the list before several streams. Only the end of the list may follow.
    List,
    /// In a stream.
    Inside,
    /// This number of data bytes follows, then the inner state.
    Data(u64, Within),
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Within {
    List,
    Stream,
}

impl From<Within> for ZfsGateState {
    fn from(within: Within) -> Self {
        match within {
            Within::List => Self::List,
            Within::Stream => Self::Inside,
        }
    }
}

fn refused<T>(reason: impl Into<String>) -> Result<T> {
    Err(StreamRefusal::new(reason))
}

impl ZfsGate {
    /// The second returned value gets the received snapshots at the end of the stream.
    pub(super) fn new(announced: ZfsAnnouncement) -> (Self, Arrivals) {
        let arrived = Arrivals::default();
        let gate = Self {
            announced,
            arrived: Arc::clone(&arrived),
            order: ByteOrder::Little,
            offset: 0,
            brought: Vec::new(),
            is_joined: false,
            state: ZfsGateState::Outside,
        };
        (gate, arrived)
    }

    /// Handles a begin record: of a stream, or of the list before several.
    fn begin(&mut self, bytes: &[u8; RECORD_LENGTH]) -> Result<()> {
        let is_first = self.offset == 0;
        let Some((order, begin)) = BeginRecord::parse(bytes) else {
            return refused("it is not a stream of zfs send");
        };
        if !is_first && order != self.order {
            return refused("its parts have different byte orders");
        }
        self.order = order;
        if u64::from(begin.payload_bytes) > BEGINNING_BYTES_MAX {
            return refused(format!("it begins with {} bytes of data", begin.payload_bytes));
        }
        let within = if begin.is_compound() && is_first {
            self.check_list(&begin)?;
            self.is_joined = true;
            Within::List
        } else {
            self.check_beginning(&begin, name_in_beginning(bytes))?;
            Within::Stream
        };
        self.state = match begin.payload_bytes {
            0 => within.into(),
            bytes => ZfsGateState::Data(bytes.into(), within),
        };
        Ok(())
    }

    fn check_list(&self, begin: &BeginRecord) -> Result<()> {
        if self.announced.joining == Joining::Refused || self.announced.snapshots.len() < 2 {
            return refused("it does not contain exactly one snapshot");
        }
        if begin.features & (feature::HOLDS | feature::DEDUPLICATED) != 0 {
            return refused("it contains more than snapshots");
        }
        Ok(())
    }

    fn check_beginning(&mut self, begin: &BeginRecord, name: Option<&str>) -> Result<()> {
        if !begin.is_single() {
            return refused("it does not contain exactly one snapshot");
        }
        let unknown = begin.features & !feature::KNOWN | begin.features & FEATURES_REFUSED;
        if unknown != 0 {
            return refused(format!("it has unsupported features ({unknown:#x})"));
        }
        let needs_data = begin.features & (feature::RESUMING | feature::RAW) != 0;
        if begin.payload_bytes != 0 && !needs_data {
            return refused("its begin record has unexpected data");
        }
        if begin.flags & FLAG_CLONE != 0 {
            return refused("it contains a clone");
        }
        if begin.flags & !FLAGS_KNOWN != 0 {
            return refused(format!("it has unknown flags ({:#x})", begin.flags));
        }
        if !matches!(begin.dataset_type, DATASET_FILES | DATASET_VOLUME) {
            return refused(format!("it is of a dataset of type {}", begin.dataset_type));
        }
        let name = name.and_then(|full| full.split_once('@')).map(|(_, name)| name);
        let Some(name) = name.filter(|name| is_snapshot_name(name)) else {
            return refused("its snapshot has no name");
        };
        self.check_announced(begin, name)?;
        self.brought.push((name.to_owned(), begin.to_guid));
        Ok(())
    }

    fn check_announced(&self, begin: &BeginRecord, name: &str) -> Result<()> {
        let announced = &self.announced.snapshots;
        let is_announced = |(expected, guid): &(String, String)| {
            expected == name && (guid.is_empty() || *guid == begin.to_guid.to_string())
        };
        let is_expected = if begin.features & feature::RESUMING != 0 {
            // A resumed stream may contain any of the missing snapshots.
            !self.is_joined && (announced.is_empty() || announced.iter().any(is_announced))
        } else if self.is_joined {
            announced.get(self.brought.len()).is_some_and(is_announced)
        } else {
            match &announced[..] {
                [] => true,
                [one] => is_announced(one),
                _ => false,
            }
        };
        if is_expected {
            return Ok(());
        }
        let expected: Vec<&str> = announced.iter().map(|(name, _)| &name[..]).collect();
        refused(format!(
            "it contains {name} (guid {}), but {} was announced",
            begin.to_guid,
            expected.join(", ")
        ))
    }

    /// Handles a record in a stream, or after the list before several streams. Returns whether it is the last record.
    fn take(&mut self, record: &StreamRecord, within: Within) -> Result<IsLast> {
        let refused = |error: crate::storage::changed_blocks::SendStreamError| StreamRefusal::new(error.to_string());
        let kind = record.kind().map_err(refused)?;
        match (kind, within) {
            (RecordKind::End, Within::List) => self.state = ZfsGateState::Outside,
            (RecordKind::End, Within::Stream) if self.is_joined => self.state = ZfsGateState::Outside,
            (RecordKind::End, Within::Stream) => return Ok(IsLast::Yes),
            (_, Within::List) => return Err(StreamRefusal::new("its list is followed by data")),
            (RecordKind::Begin | RecordKind::WriteByReference | RecordKind::Redact, _) => {
                return Err(StreamRefusal::new(format!("it has a record of kind {kind:?}")));
            }
            _ => match record.payload_bytes(kind).map_err(refused)? {
                0 => {}
                bytes => self.state = ZfsGateState::Data(bytes, within),
            },
        }
        Ok(IsLast::No)
    }

    /// Handles the end of the last stream. Any data after it is refused.
    fn end(&mut self, from: &mut dyn Read) -> io::Result<()> {
        if !is_at_end(from)? {
            return Err(StreamRefusal::new("it has data after its end").into());
        }
        self.state = ZfsGateState::Over;
        let brought = std::mem::take(&mut self.brought);
        *self.arrived.lock().unwrap_or_else(PoisonError::into_inner) = Some(brought);
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IsLast {
    Yes,
    No,
}

impl StreamGate for ZfsGate {
    fn pass(&mut self, from: &mut dyn Read, passed: &mut Vec<u8>) -> io::Result<Flow> {
        let within = match self.state {
            ZfsGateState::Over => return Ok(Flow::End),
            ZfsGateState::Data(left, within) => {
                let length = left.min(PIECE_BYTES);
                passed.resize(to_usize(length), 0);
                if !fill(from, passed)? {
                    passed.clear();
                    return Ok(Flow::End);
                }
                self.offset += length;
                self.state = match left - length {
                    0 => within.into(),
                    left => ZfsGateState::Data(left, within),
                };
                return Ok(Flow::More);
            }
            ZfsGateState::Outside => None,
            ZfsGateState::List => Some(Within::List),
            ZfsGateState::Inside => Some(Within::Stream),
        };
        let mut bytes = [0; RECORD_LENGTH];
        if !fill(from, &mut bytes)? {
            return Ok(Flow::End);
        }
        let record = StreamRecord {
            order: self.order,
            offset: self.offset,
            bytes,
        };
        let is_last = match within {
            Some(within) => self.take(&record, within)?,
            // The end of several streams is a separate record.
            None if self.is_joined && matches!(record.kind(), Ok(RecordKind::End)) => {
                if self.brought.len() != self.announced.snapshots.len() {
                    return Err(StreamRefusal::new("it lacks announced snapshots").into());
                }
                IsLast::Yes
            }
            None => {
                self.begin(&record.bytes)?;
                IsLast::No
            }
        };
        self.offset += record.bytes.len() as u64;
        if is_last == IsLast::Yes {
            self.end(from)?;
        }
        passed.extend(record.bytes);
        Ok(if is_last == IsLast::Yes { Flow::End } else { Flow::More })
    }
}
