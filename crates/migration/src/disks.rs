//! The copies of all disks of a machine, directed together: none is handed over before all are sealed.

use std::sync::mpsc::{Receiver as Inbox, Sender as Outbox};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_live_copy::{
    CopyDirector, CopyObserver, CopyWarning, Error as CopyError, Forecast, Freezer, HandoverNote, LiveCopyReport,
    MachineHandover, Result as CopyResult, SenderState, SourceConsistency,
};

const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long the receivers may take to end the copies.
const END_PATIENCE: Duration = Duration::from_secs(60);

/// What the thread that directs a migration waits for.
pub(crate) enum MoveEvent {
    /// The state of the copy of a disk.
    State { disk: usize, state: SenderState },
    /// The disk can be handed over.
    Sealed { disk: usize, note: HandoverNote },
    /// The copy of a disk has given up an attempt to freeze.
    Thawed,
    /// The copy of a disk has ended.
    Ended {
        disk: usize,
        result: Box<CopyResult<LiveCopyReport>>,
    },
    /// The hypervisor has stopped the machine for the rest of its memory.
    Stopped(MachineStop),
    /// The hypervisor has given up the images that are pulled.
    Released { attempt: u32, result: crate::Result<()> },
    /// The other host has compared the files of the copies with those that its hypervisor has open.
    Verified { attempt: u32, result: crate::Result<()> },
    /// The machine runs at the other host.
    Started,
    /// The hypervisor has ended the migration.
    MemoryEnded(holdfast_host::Result<()>),
}

/// A machine that its hypervisor has stopped for the rest of its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MachineStop {
    /// It ran until then. QEMU may answer only when it has sent everything, so this is when it was last known to run.
    WhileRunning { ran_at: Duration },
    /// Another program had paused it, or QEMU had because of an error: this was its state.
    WhilePaused { state: String },
}

/// How the migration has ended; the copies wait for it before the other host may forget them.
#[derive(Default)]
pub(crate) struct MoveOutcome {
    handover: Mutex<Option<MachineHandover>>,
    known: Condvar,
}

impl MoveOutcome {
    pub(crate) fn set(&self, handover: MachineHandover) {
        self.handover
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(handover);
        self.known.notify_all();
    }

    fn wait(&self) -> MachineHandover {
        let mut handover = self.handover.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(handover) = *handover {
                return handover;
            }
            handover = self.known.wait(handover).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Sees the copy of one disk.
pub(crate) struct DiskObserver<'a> {
    pub(crate) disk: usize,
    pub(crate) events: Outbox<MoveEvent>,
    pub(crate) outcome: &'a MoveOutcome,
    pub(crate) shown: &'a dyn CopyEvents,
}

/// Shows what the copies of disks report.
pub trait CopyEvents: Sync {
    /// A round of the copy of a disk, by its place in the plan, has ended.
    fn round(&self, disk: usize, forecast: &Forecast);
    /// What a user should know.
    fn warning(&self, disk: usize, warning: CopyWarning);
}

impl CopyObserver for DiskObserver<'_> {
    fn round(&self, forecast: &Forecast) {
        self.shown.round(self.disk, forecast);
    }

    fn warning(&self, warning: CopyWarning) {
        self.shown.warning(self.disk, warning);
    }

    fn state(&self, state: SenderState) {
        self.events.send(MoveEvent::State { disk: self.disk, state }).ok();
    }

    fn sealed(&self, note: HandoverNote) {
        self.events.send(MoveEvent::Sealed { disk: self.disk, note }).ok();
    }

    fn handed_over(&self) -> MachineHandover {
        self.outcome.wait()
    }
}

/// The freezer of the disks: the hypervisor stops and resumes the machine.
pub(crate) struct StoppedByHypervisor {
    pub(crate) events: Mutex<Outbox<MoveEvent>>,
}

impl Freezer for StoppedByHypervisor {
    /// The request to freeze came after the machine was stopped.
    fn freeze(&self) -> CopyResult<()> {
        Ok(())
    }

    fn thaw(&self) -> CopyResult<()> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.send(MoveEvent::Thawed).ok();
        Ok(())
    }

    fn consistency(&self) -> SourceConsistency {
        SourceConsistency::Crash
    }
}

/// The copies, as the thread that directs them knows them.
pub(crate) struct DiskCopies<'a> {
    directors: &'a [CopyDirector],
    states: Vec<SenderState>,
    notes: Vec<Option<HandoverNote>>,
    reports: Vec<Option<LiveCopyReport>>,
}

impl<'a> DiskCopies<'a> {
    pub(crate) fn new(directors: &'a [CopyDirector]) -> Self {
        Self {
            directors,
            states: vec![SenderState::New; directors.len()],
            notes: vec![None; directors.len()],
            reports: directors.iter().map(|_| None).collect(),
        }
    }

    pub(crate) fn note_state(&mut self, disk: usize, state: SenderState) {
        self.states[disk] = state;
    }

    /// Whether the rest of every disk can be sent within the limit.
    pub(crate) fn are_armed(&self) -> bool {
        self.states.iter().all(|state| *state == SenderState::Armed)
    }

    /// The machine is stopped.
    pub(crate) fn request_freeze(&mut self) {
        self.notes.fill(None);
        self.directors.iter().for_each(CopyDirector::request_freeze);
    }

    /// The machine runs again.
    pub(crate) fn revoke_freeze(&self) {
        self.directors.iter().for_each(CopyDirector::revoke_freeze);
    }

    pub(crate) fn note_seal(&mut self, disk: usize, note: HandoverNote) {
        self.notes[disk] = Some(note);
    }

    pub(crate) fn are_sealed(&self) -> bool {
        self.notes.iter().all(Option::is_some)
    }

    /// Hands all disks over.
    pub(crate) fn confirm_all(&self) {
        (0..self.directors.len()).for_each(|disk| self.confirm(disk));
    }

    /// Hands over a disk that is sealed.
    pub(crate) fn confirm(&self, disk: usize) {
        if let Some(note) = self.notes[disk] {
            self.directors[disk].confirm_handover(note);
        }
    }

    /// Seals a disk again, while all are handed over: its receiver has ended between the seal and its answer, and owns nothing.
    pub(crate) fn seal_again(&self, disk: usize) {
        self.directors[disk].request_freeze();
    }

    /// Whether all receivers have confirmed that they own their disks.
    ///
    /// A receiver that has not may still end without COMMIT. The next one would then be sent the content of the disk here,
    /// while the machine already writes to it there.
    pub(crate) fn are_owned_there(&self) -> bool {
        self.states.iter().all(|state| *state == SenderState::Done)
    }

    pub(crate) fn cancel(&self) {
        self.directors.iter().for_each(CopyDirector::cancel);
    }

    pub(crate) fn note_end(&mut self, disk: usize, report: LiveCopyReport) {
        self.reports[disk] = Some(report);
    }

    /// Waits until the copies have told their receivers how the migration has ended. Returns why one could not.
    pub(crate) fn wait_for_ends(&mut self, inbox: &Inbox<MoveEvent>, clock: &dyn Clock) -> Option<CopyError> {
        let until = clock.now() + END_PATIENCE;
        while self.reports.iter().any(Option::is_none) && clock.now() < until {
            let Ok(MoveEvent::Ended { disk, result }) = inbox.recv_timeout(LOOK_INTERVAL) else {
                continue;
            };
            match *result {
                Ok(report) => self.note_end(disk, report),
                Err(error) => return Some(error),
            }
        }
        None
    }

    pub(crate) fn into_reports(self) -> Vec<LiveCopyReport> {
        self.reports.into_iter().flatten().collect()
    }
}
