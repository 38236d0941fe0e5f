//! Comparing, the first pass, and rounds: everything while the guest runs.

use std::time::Duration;

use holdfast_block::{DirtyBitmap, is_zero};

use super::progress::{ReadPurpose, ReadRequest};
use super::{FirstPassTakes, FreezeLimit, FreezeTrigger, Outcome, Phase, RoundProgress, Sender, SenderAction, Stage};
use crate::convergence::{RoundDecision, RoundMeasurement};
use crate::digest::Digest;
use crate::wire::{
    Capabilities, Message, RangeContent, RangeFrame, RoundEnd, UnitComparison, UnitHash, UnitVerdict, window_bytes_of,
};

/// Limits of what is compared at the same time: units, as receivers permit, and their bytes, which are read into memory.
const COMPARING_COUNT_MAX: u64 = 256;
const COMPARING_BYTES_MAX: u64 = 64 << 20;
/// The comparison and the first pass are synchronized after each of so many parts of the disk.
const SYNC_PART_COUNT: u64 = 32;
/// Largest amount of data between synchronizations, in bytes.
const SYNC_PART_BYTES_MAX: u64 = 1 << 30;
/// In the first pass, marks are taken this many times: what was written to a range that is not read yet needs no mark.
const TAKE_PART_COUNT: u64 = 16;
/// Time of the link that reads in progress may take when the guest may be frozen at any moment.
const SLICE: Duration = Duration::from_millis(10);

impl Sender {
    /// Asks for reads as far as the window permits, and ends a pass that is complete.
    pub(super) fn pump(&mut self) {
        match self.phase {
            Phase::Comparing => {
                self.pump_comparison();
                if self.copy.comparing_count() == 0 && self.copy.to_compare.is_empty() {
                    self.phase = Phase::Sending;
                    self.pump();
                }
            }
            Phase::Sending | Phase::SendingLast => {
                self.pump_data();
                if !self.copy.is_reading() && self.copy.pending.is_clean() {
                    self.pass_completed();
                }
            }
            Phase::Draining if !self.copy.is_reading() && self.taking_count == 0 => self.take(Phase::TakingLast),
            _ => {}
        }
    }

    fn pump_comparison(&mut self) {
        let unit_bytes = u64::from(self.options.layout.unit_bytes());
        let count_max = COMPARING_COUNT_MAX.min(COMPARING_BYTES_MAX / unit_bytes);
        while (self.copy.comparing_count() as u64) < count_max {
            let Some(unit) = self.copy.to_compare.pop_first() else {
                return;
            };
            let range = self.options.layout.bytes_of(unit);
            let read = self.copy.read(range.clone(), ReadPurpose::Compare(unit));
            self.act(SenderAction::Read { read, range });
        }
    }

    fn pump_data(&mut self) {
        let frame_bytes_max = window_bytes_of(u64::from(self.options.layout.unit_bytes()));
        let reading_bytes_max = self.reading_bytes_max();
        while self.copy.reading_bytes() < reading_bytes_max {
            let Some(link) = self.link.as_mut().filter(|link| link.credit_bytes >= frame_bytes_max) else {
                return;
            };
            let Some(range) = self.copy.take_pending() else { return };
            link.credit_bytes -= window_bytes_of(range.end - range.start);
            let read = self.copy.read(range.clone(), ReadPurpose::Send);
            self.act(SenderAction::Read { read, range });
        }
    }

    /// A freeze waits for the reads in progress, so there are few when it may come.
    fn reading_bytes_max(&self) -> u64 {
        match self.stage {
            Stage::Armed => self.rule.bytes_in(SLICE).max(1),
            Stage::Rounds | Stage::Presync(_) => u64::MAX,
        }
    }

    pub(super) fn read_completed(&mut self, read: u64, content: RangeContent) {
        // Reads of earlier connections are asked again.
        let Some(ReadRequest { range, purpose }) = self.copy.complete_read(read) else {
            return;
        };
        match purpose {
            ReadPurpose::Compare(unit) => self.send_hash(unit, &content),
            ReadPurpose::Send => {
                let content = match content {
                    RangeContent::Data(bytes) if is_zero(&bytes) => RangeContent::Zero,
                    content => content,
                };
                let length = range.end - range.start;
                if matches!(&content, RangeContent::Data(bytes) if bytes.len() as u64 != length) {
                    let detail = format!(
                        "reading {length} bytes at {} returned another number of bytes",
                        range.start
                    );
                    return self.fail(Outcome::SourceFailed(detail));
                }
                let Some(link) = &mut self.link else { return };
                let frame = RangeFrame {
                    pass: link.pass(),
                    range,
                    content,
                };
                link.credit_bytes += window_bytes_of(length) - frame.window_bytes();
                self.copy.digests.add(&frame.range, frame.content());
                let frames = link.data(frame);
                self.round.count(&frames, length);
                self.actions.extend(frames.into_iter().map(SenderAction::Send));
                if self.phase == Phase::Sending && self.copy.is_first_pass {
                    self.sync_parts();
                    self.take_parts();
                }
            }
        }
    }

