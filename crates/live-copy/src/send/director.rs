//! Through which the caller of a copy decides when its source is frozen, and when the disk changes its owner.

use std::sync::mpsc::Sender as Outbox;
use std::sync::{Mutex, PoisonError};

use holdfast_transfer::{HandoverNote, SenderEvent};

use super::Event;

/// Directs a copy from another thread. What is requested before the copy begins, or after its end, has no effect.
#[derive(Default)]
pub struct CopyDirector {
    events: Mutex<Option<Outbox<Event>>>,
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

    /// End the copy, if the disk is not handed over. It can be continued later.
    pub fn cancel(&self) {
        self.feed(SenderEvent::Cancel);
    }

    fn feed(&self, event: SenderEvent) {
        if let Some(events) = &*self.events.lock().unwrap_or_else(PoisonError::into_inner) {
            events.send(Event::Sender(event)).ok();
        }
    }

    pub(super) fn begin(&self, events: Outbox<Event>) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = Some(events);
    }

    pub(super) fn end(&self) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
