//! Through which the caller of a copy decides when its source is frozen, and when the disk changes its owner.

use std::sync::mpsc::Sender as Outbox;
use std::sync::{Mutex, MutexGuard, PoisonError};

use holdfast_transfer::{HandoverNote, SenderEvent};

use super::Event;

/// Directs a copy from another thread. What is requested before the copy begins, or after its end, has no effect; but a copy
/// that was cancelled before ends as soon as it begins.
#[derive(Default)]
pub struct CopyDirector(Mutex<DirectedCopy>);

#[derive(Default)]
struct DirectedCopy {
    /// None before the copy begins, and after its end.
    events: Option<Outbox<Event>>,
    is_cancelled: bool,
}

impl CopyDirector {
    /// The source is frozen: send what is left, and seal the disk.
    pub fn request_freeze(&self) {
        self.feed(SenderEvent::FreezeRequested);
    }

    /// The source runs again: continue with the rounds. Without effect after a confirmed handover.
    pub fn revoke_freeze(&self) {
        self.feed(SenderEvent::FreezeRevoked);
    }

    /// Hand over the disk. From now on, only the receiver can say who owns it.
    pub fn confirm_handover(&self, note: HandoverNote) {
        self.feed(SenderEvent::HandoverNoted(note));
    }

    /// The source keeps the disk: end the copy, which can be continued later. While the disk is handed over, this does not
    /// wait for the answer of the receiver, which may own its copy.
    pub fn cancel(&self) {
        let mut copy = self.copy();
        copy.is_cancelled = true;
        copy.send(Event::Cancelled);
    }

    fn feed(&self, event: SenderEvent) {
        self.copy().send(Event::Sender(event));
    }

    fn copy(&self) -> MutexGuard<'_, DirectedCopy> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, events: Outbox<Event>) {
        let mut copy = self.copy();
        copy.events = Some(events);
        if copy.is_cancelled {
            copy.send(Event::Cancelled);
        }
    }

    pub(super) fn end(&self) {
        self.copy().events = None;
    }
}

impl DirectedCopy {
    fn send(&self, event: Event) {
        if let Some(events) = &self.events {
            events.send(event).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::{CopyDirector, Event};

    #[test]
    fn a_copy_that_was_cancelled_before_it_begins_ends_at_once() {
        let director = CopyDirector::default();
        director.request_freeze();
        director.cancel();
        let (events, inbox) = channel();
        director.begin(events);
        assert!(matches!(inbox.try_recv(), Ok(Event::Cancelled)));
        assert!(inbox.try_recv().is_err());
    }
}