    fn send_hash(&mut self, unit: u64, content: &RangeContent) {
        let digest = match content {
            RangeContent::Data(bytes) => Digest::of(bytes),
            RangeContent::Zero | RangeContent::Hole => {
                self.copy.digests.zero_digest(&self.options.layout.bytes_of(unit))
            }
        };
        self.copy.compare(unit, digest);
        self.send(Message::Hashes(UnitHash { unit, digest }));
    }

    /// The receiver has compared a unit.
    pub(super) fn compared(&mut self, verdict: UnitVerdict) {
        if !self.copy.is_compared(verdict.unit) {
            return self.fail(Outcome::Protocol("WANT of a unit that was not compared"));
        }
        match verdict.content {
            UnitComparison::Different => self.copy.differs(verdict.unit),
            UnitComparison::Same => self.copy.is_same(verdict.unit),
        }
        self.round.unsynced_bytes += u64::from(self.options.layout.unit_bytes());
        self.sync_parts();
    }

    /// Synchronizes now and then, so that an interruption costs little.
    fn sync_parts(&mut self) {
        let part_bytes = self.options.layout.size_bytes() / SYNC_PART_COUNT;
        if self.round.unsynced_bytes >= part_bytes.min(SYNC_PART_BYTES_MAX) {
            self.sync_if_possible();
        }
    }

    /// Takes marks now and then: those of ranges that are not read yet need not be kept.
    fn take_parts(&mut self) {
        let is_often = self.options.first_pass_takes == FirstPassTakes::Often;
        if is_often && self.round.untaken_bytes >= self.options.layout.size_bytes() / TAKE_PART_COUNT {
            self.round.untaken_bytes = 0;
            self.take_dirty();
        }
    }

    /// Synchronizes, unless a synchronization is in progress or the receiver cannot.
    fn sync_if_possible(&mut self) {
        let Some(link) = self
            .link
            .as_mut()
            .filter(|link| link.capabilities.has(Capabilities::SYNC))
        else {
            return;
        };
        if link.sync.is_some() {
            return;
        }
        let barrier = link.barrier();
        self.copy.digests.end_pass();
        let number = self.copy.begin_sync();
        link.sync = Some(number);
        self.round.unsynced_bytes = 0;
        self.send(Message::Sync { number, barrier });
    }

    pub(super) fn synced(&mut self, number: u64, took: Duration) {
        let Some(link) = self.link.as_mut().filter(|link| link.sync == Some(number)) else {
            return;
        };
        link.sync = None;
        self.copy.confirm_sync(number);
        self.sync_time = took.max(self.sync_time / 2);
        if self.phase != Phase::Syncing {
            return;
        }
        match self.stage {
            Stage::Presync(left) if left > 1 => {
                self.stage = Stage::Presync(left - 1);
                self.take(Phase::Taking);
            }
            _ => self.count(Phase::CountingToArm),
        }
    }

    pub(super) fn take(&mut self, phase: Phase) {
        self.phase = phase;
        self.take_dirty();
    }

    pub(super) fn count(&mut self, phase: Phase) {
        self.phase = phase;
        let query = self.new_query();
        self.act(SenderAction::CountDirty { query });
    }

    /// Marks were taken, so what they cover may be read from now on.
    pub(super) fn dirty_taken(&mut self, query: u64, marks: DirtyBitmap, now: Duration) {
        self.taking_count = self.taking_count.saturating_sub(1);
        let expected = &self.copy.pending;
        if marks.size_bytes() != expected.size_bytes() || marks.granularity_bytes() != expected.granularity_bytes() {
            if self.can_thaw() {
                self.fail(Outcome::TrackerInvalid);
            }
            return;
        }
        match self.phase {
            Phase::Taking if query == self.query => {
                self.end_open_pass();
                self.copy.begin_pass(&marks);
                self.round = RoundProgress {
                    number: self.round.number + 1,
                    since: now,
                    ..RoundProgress::default()
                };
                self.phase = Phase::Sending;
            }
            Phase::TakingLast if query == self.query => {
                self.end_open_pass();
                self.copy.begin_pass(&marks);
                self.begin_last_pass();
            }
            _ => self.copy.add_later(marks),
        }
    }

