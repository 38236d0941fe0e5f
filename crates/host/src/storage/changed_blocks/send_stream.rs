//! Changes of a file, from the incremental stream between two host snapshots (`zfs send -i`).
//!
//! # Correctness
//!
//! A receiver of such a stream turns the older snapshot into the newer one: data that no record covers is equal in
//! both. So only the ranges in records may have changed, if the stream is complete and belongs to these two
//! snapshots. Both conditions are checked: the begin record has the GUIDs of both snapshots, and the end record has a
//! checksum of everything. An incomplete stream is an error, never a smaller set of changes.
//!
//! Only records are parsed; data is skipped in pieces of 64 KiB, whatever size a record claims. The layout is in
//! `docs/format/zfs-send-stream.md`.
//!
//! # Cases that would be wrong
//!
//! | case | what is done |
//! |---|---|
//! | the stream of another pair of snapshots; a full stream | refused: GUID |
//! | several streams in one (`-R`, `-I`, `-p`) | refused |
//! | the rest of an interrupted stream (`-t`) | refused: it lacks the part that was received before |
//! | a redacted stream | refused: it lacks the redacted data |
//! | unknown features | refused |
//! | the file was removed, and its object number reused | all of it is changed, if the record says that the file is younger than the older snapshot, or if its age cannot be read (`-w`) |
//! | another block size, another type, a freed object number | all of it is changed: receivers free such a file first, without a record for it |
//! | the file has grown | the part after the old end is changed |
//! | attributes (SPILL), ranges of dnodes (OBJECT_RANGE) | ignored: they contain no data of the file |
//! | a sender that omits holes (ZFS on Linux before 0.6.5.8, illumos 6370, 6513) | not visible in the stream: the caller checks the version |

mod checked;
mod object;
pub(crate) mod record;
#[cfg(any(test, feature = "hostile"))]
pub(crate) mod specimen;
#[cfg(test)]
mod tests;

use std::io::Read;

use super::error::SendStreamError;
use super::ranges::{ChangedRanges, Collector};
use checked::{ChecksumMode, RecordReader};
use object::{LargeBlocks, look_at_object};
use record::{BeginRecord, RecordKind, StreamRecord};

type Result<T> = std::result::Result<T, SendStreamError>;

/// The object number of a volume's content in its dataset.
const VOLUME_OBJECT: u64 = 1;

/// The expected stream, and the object whose changes are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendStreamQuery {
    /// GUID of the older snapshot.
    pub from_guid: u64,
    /// GUID of the newer snapshot.
    pub to_guid: u64,
    /// The object.
    pub object: StreamObject,
    /// The size of the object in the older snapshot, in bytes.
    pub size_before_bytes: u64,
    /// The size of the object in the newer snapshot, in bytes.
    pub size_after_bytes: u64,
}

/// An object in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamObject {
    /// A file, which has the same object number in both snapshots.
    File {
        /// The object number (`st_ino`).
        number: u64,
        /// The block size in the older snapshot (`st_blksize`).
        block_before_bytes: u64,
        /// The transaction of the older snapshot (`createtxg`); [`None`] if unknown. Without it, any change of the
        /// file means that all of the file is changed.
        from_transaction: Option<u64>,
    },
    /// The content of a volume.
    Volume,
}

/// The changes in a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamChanges {
    /// The ranges in which the two states may differ.
    pub ranges: ChangedRanges,
    /// Why all of the object is changed, if the records do not limit the changes.
    pub whole: Option<WholeFileReason>,
    /// Number of records.
    pub record_count: u64,
    /// Length of the stream.
    pub stream_bytes: u64,
}

/// Why all of a file is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WholeFileReason {
    /// The object number was freed.
    Freed,
    /// The file is younger than the older snapshot: the object number was reused.
    Replaced,
    /// The block size changed.
    BlockSize,
    /// The type changed.
    Kind,
    /// The record does not contain the age of the file.
    AgeUnknown,
}

/// Reads a stream to its end, and returns the changes of the object.
pub fn by_send_stream(input: &mut dyn Read, query: &SendStreamQuery) -> Result<StreamChanges> {
    read(input, query, ChecksumMode::Held)
}

/// The GUID of the target snapshot of a stream, from its begin record. The rest of the stream is not read.
pub fn guid_of_stream(input: &mut dyn Read) -> Result<u64> {
    let (_, begin) = RecordReader::begin(input, ChecksumMode::Held)?;
    Ok(begin.to_guid)
}

