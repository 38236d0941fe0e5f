//! What changed, by the stream of differences between two host snapshots (`zfs send -i`).
//!
//! # Why it is right
//!
//! Such a stream makes the older snapshot into the newer one at whoever receives it: what its records do not touch is the same in
//! both. So the ranges that records touch are all that may have changed, if the stream is whole, and is the one between these two
//! snapshots. That is checked: the numbers (`guid`) of both snapshots stand at its beginning, and a checksum over everything at its end.
//! A stream that ends early is an error, never a smaller set of changes.
//!
//! Only records are looked at; data is passed over, in pieces of 64 KiB, whatever size a record names. The layout is in
//! `docs/format/zfs-send-stream.md`.
//!
//! # What would make it wrong
//!
//! | case | what is done |
//! |---|---|
//! | the stream of another pair of snapshots; a full stream | refused: `guid` |
//! | several streams in one (`-R`, `-I`, `-p`) | refused |
//! | a stream that goes on where one was broken off (`-t`) | refused: it lacks what was received before |
//! | a redacted one | refused: it lacks what was redacted |
//! | features that are not known here | refused |
//! | the file was removed, and its number given to another one | all of it is changed, if the record says that the file is younger than the older snapshot, or if its age cannot be read (`-w`) |
//! | another block size, another type, a number that was freed | all of it is changed: receivers free such a file first, without a record for it |
//! | the file is longer now | what is past the old end is changed |
//! | attributes (SPILL), ranges of dnodes (OBJECT_RANGE) | nothing: no byte of the file is in them |
//! | a sender that forgets holes (ZFS on Linux before 0.6.5.8, illumos 6370, 6513) | cannot be seen in the stream: the caller looks at the version |

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
use object::look_at_object;
use record::{BeginRecord, RecordKind, StreamRecord};

type Result<T> = std::result::Result<T, SendStreamError>;

/// The number of a volume's content among the objects of its dataset.
const VOLUME_OBJECT: u64 = 1;

/// What is asked of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendStreamQuery {
    /// Number of the older snapshot (`guid`).
    pub from_guid: u64,
    /// Number of the newer one.
    pub to_guid: u64,
    /// What is looked for.
    pub object: StreamObject,
    /// Its size in the older snapshot, in bytes.
    pub size_before_bytes: u64,
    /// Its size in the newer one.
    pub size_after_bytes: u64,
}

/// What is looked for in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamObject {
    /// A file, which has the same number in both snapshots.
    File {
        /// Its number (`st_ino`).
        number: u64,
        /// Size of its blocks in the older snapshot (`st_blksize`).
        block_before_bytes: u64,
        /// When the older snapshot was made (`createtxg`); [`None`] where nobody knows, and then any change of the file is one of
        /// all of it.
        from_transaction: Option<u64>,
    },
    /// The content of a volume.
    Volume,
}

/// What a stream says has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamChanges {
    /// Where the two states may differ.
    pub ranges: ChangedRanges,
    /// Why that is all of it, where records alone would say less.
    pub whole: Option<WholeFileReason>,
    /// Records in the stream.
    pub record_count: u64,
    /// Bytes of the stream.
    pub stream_bytes: u64,
}

/// Why all of a file counts as changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WholeFileReason {
    /// Its number was freed.
    Freed,
    /// It is younger than the older snapshot: another file has its number now.
    Replaced,
    /// Its blocks had another size.
    BlockSize,
    /// It is something else now.
    Kind,
    /// The record does not tell how old it is.
    AgeUnknown,
}

/// Reads a stream to its end, and gives where it changes what is asked for.
pub fn by_send_stream(input: &mut dyn Read, question: &SendStreamQuery) -> Result<StreamChanges> {
    read(input, question, ChecksumMode::Held)
}

/// The number of the snapshot that a stream leads to (`guid`), as its beginning has it; the rest is not looked at.
pub fn guid_of_stream(input: &mut dyn Read) -> Result<u64> {
    let (_, begin) = RecordReader::begin(input, ChecksumMode::Held)?;
    Ok(begin.to_guid)
}

/// The same, whatever the checksums are.
#[cfg(feature = "hostile")]
pub(super) fn read_unchecked(input: &mut dyn Read, question: &SendStreamQuery) -> Result<StreamChanges> {
    read(input, question, ChecksumMode::Ignored)
}

fn read(input: &mut dyn Read, question: &SendStreamQuery, sums: ChecksumMode) -> Result<StreamChanges> {
    let (mut stream, begin) = RecordReader::begin(input, sums)?;
    check_beginning(&begin, question)?;
    stream.skip(begin.payload_bytes.into())?;
    let mut search = StreamSearch {
        question,
        has_large_blocks: begin.features & record::feature::LARGE_BLOCKS != 0,
        changed: Collector::new(question.size_after_bytes),
        whole: None,
    };
    search
        .changed
        .add(question.size_before_bytes..question.size_after_bytes);
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

/// Refuses a stream that does not hold all differences between the two snapshots.
fn check_beginning(begin: &BeginRecord, question: &SendStreamQuery) -> Result<()> {
    let unfit = |reason: String| Err(SendStreamError::Unfit { reason });
    if begin.is_compound() {
        return unfit("it is several streams in one (send -R, -I or -p)".to_owned());
    }
    if !begin.is_single() {
        return unfit(format!("its form is not known ({:#x})", begin.version_word));
    }
    for (flag, what) in [
        (record::feature::RESUMING, "it goes on where another one was broken off"),
        (record::feature::REDACTED, "parts of it are left out (redacted)"),
    ] {
        if begin.features & flag != 0 {
            return unfit(what.to_owned());
        }
    }
    let unknown = begin.features & !record::feature::KNOWN;
    if unknown != 0 {
        return unfit(format!("it has features that are not known ({unknown:#x})"));
    }
    let type_wanted = match question.object {
        StreamObject::File { .. } => record::DATASET_FILES,
        StreamObject::Volume => record::DATASET_VOLUME,
    };
    if begin.dataset_type != type_wanted {
        return unfit(format!("it is of a dataset of type {}", begin.dataset_type));
    }
    if (begin.from_guid, begin.to_guid) != (question.from_guid, question.to_guid) {
        return unfit(format!(
            "it is of other snapshots: it leads from {} to {}, and {} to {} is asked for",
            begin.from_guid, begin.to_guid, question.from_guid, question.to_guid
        ));
    }
    Ok(())
}

struct StreamSearch<'a> {
    question: &'a SendStreamQuery,
    has_large_blocks: bool,
    changed: Collector,
    whole: Option<WholeFileReason>,
}

impl StreamSearch<'_> {
    fn number(&self) -> u64 {
        match self.question.object {
            StreamObject::File { number, .. } => number,
            StreamObject::Volume => VOLUME_OBJECT,
        }
    }

    /// Takes a record in, and passes over what belongs to it.
    fn take(&mut self, stream: &mut RecordReader<'_>, record: &StreamRecord) -> Result<()> {
        let (kind, number) = (record.kind()?, self.number());
        let payload_bytes = record.payload_bytes(kind)?;
        match kind {
            RecordKind::Object if record.object() == number => {
                let bonus = stream.payload(payload_bytes)?;
                let whole = look_at_object(record, &bonus, self.question, self.has_large_blocks);
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
                return Err(record.senseless("a part is left out of a stream that is not redacted".to_owned()));
            }
            RecordKind::Begin => return Err(record.senseless("a second beginning".to_owned())),
            _ => {}
        }
        stream.skip(payload_bytes)
    }

    fn all(&mut self, why: WholeFileReason) {
        self.changed.add_all();
        self.whole.get_or_insert(why);
    }
}
