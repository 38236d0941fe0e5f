//! The frames that wait to be written to a stream, in order. Those that wait may be compressed meanwhile.
//!
//! ```text
//! main thread   push ->  | slot | slot | slot | ... |  -> take   writer
//!                           ^ take_to_compress, give_back        compressor
//! ```
//!
//! The writer takes what is ready. It never waits for the compression of a frame to begin, so an idle connection gets each
//! frame at once and as it is: in the frozen time, where little is sent, as everywhere else. It waits for one that has
//! begun: this is less than half of the time that the frame would take without it, see [`CompressionGauge`].

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_transfer::Frame;

use crate::compression_gauge::{CompressionChoice, CompressionGauge, CompressionResult};

/// Whether the compressor may take a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameTreatment {
    AsItIs,
    MayCompress,
}

/// Frames between the thread that sends them and those of a stream. The window of the protocol limits their number.
#[derive(Default)]
pub(crate) struct FrameQueue {
    state: Mutex<QueueState>,
    writer: Condvar,
    compressor: Condvar,
}

#[derive(Default)]
struct QueueState {
    slots: VecDeque<Slot>,
    /// The number of the first slot among all that there were.
    first: u64,
    /// The compressor has considered all slots before this number.
    considered: u64,
    gauge: CompressionGauge,
    end: QueueEnd,
}

enum Slot {
    Waiting(Frame, FrameTreatment),
    Compressing,
    Compressed(Frame),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum QueueEnd {
    #[default]
    Open,
    /// What is queued is still written.
    Closed,
    /// Nothing is.
    Broken,
}

/// A frame to compress. It must be given back.
pub(crate) struct Candidate {
    number: u64,
    pub(crate) frame: Frame,
}

/// How long a compression took, and whether the frame has become smaller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CompressionAttempt {
    pub(crate) took: Duration,
    pub(crate) result: CompressionResult,
}

impl FrameQueue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a frame. After the end, it is dropped.
    pub(crate) fn push(&self, frame: Frame, treatment: FrameTreatment) {
        let mut state = self.state();
        if state.end != QueueEnd::Open {
            return;
        }
        state.slots.push_back(Slot::Waiting(frame, treatment));
        self.writer.notify_one();
        if treatment == FrameTreatment::MayCompress && state.gauge.is_worthwhile() {
            self.compressor.notify_one();
        }
    }

    /// Waits for frames, and takes as many as are ready, up to about `bytes_max` encoded; none at the end.
    pub(crate) fn take(&self, bytes_max: u64) -> Option<Vec<Frame>> {
        let mut state = self.state();
        loop {
            match state.slots.front() {
                Some(Slot::Compressing) => {}
                Some(_) => break,
                None if state.end == QueueEnd::Open => {}
                None => return None,
            }
            state = self.writer.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (mut frames, mut bytes) = (Vec::new(), 0);
        while bytes < bytes_max {
            let frame = match state.slots.pop_front() {
                Some(Slot::Waiting(frame, _) | Slot::Compressed(frame)) => frame,
                Some(Slot::Compressing) => {
                    state.slots.push_front(Slot::Compressing);
                    break;
                }
                None => break,
            };
            state.first += 1;
            bytes += frame.encoded_bytes();
            frames.push(frame);
        }
        Some(frames)
    }

    /// The writer has written what it took.
    pub(crate) fn written(&self, bytes: u64, took: Duration) {
        let mut state = self.state();
        state.gauge.written(bytes, took);
        if state.gauge.is_worthwhile() {
            self.compressor.notify_one();
        }
    }

    /// Waits for a frame that should be compressed; none at the end.
    pub(crate) fn take_to_compress(&self) -> Option<Candidate> {
        let mut state = self.state();
        loop {
            if state.end != QueueEnd::Open {
                return None;
            }
            if let Some(candidate) = state.next_candidate() {
                return Some(candidate);
            }
            state = self.compressor.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Puts a frame back, compressed or not.
    pub(crate) fn give_back(&self, candidate: Candidate, plain_bytes: u64, attempt: CompressionAttempt) {
        let mut state = self.state();
        state.gauge.compressed(plain_bytes, attempt.took, attempt.result);
        if let Some(slot) = state.slot(candidate.number) {
            *slot = Slot::Compressed(candidate.frame);
        }
        self.writer.notify_one();
    }

    /// No more frames are added; what is queued is still written.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        if state.end == QueueEnd::Open {
            state.end = QueueEnd::Closed;
        }
        self.writer.notify_all();
        self.compressor.notify_all();
    }

    /// Whether it was closed or broken off.
    pub(crate) fn is_ended(&self) -> bool {
        self.state().end != QueueEnd::Open
    }

    /// Nothing can be written any more.
    pub(crate) fn break_off(&self) {
        let mut state = self.state();
        state.end = QueueEnd::Broken;
        state.first += state.slots.len() as u64;
        state.slots.clear();
        self.writer.notify_all();
        self.compressor.notify_all();
    }
}

