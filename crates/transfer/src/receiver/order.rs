//! Brings frames of several streams into the order that the sender meant.
//!
//! Frames of one pass do not overlap, so they are applied as they arrive. A frame of a later pass is held until the
//! barrier before it is passed, which needs all frames that were sent before the barrier. So two writes to the same
//! place in different passes cannot change places, however the streams run.

use std::collections::VecDeque;
use std::ops::Range;

use crate::wire::{Barrier, CompressedRange, Message, RangeFrame};

/// Limit of messages that wait behind a barrier. A sender waits for answers long before.
const WAITING_COUNT_MAX: usize = 256;

/// The position of one connection in all its streams.
#[derive(Debug)]
pub(super) struct StreamOrder {
    /// Number of barriers that were passed.
    pass: u32,
    /// Number of frames that have arrived on each stream.
    received: Vec<u64>,
    /// Frames of later passes.
    held: Vec<ArrivedRange>,
    /// Messages of stream 0, from the first barrier that is not passed.
    waiting: VecDeque<Message>,
}

/// A frame with data.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ArrivedRange {
    Plain(RangeFrame),
    Compressed(CompressedRange),
}

impl ArrivedRange {
    fn pass(&self) -> u32 {
        match self {
            Self::Plain(frame) => frame.pass,
            Self::Compressed(frame) => frame.pass,
        }
    }

    pub(super) fn range(&self) -> &Range<u64> {
        match self {
            Self::Plain(frame) => &frame.range,
            Self::Compressed(frame) => &frame.range,
        }
    }

    pub(super) fn window_bytes(&self) -> u64 {
        match self {
            Self::Plain(frame) => frame.window_bytes(),
            Self::Compressed(frame) => frame.window_bytes(),
        }
    }
}

/// What to do with a frame with data.
#[derive(Debug)]
pub(super) enum Placement {
    Apply(ArrivedRange),
    Held,
}

/// Why a frame is against the protocol.
pub(super) type Violation = &'static str;

impl StreamOrder {
    pub(super) fn new() -> Self {
        Self {
            pass: 0,
            received: vec![0],
            held: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Sets the number of streams, once it is agreed.
    pub(super) fn set_stream_count(&mut self, stream_count: u16) {
        self.received.resize(usize::from(stream_count), 0);
    }

    /// Counts a frame that arrived.
    pub(super) fn count(&mut self, stream: u16, sequence: u64) -> Result<(), Violation> {
        let received = self
            .received
            .get_mut(usize::from(stream))
            .ok_or("a frame of an unknown stream")?;
        if *received != sequence {
            return Err("a frame is missing, or came twice");
        }
        *received += 1;
        Ok(())
    }

    pub(super) fn place(&mut self, frame: ArrivedRange) -> Result<Placement, Violation> {
        if frame.pass() < self.pass {
            return Err("a frame belongs to a pass that has ended");
        }
        if frame.pass() == self.pass {
            return Ok(Placement::Apply(frame));
        }
        self.held.push(frame);
        Ok(Placement::Held)
    }

    /// Adds a message of stream 0 other than data.
    pub(super) fn enqueue(&mut self, message: Message) -> Result<(), Violation> {
        if self.waiting.len() >= WAITING_COUNT_MAX {
            return Err("too many messages wait behind a barrier");
        }
        self.waiting.push_back(message);
        Ok(())
    }

    /// The next message of stream 0, barriers included.
    pub(super) fn front(&self) -> Option<&Message> {
        self.waiting.front()
    }

    pub(super) fn take_front(&mut self) -> Option<Message> {
        self.waiting.pop_front()
    }

    /// Whether all frames before the barrier have arrived.
    pub(super) fn has_arrived(&self, barrier: &Barrier) -> Result<bool, Violation> {
        if barrier.frame_counts.len() != self.received.len() {
            return Err("a barrier is not for all streams");
        }
        let mut counts = barrier.frame_counts.iter().zip(&self.received);
        Ok(counts.all(|(count, received)| count <= received))
    }

    /// Passes a barrier, and returns the frames that may be applied now.
    pub(super) fn pass_barrier(&mut self) -> Vec<ArrivedRange> {
        self.pass += 1;
        let pass = self.pass;
        let (released, held) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|frame| frame.pass() == pass);
        self.held = held;
        released
    }
}

#[cfg(test)]
mod tests {
    use super::{ArrivedRange, Placement, StreamOrder};
    use crate::wire::{Barrier, RangeContent, RangeFrame};

    fn frame(pass: u32) -> ArrivedRange {
        ArrivedRange::Plain(RangeFrame {
            pass,
            range: 0..512,
            content: RangeContent::Zero,
        })
    }

    #[test]
    fn a_frame_that_overtakes_a_barrier_waits_for_the_frames_before_it() {
        let mut order = StreamOrder::new();
        order.set_stream_count(3);
        order.count(1, 0).unwrap();
        assert!(matches!(order.place(frame(1)), Ok(Placement::Held)));
        let barrier = Barrier {
            frame_counts: vec![1, 0, 1],
        };
        order.count(0, 0).unwrap();
        assert_eq!(order.has_arrived(&barrier), Ok(false));
        order.count(2, 0).unwrap();
        assert!(matches!(order.place(frame(0)), Ok(Placement::Apply(_))));
        assert_eq!(order.has_arrived(&barrier), Ok(true));
        assert_eq!(order.pass_barrier(), [frame(1)]);
        assert!(order.place(frame(0)).is_err());
    }

    #[test]
    fn missing_and_repeated_frames_are_refused() {
        let mut order = StreamOrder::new();
        assert!(order.count(0, 1).is_err());
        order.count(0, 0).unwrap();
        assert!(order.count(0, 0).is_err());
        assert!(order.count(1, 0).is_err());
    }
}
