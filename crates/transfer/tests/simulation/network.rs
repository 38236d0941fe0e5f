//! Connections between the hosts. Frames keep their order within a stream, and have none between streams.

use std::collections::VecDeque;

use holdfast_block::SeededRandom;
use holdfast_transfer::{Frame, FrameDecoder, LinkId};

/// One byte stream in both directions.
pub(super) struct Stream {
    pub(super) link: LinkId,
    to_receiver: VecDeque<Vec<u8>>,
    to_sender: VecDeque<Vec<u8>>,
    receiver_decoder: FrameDecoder,
    sender_decoder: FrameDecoder,
}

/// A connection. Each end notices at its own time that the other is gone.
pub(super) struct Connection {
    /// Which of the targets was reached.
    pub(super) target: usize,
    pub(super) streams: Vec<Stream>,
    pub(super) is_sender_open: bool,
    pub(super) is_receiver_open: bool,
    /// What is under way takes longer than everything else.
    pub(super) is_slow: bool,
}

impl Connection {
    pub(super) fn new(target: usize) -> Self {
        Self {
            target,
            streams: Vec::new(),
            is_sender_open: true,
            is_receiver_open: true,
            is_slow: false,
        }
    }

    pub(super) fn send_to_receiver(&mut self, frame: &Frame, next_link: &mut u64) {
        while self.streams.len() <= usize::from(frame.stream) {
            *next_link += 1;
            self.streams.push(Stream {
                link: LinkId(*next_link),
                to_receiver: VecDeque::new(),
                to_sender: VecDeque::new(),
                receiver_decoder: FrameDecoder::new(),
                sender_decoder: FrameDecoder::new(),
            });
        }
        self.streams[usize::from(frame.stream)]
            .to_receiver
            .push_back(encode(frame));
    }

    pub(super) fn send_to_sender(&mut self, link: LinkId, frame: &Frame) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.link == link) {
            stream.to_sender.push_back(encode(frame));
        }
    }

    /// Everything under way is lost.
    pub(super) fn lose(&mut self) {
        for stream in &mut self.streams {
            stream.to_receiver.clear();
            stream.to_sender.clear();
        }
    }

    pub(super) fn has_frames_to_receiver(&self) -> bool {
        self.streams.iter().any(|stream| !stream.to_receiver.is_empty())
    }

    pub(super) fn has_frames_to_sender(&self) -> bool {
        self.streams.iter().any(|stream| !stream.to_sender.is_empty())
    }

    /// A frame that arrives at the receiver, of any stream.
    pub(super) fn arrive_at_receiver(&mut self, random: &mut SeededRandom) -> Option<(LinkId, Frame)> {
        let filled: Vec<_> = self
            .streams
            .iter_mut()
            .filter(|stream| !stream.to_receiver.is_empty())
            .collect();
        let index = random.below(filled.len().max(1) as u64) as usize;
        let stream = filled.into_iter().nth(index)?;
        let bytes = stream.to_receiver.pop_front()?;
        Some((stream.link, decode(&mut stream.receiver_decoder, &bytes)))
    }

    pub(super) fn arrive_at_sender(&mut self, random: &mut SeededRandom) -> Option<Frame> {
        let filled: Vec<_> = self
            .streams
            .iter_mut()
            .filter(|stream| !stream.to_sender.is_empty())
            .collect();
        let index = random.below(filled.len().max(1) as u64) as usize;
        let stream = filled.into_iter().nth(index)?;
        let bytes = stream.to_sender.pop_front()?;
        Some(decode(&mut stream.sender_decoder, &bytes))
    }
}

fn encode(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    assert_eq!(bytes.len() as u64, frame.encoded_bytes());
    bytes
}

fn decode(decoder: &mut FrameDecoder, bytes: &[u8]) -> Frame {
    let (first, second) = bytes.split_at(bytes.len() / 3);
    decoder.push(first);
    assert_eq!(decoder.next_frame(), Ok(None));
    decoder.push(second);
    let frame = decoder.next_frame().unwrap();
    frame.expect("all of its bytes have arrived")
}