impl QueueState {
    fn slot(&mut self, number: u64) -> Option<&mut Slot> {
        let index = number.checked_sub(self.first)?;
        self.slots.get_mut(usize::try_from(index).ok()?)
    }

    /// The first frame that should be compressed. Frames that are passed over are not considered again.
    fn next_candidate(&mut self) -> Option<Candidate> {
        if !self.gauge.is_worthwhile() {
            return None;
        }
        self.considered = self.considered.max(self.first);
        loop {
            let number = self.considered;
            let slot = self.slot(number)?;
            let is_candidate = matches!(slot, Slot::Waiting(_, FrameTreatment::MayCompress));
            self.considered += 1;
            if !is_candidate || self.gauge.choose() == CompressionChoice::Skip {
                continue;
            }
            let slot = self.slot(number)?;
            if let Slot::Waiting(frame, _) = std::mem::replace(slot, Slot::Compressing) {
                return Some(Candidate { number, frame });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_transfer::{Frame, Message};

    use super::{CompressionAttempt, FrameQueue, FrameTreatment};
    use crate::compression_gauge::CompressionResult;

    fn frame(number: u64) -> Frame {
        Frame {
            stream: 0,
            sequence: number,
            message: Message::Ping { number },
        }
    }

    fn slow_queue() -> FrameQueue {
        let queue = FrameQueue::default();
        queue.written(4 << 20, Duration::from_secs(1));
        queue
    }

    fn numbers(queue: &FrameQueue) -> Vec<u64> {
        let frames = queue.take(1000).unwrap_or_default();
        frames.into_iter().map(|frame| frame.sequence).collect()
    }

    const SMALLER: CompressionAttempt = CompressionAttempt {
        took: Duration::ZERO,
        result: CompressionResult::Smaller,
    };

    #[test]
    fn frames_keep_their_order_whatever_is_compressed() {
        let queue = slow_queue();
        for number in 0..5 {
            let treatment = match number {
                1 => FrameTreatment::AsItIs,
                _ => FrameTreatment::MayCompress,
            };
            queue.push(frame(number), treatment);
        }
        let [first, third] = [(); 2].map(|()| queue.take_to_compress().unwrap());
        assert_eq!((first.frame.sequence, third.frame.sequence), (0, 2));
        let compressed = frame(100);
        queue.give_back(
            super::Candidate {
                frame: compressed,
                ..first
            },
            1,
            SMALLER,
        );
        assert_eq!(numbers(&queue), [100, 1], "the third is being compressed");
        queue.give_back(third, 1, SMALLER);
        assert_eq!(
            numbers(&queue),
            [2, 3, 4],
            "a frame whose compression has not begun is not waited for"
        );
        queue.close();
        assert!(numbers(&queue).is_empty());
        assert!(queue.take_to_compress().is_none());
    }

    #[test]
    fn a_fast_connection_gets_every_frame_as_it_is() {
        let queue = FrameQueue::default();
        queue.written(4 << 20, Duration::from_millis(4));
        queue.push(frame(0), FrameTreatment::MayCompress);
        assert!(queue.state().next_candidate().is_none());
        queue.written(4 << 20, Duration::from_secs(1));
        assert!(queue.state().next_candidate().is_some());
    }

    #[test]
    fn nothing_is_kept_for_a_broken_stream() {
        let queue = slow_queue();
        queue.push(frame(0), FrameTreatment::MayCompress);
        let candidate = queue.take_to_compress().unwrap();
        queue.push(frame(1), FrameTreatment::AsItIs);
        queue.break_off();
        queue.give_back(candidate, 1, SMALLER);
        queue.push(frame(2), FrameTreatment::AsItIs);
        assert!(queue.take(1000).is_none() && queue.state().slots.is_empty());
    }
}
