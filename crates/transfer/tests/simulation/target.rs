//! A target host: the image, its journal, and the receiver.

use std::collections::BTreeSet;
use std::ops::Range;

use holdfast_block::{SeededRandom, to_usize};
use holdfast_transfer::{
    CopyIdentity, Digest, DiskId, FileIdentity, JournalEntry, JournalState, RangeContent, RangeDecompressor, Receiver,
    ReceiverAction, ReceiverEvent, ReceiverOptions, SessionId, UnitLayout,
};

use super::source::SECTOR_BYTES;

/// What the hypervisor of a target has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpenFile {
    Ours,
    Another,
}

pub(super) struct Target {
    /// What reads return.
    cache: Vec<u8>,
    /// What remains after a power failure.
    pub(super) durable: Vec<u8>,
    /// Sectors of the cache that may or may not be durable.
    unflushed: BTreeSet<u64>,
    journal: Vec<u8>,
    is_owner: bool,
    open_file: OpenFile,
    options: ReceiverOptions,
    pub(super) receiver: Option<Receiver>,
    /// Operations, carried out in any order.
    pub(super) operations: Vec<ReceiverAction>,
}

impl Target {
    pub(super) fn new(content: Vec<u8>, open_file: OpenFile, options: ReceiverOptions) -> Self {
        let mut target = Self {
            cache: content.clone(),
            durable: content,
            unflushed: BTreeSet::new(),
            journal: Vec::new(),
            is_owner: false,
            open_file,
            options,
            receiver: None,
            operations: Vec::new(),
        };
        target.start();
        target
    }

    /// A target that holds the copy of another session.
    pub(super) fn with_copy(size_bytes: u64, session: SessionId, options: ReceiverOptions) -> Self {
        let mut target = Self::new(vec![0xEE; to_usize(size_bytes)], OpenFile::Another, options);
        let layout = UnitLayout::new(size_bytes, 4096).unwrap();
        let copy = CopyIdentity {
            receiver: target.options.receiver,
            session,
            disk: DiskId([1; 16]),
            layout,
        };
        JournalEntry::Begin(copy).encode(&mut target.journal);
        target.start();
        target
    }

    pub(super) fn journal_state(&self) -> Option<JournalState> {
        JournalState::decode(&self.journal).unwrap()
    }

    /// Whether the journal says, durably, that this target owns the disk.
    pub(super) fn is_owner(&self) -> bool {
        self.is_owner
    }

    fn append_journal(&mut self, bytes: &[u8]) {
        self.journal.extend_from_slice(bytes);
        self.is_owner = self.journal_state().is_some_and(|journal| journal.owner.is_some());
    }

    /// Starts the receiver from its journal.
    pub(super) fn start(&mut self) {
        let state = self.journal_state();
        let valid = state.as_ref().map_or(0, |state| state.valid_bytes);
        self.journal.truncate(to_usize(valid));
        self.receiver = Some(Receiver::new(self.options.clone(), state));
    }

    /// The program is killed. Writes stay in the cache.
    pub(super) fn kill(&mut self, random: &mut SeededRandom) {
        self.tear_journal(random);
        self.receiver = None;
        self.operations.clear();
    }

    /// Power fails: of what was not flushed, any part remains.
    pub(super) fn lose_power(&mut self, random: &mut SeededRandom) {
        for sector in std::mem::take(&mut self.unflushed) {
            if random.one_in(2) {
                self.persist(sector);
            }
        }
        self.cache.clone_from(&self.durable);
        self.kill(random);
    }

    /// A write of the journal that is in progress leaves a part of its bytes, or all.
    fn tear_journal(&mut self, random: &mut SeededRandom) {
        let bytes = self.operations.iter().find_map(|operation| match operation {
            ReceiverAction::AppendJournal { bytes, .. } => Some(bytes),
            _ => None,
        });
        if let Some(bytes) = bytes.cloned() {
            let length = random.below(bytes.len() as u64 + 1);
            self.append_journal(&bytes[..to_usize(length)]);
        }
    }

    fn persist(&mut self, sector: u64) {
        let place = to_usize(sector * SECTOR_BYTES)..to_usize((sector + 1) * SECTOR_BYTES);
        self.durable[place.clone()].copy_from_slice(&self.cache[place]);
    }

    /// Carries out one operation, and returns what to tell the receiver.
    pub(super) fn operate(&mut self, index: usize) -> ReceiverEvent {
        match self.operations.remove(index) {
            ReceiverAction::Write {
                operation,
                range,
                content,
            } => {
                self.write(&range, &content);
                ReceiverEvent::Completed(operation)
            }
            ReceiverAction::Flush { operation } => {
                for sector in std::mem::take(&mut self.unflushed) {
                    self.persist(sector);
                }
                ReceiverEvent::Completed(operation)
            }
            ReceiverAction::AppendJournal { operation, bytes } => {
                self.append_journal(&bytes);
                ReceiverEvent::Completed(operation)
            }
            ReceiverAction::HashUnit { operation, range } => {
                let digest = Digest::of(&self.cache[to_usize(range.start)..to_usize(range.end)]);
                ReceiverEvent::UnitHashed { operation, digest }
            }
            ReceiverAction::Decompress { operation, frame } => ReceiverEvent::Decompressed {
                operation,
                data: RangeDecompressor::default().decompress(&frame),
            },
            ReceiverAction::ExamineIdentity { operation } => {
                let identity = match self.open_file {
                    OpenFile::Ours => FileIdentity::Same,
                    OpenFile::Another => FileIdentity::Different {
                        detail: "the hypervisor has another file open".to_owned(),
                    },
                };
                ReceiverEvent::IdentityExamined { operation, identity }
            }
            action => panic!("{action:?} is not an operation"),
        }
    }

    fn write(&mut self, range: &Range<u64>, content: &RangeContent) {
        let bytes = &mut self.cache[to_usize(range.start)..to_usize(range.end)];
        match content {
            RangeContent::Data(data) => bytes.copy_from_slice(data),
            RangeContent::Zero | RangeContent::Hole => bytes.fill(0),
        }
        self.unflushed
            .extend(range.start / SECTOR_BYTES..range.end / SECTOR_BYTES);
    }
}
