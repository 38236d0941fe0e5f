//! One connection of a receiver: its streams, its place in their order, and the state of the copy since it began.

use std::collections::BTreeMap;

use super::LinkId;
use super::order::StreamOrder;
use crate::digest::UnitDigests;
use crate::wire::{Capabilities, Hello, SessionId};

/// A connection: one or more byte streams.
#[derive(Debug)]
pub(super) struct Connection {
    /// The number that the sender chose.
    pub(super) number: u64,
    pub(super) session: SessionId,
    /// Common to both sides.
    pub(super) capabilities: Capabilities,
    /// Stream 0.
    pub(super) control: LinkId,
    links: BTreeMap<u16, LinkId>,
    pub(super) sent_count: u64,
    pub(super) order: StreamOrder,
    pub(super) stream_count: u16,
    /// Exists from ACCEPT on.
    pub(super) copy: Option<Copying>,
}

/// The part of a connection after ACCEPT.
#[derive(Debug)]
pub(super) struct Copying {
    pub(super) digests: UnitDigests,
    /// Bytes of frames that were received and are not credited.
    pub(super) in_flight_bytes: u64,
    /// Bytes of frames that are applied and not credited.
    pub(super) due_bytes: u64,
    pub(super) seal: Option<SealProgress>,
}

/// The seal that the sender asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SealProgress {
    pub(super) number: u64,
    pub(super) step: SealStep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SealStep {
    InProgress,
    Complete,
}

impl Connection {
    pub(super) fn new(link: LinkId, hello: &Hello, capabilities: Capabilities) -> Self {
        let mut order = StreamOrder::new();
        order.count(0, 0).expect("it is the first frame of stream 0");
        Self {
            number: hello.connection,
            session: hello.session,
            capabilities: capabilities & hello.capabilities,
            control: link,
            links: BTreeMap::from([(0, link)]),
            sent_count: 0,
            order,
            stream_count: 1,
            copy: None,
        }
    }

    pub(super) fn has_link(&self, link: LinkId) -> bool {
        self.links.values().any(|known| *known == link)
    }

    pub(super) fn check_link(&self, link: LinkId, stream: u16) -> Result<(), &'static str> {
        if self.links.get(&stream) == Some(&link) {
            Ok(())
        } else {
            Err("a frame has the number of another stream")
        }
    }

    pub(super) fn links(&self) -> impl Iterator<Item = LinkId> + '_ {
        self.links.values().copied()
    }

    /// Adds a byte stream; false if it does not belong to this connection.
    pub(super) fn add_link(&mut self, link: LinkId, stream: u16, number: u64) -> bool {
        let is_ours = number == self.number && stream < self.stream_count && !self.links.contains_key(&stream);
        if is_ours && self.order.count(stream, 0).is_ok() {
            self.links.insert(stream, link);
            return true;
        }
        false
    }

    pub(super) fn is_sealed(&self) -> bool {
        let seal = self.copy.as_ref().and_then(|copy| copy.seal);
        seal.is_some_and(|seal| seal.step == SealStep::Complete)
    }

    pub(super) fn has_changes(&self) -> bool {
        self.copy
            .as_ref()
            .is_some_and(|copy| !copy.digests.changed().is_empty())
    }

    pub(super) fn give_up_seal(&mut self) {
        if let Some(copy) = &mut self.copy {
            copy.seal = None;
        }
    }

    /// Marks a seal as complete; false if the sender has given it up.
    pub(super) fn complete_seal(&mut self, number: u64) -> bool {
        let wanted = SealProgress {
            number,
            step: SealStep::InProgress,
        };
        let seal = self
            .copy
            .as_mut()
            .and_then(|copy| copy.seal.as_mut())
            .filter(|seal| **seal == wanted);
        seal.map(|seal| seal.step = SealStep::Complete).is_some()
    }
}