    /// Ends a pass that was not completed: the next one may send the same ranges again.
    fn end_open_pass(&mut self) {
        if self.link.as_ref().is_some_and(super::SenderLink::has_open_pass) {
            self.send_round_end();
        }
    }

    fn send_round_end(&mut self) {
        let Some(link) = &mut self.link else { return };
        let barrier = link.barrier();
        self.copy.digests.end_pass();
        self.send(Message::Round(RoundEnd {
            round: self.round.number,
            frame_count: self.round.frame_count,
            frame_bytes: self.round.frame_bytes,
            barrier,
        }));
    }

    fn pass_completed(&mut self) {
        self.send_round_end();
        if self.phase == Phase::SendingLast {
            self.phase = Phase::Checking;
            let query = self.new_query();
            self.act(SenderAction::CheckTracker { query });
            return;
        }
        self.round.sent_at = Some(self.now);
        if self.stage == Stage::Rounds {
            self.sync_if_possible();
        }
        self.count(Phase::Counting);
    }

    /// The number of dirty bytes after a round is known.
    pub(super) fn counted(&mut self, dirty_bytes: u64, now: Duration) {
        let measured = self.measure(dirty_bytes, now);
        match (self.phase, self.stage) {
            (Phase::Counting, Stage::Rounds) => self.judge(measured),
            (Phase::Counting, Stage::Presync(_)) => self.presync(),
            (Phase::Counting, Stage::Armed) if measured.dirty_bytes == 0 => self.phase = Phase::Resting,
            (Phase::Counting, Stage::Armed) => self.take(Phase::Taking),
            (Phase::CountingToArm, _) => self.arm_if_ready(&measured),
            _ => {}
        }
    }

    fn measure(&self, dirty_bytes: u64, now: Duration) -> RoundMeasurement {
        RoundMeasurement {
            sent_bytes: self.round.frame_bytes,
            took: self.round.sent_at.unwrap_or(now).saturating_sub(self.round.since),
            dirty_bytes: dirty_bytes + self.copy.later_bytes(),
            round_trip: self.link.as_ref().map_or(Duration::ZERO, |link| link.round_trip),
            sync: self.sync_time,
            take: self.take_time,
            traffic: self.traffic,
        }
    }

    fn judge(&mut self, measured: RoundMeasurement) {
        let forecast = if self.copy.is_first_pass {
            self.copy.is_first_pass = false;
            self.rule.first_pass(measured)
        } else {
            self.rule.round(measured)
        };
        self.act(SenderAction::Report(forecast));
        match forecast.decision {
            RoundDecision::Freeze => self.begin_presync(FreezeLimit::Kept),
            RoundDecision::FreezeAtMinimum => self.begin_presync(FreezeLimit::Waived),
            RoundDecision::Continue => self.take(Phase::Taking),
            RoundDecision::Throttle { dirty_bytes_per_s_max } => {
                self.act(SenderAction::Throttle { dirty_bytes_per_s_max });
                self.take(Phase::Taking);
            }
            RoundDecision::GiveUp => self.fail(Outcome::NotConverging(forecast)),
        }
    }

    fn begin_presync(&mut self, limit: FreezeLimit) {
        self.freeze.limit = limit;
        self.stage = Stage::Presync(2);
        self.presync();
    }

    /// Makes the data durable while the guest runs, so that little is left for the time when it does not.
    fn presync(&mut self) {
        self.sync_if_possible();
        if self.link.as_ref().is_some_and(|link| link.sync.is_some()) {
            self.phase = Phase::Syncing;
        } else {
            self.count(Phase::CountingToArm);
        }
    }

    fn arm_if_ready(&mut self, measured: &RoundMeasurement) {
        self.rule.measure_bandwidth(measured);
        let predicted = self.rule.predict(measured);
        let is_ready = predicted <= self.options.convergence.frozen_max || self.freeze.limit == FreezeLimit::Waived;
        if is_ready {
            self.stage = Stage::Armed;
            self.phase = Phase::Intending;
            self.send(Message::FreezeIntent { predicted });
        } else {
            self.stage = Stage::Rounds;
            self.take(Phase::Taking);
        }
    }

    pub(super) fn intent_accepted(&mut self, now: Duration) {
        if self.options.trigger == FreezeTrigger::WhenReady || self.freeze.is_requested {
            self.freeze(now);
        } else {
            self.count(Phase::Counting);
        }
    }
}

impl RoundProgress {
    /// Counts frames that were sent for `length` bytes of the disk.
    fn count(&mut self, frames: &[crate::wire::Frame], length: u64) {
        self.frame_count += 1;
        self.frame_bytes += frames.iter().map(crate::wire::Frame::encoded_bytes).sum::<u64>();
        self.unsynced_bytes += length;
        self.untaken_bytes += length;
    }
}
