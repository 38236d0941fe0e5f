//! The source host: the disk, the guest, the tracker, the sender and its note.

use std::collections::VecDeque;
use std::ops::Range;

use holdfast_block::{DirtyBitmap, SeededRandom, to_usize};
use holdfast_transfer::{HandoverNote, RangeContent, Sender, SenderAction, SenderEvent};

/// Bytes that the guest writes at once, and that the tracker marks.
pub(super) const SECTOR_BYTES: u64 = 512;

pub(super) struct Source {
    /// Durable with each write: the guest has seen it acknowledged.
    pub(super) disk: Vec<u8>,
    /// The disk whenever the guest was frozen.
    pub(super) frozen_disks: Vec<Vec<u8>>,
    pub(super) is_guest_running: bool,
    /// Ends with the program.
    pub(super) tracker: Option<DirtyBitmap>,
    /// Durable.
    pub(super) note: Option<HandoverNote>,
    pub(super) sender: Option<Sender>,
    /// Carried out in order.
    pub(super) actions: VecDeque<SenderAction>,
    /// The answers to them, delivered in any order.
    pub(super) answers: Vec<SenderEvent>,
    /// Answers that are very late.
    pub(super) late_answers: Vec<SenderEvent>,
    /// Carried out in any order.
    pub(super) reads: Vec<PendingRead>,
    /// Completed, and not delivered. The guest may write meanwhile.
    pub(super) completed_reads: Vec<SenderEvent>,
    write_count: u64,
}

pub(super) struct PendingRead {
    pub(super) read: u64,
    pub(super) range: Range<u64>,
}

impl Source {
    pub(super) fn new(disk: Vec<u8>) -> Self {
        Self {
            frozen_disks: Vec::new(),
            disk,
            is_guest_running: true,
            tracker: None,
            note: None,
            sender: None,
            actions: VecDeque::new(),
            answers: Vec::new(),
            late_answers: Vec::new(),
            reads: Vec::new(),
            completed_reads: Vec::new(),
            write_count: 0,
        }
    }

    /// The guest writes some sectors, or zeroes.
    pub(super) fn guest_writes(&mut self, random: &mut SeededRandom) {
        let sector_count = self.disk.len() as u64 / SECTOR_BYTES;
        // Half of the writes go to a small part of the disk, as those of real guests.
        let reach = if random.one_in(2) { sector_count } else { 16 };
        let start = random.below(reach) * SECTOR_BYTES;
        let range = start..(start + (1 + random.below(3)) * SECTOR_BYTES).min(self.disk.len() as u64);
        self.write_count += 1;
        let bytes = &mut self.disk[to_usize(range.start)..to_usize(range.end)];
        if random.one_in(5) {
            bytes.fill(0);
        } else {
            bytes.fill(random.below(255) as u8 + 1);
            bytes[..8].copy_from_slice(&self.write_count.to_le_bytes());
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.set(range);
        }
    }

    pub(super) fn start_tracker(&mut self) {
        let tracker = DirtyBitmap::new(self.disk.len() as u64, SECTOR_BYTES);
        self.tracker = Some(tracker.unwrap());
    }

    pub(super) fn take_dirty(&mut self) -> DirtyBitmap {
        let tracker = self.tracker.as_mut().expect("the sender has started it");
        let taken = tracker.clone();
        tracker.clear_all();
        taken
    }

    pub(super) fn dirty_bytes(&self) -> u64 {
        self.tracker.as_ref().expect("the sender has started it").dirty_bytes()
    }

    pub(super) fn content(&self, range: Range<u64>, random: &mut SeededRandom) -> RangeContent {
        let bytes = &self.disk[to_usize(range.start)..to_usize(range.end)];
        if bytes.iter().all(|byte| *byte == 0) && random.one_in(2) {
            return RangeContent::Hole;
        }
        RangeContent::Data(bytes.to_vec())
    }

    /// The program ends, and with it the tracker. After a restart, it reads the note before the guest runs.
    pub(super) fn crash(&mut self) {
        self.end_sender();
        self.tracker = None;
        self.is_guest_running = false;
    }

    pub(super) fn end_sender(&mut self) {
        self.sender = None;
        self.actions.clear();
        self.answers.clear();
        self.late_answers.clear();
        self.reads.clear();
        self.completed_reads.clear();
    }
}
