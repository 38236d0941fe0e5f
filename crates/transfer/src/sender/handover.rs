//! From the freeze of the guest to the new owner.

use std::time::Duration;

use super::{
    CopyPurpose, FreezeLimit, HandoverNote, Outcome, Phase, Sender, SenderAction, SenderWarning, Stage, TrackerCheck,
};
use crate::wire::{Capabilities, LastPass, Message, Seal};

/// Number of last passes. The second is for a tracker that marks a write only after it has ended.
const LAST_PASS_COUNT_MAX: u32 = 2;

impl Sender {
    pub(super) fn freeze_requested(&mut self, now: Duration) {
        self.freeze.is_requested = true;
        let is_ready = matches!(
            self.phase,
            Phase::Sending | Phase::Taking | Phase::Counting | Phase::Resting
        );
        if self.stage == Stage::Armed && is_ready {
            self.freeze(now);
        }
    }

    /// After COMMIT it has no effect: only the receiver knows the owner.
    pub(super) fn freeze_revoked(&mut self) {
        if !self.can_thaw() {
            return;
        }
        self.freeze.is_requested = false;
        if self.freeze.since.is_some() {
            self.give_up_attempt();
        }
    }

    pub(super) fn freeze(&mut self, now: Duration) {
        self.phase = Phase::Freezing;
        self.freeze.attempt += 1;
        self.freeze.since = Some(now);
        self.freeze.step_since = now;
        self.freeze.pass_count = 0;
        self.freeze.report = super::HandoverReport::default();
        let attempt = self.freeze.attempt;
        self.act(SenderAction::Freeze { attempt });
    }

    pub(super) fn frozen(&mut self, attempt: u32, now: Duration) {
        // A late answer to an attempt that was given up: the guest was thawed since.
        if self.phase != Phase::Freezing || attempt != self.freeze.attempt {
            return;
        }
        self.freeze.report.freeze = self.step(now);
        self.send(Message::Frozen);
        self.phase = Phase::Draining;
    }

    pub(super) fn freeze_failed(&mut self, attempt: u32) {
        if self.phase == Phase::Freezing && attempt == self.freeze.attempt {
            self.give_up_attempt();
        }
    }

    /// The marks of everything that the guest wrote before it was frozen are in the pass.
    pub(super) fn begin_last_pass(&mut self) {
        self.freeze.pass_count += 1;
        let last = LastPass {
            attempt: self.freeze.pass_count,
            dirty_bytes: self.copy.pending.dirty_bytes(),
        };
        self.freeze.report.last_bytes += last.dirty_bytes;
        self.phase = Phase::SendingLast;
        self.send(Message::Last(last));
    }

    pub(super) fn tracker_checked(&mut self, check: TrackerCheck, now: Duration) {
        if self.phase != Phase::Checking {
            return;
        }
        match check {
            TrackerCheck::Valid { dirty_bytes } if self.is_empty(dirty_bytes) => self.seal(now),
            TrackerCheck::Valid { .. } if self.freeze.pass_count < LAST_PASS_COUNT_MAX => self.take(Phase::TakingLast),
            TrackerCheck::Valid { .. } | TrackerCheck::Invalid => self.fail(Outcome::TrackerInvalid),
        }
    }

    /// Whether everything that was marked was sent. No marks are under way: they were awaited before the last pass.
    fn is_empty(&self, dirty_bytes: u64) -> bool {
        dirty_bytes == 0 && self.copy.later_bytes() == 0
    }

    fn seal(&mut self, now: Duration) {
        self.freeze.report.last_pass = self.step(now);
        if self.options.purpose == CopyPurpose::Duplicate {
            self.note_frozen_time(now);
            self.thaw();
        }
        let Some(link) = &mut self.link else { return };
        let barrier = link.barrier();
        self.copy.digests.end_pass();
        let Ok(tree) = self.copy.digests.tree() else {
            return self.fail(Outcome::Protocol("a unit was never sent as a whole"));
        };
        let sync = self.copy.begin_sync();
        link.sync = link.capabilities.has(Capabilities::SYNC).then_some(sync);
        self.freeze.seal += 1;
        self.phase = Phase::Sealing;
        self.send(Message::Seal(Seal {
            number: self.freeze.seal,
            sync,
            tree,
            barrier,
        }));
    }

    pub(super) fn sealed(&mut self, number: u64, now: Duration) {
        if self.phase != Phase::Sealing || number != self.freeze.seal {
            return;
        }
        // A seal contains a synchronization, also for a receiver that has no other.
        let sync = self.copy.sync_sent;
        self.copy.confirm_sync(sync);
        if let Some(link) = &mut self.link {
            link.sync = None;
        }
        self.freeze.report.seal = self.step(now);
        let Some(receiver) = self.copy.receiver() else { return };
        let note = HandoverNote { seal: number, receiver };
        match self.options.purpose {
            CopyPurpose::Duplicate => self.commit(note),
            CopyPurpose::Handover => {
                self.phase = Phase::Noting;
                self.act(SenderAction::NoteHandover(note));
            }
        }
    }

    pub(super) fn handover_noted(&mut self, note: HandoverNote, now: Duration) {
        let seal = self.freeze.seal;
        if self.phase != Phase::Noting || note.seal != seal || self.is_late(now) {
            return;
        }
        self.commit(note);
    }

    /// From now on, only the receiver knows who owns the disk.
    fn commit(&mut self, note: HandoverNote) {
        self.phase = Phase::Committing;
        self.doubt = Some(note);
        self.send(Message::Commit { seal: note.seal });
    }

    pub(super) fn committed(&mut self, seal: u64, now: Duration) {
        if seal == self.freeze.seal {
            self.note_frozen_time(now);
            self.finish();
        }
    }

    fn note_frozen_time(&mut self, now: Duration) {
        if let Some(since) = self.freeze.since {
            self.freeze.report.frozen = now.saturating_sub(since);
        }
    }

    /// Thaws a guest that has been frozen for longer than promised.
    pub(super) fn keep_promise(&mut self, now: Duration) {
        if self.can_thaw() && self.is_late(now) {
            let frozen = now.saturating_sub(self.freeze.since.unwrap_or(now));
            self.rule.promise_broken(frozen);
            self.act(SenderAction::Warn(SenderWarning::PromiseNotKept { frozen }));
            self.give_up_attempt();
        }
    }

    fn is_late(&self, now: Duration) -> bool {
        let is_promised = self.freeze.limit == FreezeLimit::Kept;
        let frozen = self.freeze.since.map(|since| now.saturating_sub(since));
        is_promised && frozen.is_some_and(|frozen| frozen > self.options.convergence.frozen_max)
    }

    /// The guest runs on, and the rounds continue.
    fn give_up_attempt(&mut self) {
        self.thaw();
        self.send(Message::Thaw);
        self.freeze.failed_count += 1;
        if self.freeze.failed_count >= self.options.attempt_count_max {
            return self.fail(Outcome::FrozenTooLong);
        }
        self.stage = Stage::Rounds;
        self.freeze.limit = FreezeLimit::Kept;
        // What the last pass has left is sent as a round.
        self.phase = Phase::Sending;
    }

    /// The time since the last step of the handover.
    fn step(&mut self, now: Duration) -> Duration {
        let took = now.saturating_sub(self.freeze.step_since);
        self.freeze.step_since = now;
        took
    }
}