/// Like [`by_send_stream`], but does not verify checksums.
#[cfg(feature = "hostile")]
pub(super) fn read_unchecked(input: &mut dyn Read, query: &SendStreamQuery) -> Result<StreamChanges> {
    read(input, query, ChecksumMode::Ignored)
}

fn read(input: &mut dyn Read, query: &SendStreamQuery, sums: ChecksumMode) -> Result<StreamChanges> {
    let (mut stream, begin) = RecordReader::begin(input, sums)?;
    check_beginning(&begin, query)?;
    stream.skip(begin.payload_bytes.into())?;
    let mut search = StreamSearch {
        query,
        large_blocks: if begin.features & record::feature::LARGE_BLOCKS == 0 {
            LargeBlocks::Split
        } else {
            LargeBlocks::Kept
        },
        changed: Collector::new(query.size_after_bytes),
        whole: None,
    };
    search.changed.add(query.size_before_bytes..query.size_after_bytes);
    let mut record_count = 1;
    loop {
        let record = stream.record()?;
        record_count += 1;
        if record.kind()? == RecordKind::End {
            stream.finish(&record)?;
            break;
        }
        search.take(&mut stream, &record)?;
    }
    Ok(StreamChanges {
        ranges: search.changed.finish(),
        whole: search.whole,
        record_count,
        stream_bytes: stream.offset(),
    })
}

/// Refuses a stream that does not contain all differences between the two snapshots.
fn check_beginning(begin: &BeginRecord, query: &SendStreamQuery) -> Result<()> {
    let unusable = |reason: String| Err(SendStreamError::Unusable { reason });
    if begin.is_compound() {
        return unusable("it is several streams in one (send -R, -I or -p)".to_owned());
    }
    if !begin.is_single() {
        return unusable(format!("its format is unknown ({:#x})", begin.version_word));
    }
    for (flag, what) in [
        (record::feature::RESUMING, "it is the rest of an interrupted stream"),
        (record::feature::REDACTED, "parts of it are left out (redacted)"),
    ] {
        if begin.features & flag != 0 {
            return unusable(what.to_owned());
        }
    }
    let unknown = begin.features & !record::feature::KNOWN;
    if unknown != 0 {
        return unusable(format!("it has unknown features ({unknown:#x})"));
    }
    let type_wanted = match query.object {
        StreamObject::File { .. } => record::DATASET_FILES,
        StreamObject::Volume => record::DATASET_VOLUME,
    };
    if begin.dataset_type != type_wanted {
        return unusable(format!("it is of a dataset of type {}", begin.dataset_type));
    }
    if (begin.from_guid, begin.to_guid) != (query.from_guid, query.to_guid) {
        return unusable(format!(
            "it is of other snapshots: {} to {} instead of {} to {}",
            begin.from_guid, begin.to_guid, query.from_guid, query.to_guid
        ));
    }
    Ok(())
}

struct StreamSearch<'a> {
    query: &'a SendStreamQuery,
    large_blocks: LargeBlocks,
    changed: Collector,
    whole: Option<WholeFileReason>,
}

impl StreamSearch<'_> {
    fn number(&self) -> u64 {
        match self.query.object {
            StreamObject::File { number, .. } => number,
            StreamObject::Volume => VOLUME_OBJECT,
        }
    }

    /// Handles a record, and skips its payload.
    fn take(&mut self, stream: &mut RecordReader<'_>, record: &StreamRecord) -> Result<()> {
        let (kind, number) = (record.kind()?, self.number());
        let payload_bytes = record.payload_bytes(kind)?;
        match kind {
            RecordKind::Object if record.object() == number => {
                let bonus = stream.payload(payload_bytes)?;
                let whole = look_at_object(record, &bonus, self.query, self.large_blocks);
                if let Some(whole) = whole {
                    self.all(whole);
                }
                return Ok(());
            }
            RecordKind::FreeObjects => {
                let (first, count) = record.objects();
                if (first..first.saturating_add(count)).contains(&number) {
                    self.all(WholeFileReason::Freed);
                }
            }
            RecordKind::Write | RecordKind::WriteByReference | RecordKind::WriteEmbedded | RecordKind::Free
                if record.object() == number =>
            {
                let (offset, length) = record.range(kind);
                self.changed.add(offset..offset.saturating_add(length));
            }
            RecordKind::Redact => {
                return Err(record.invalid("a part is left out of a stream that is not redacted".to_owned()));
            }
            RecordKind::Begin => return Err(record.invalid("a second begin record".to_owned())),
            _ => {}
        }
        stream.skip(payload_bytes)
    }

    fn all(&mut self, why: WholeFileReason) {
        self.changed.add_all();
        self.whole.get_or_insert(why);
    }
}
