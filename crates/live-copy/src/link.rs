//! The threads of one byte stream: one turns bytes into frames, another frames into bytes, and a third compresses frames
//! that wait.

use std::io::{Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_transfer::{Frame, FrameBytes, FrameDecoder, Message, RangeCompressor};

use crate::compression_gauge::CompressionResult;
use crate::frame_queue::{CompressionAttempt, FrameQueue, FrameTreatment};
use crate::send_rate::SendRate;
use crate::stream::{ByteStream, StreamCloser};

/// Bytes that are read at once, and that are collected before they are written.
const BUFFER_BYTES: usize = 256 << 10;

/// Whether a stream has a thread that compresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkCompression {
    Adaptive,
    Off,
}

/// How a stream is used.
pub(crate) struct LinkOptions {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) compression: LinkCompression,
    /// How fast frames are written.
    pub(crate) rate: Arc<SendRate>,
}

/// What arrives, and what becomes of what is sent.
pub(crate) enum LinkEvent {
    Frame(Frame),
    /// Frames with data are about to be written, of a stream with compression.
    Written(FrameBytes),
    /// The stream has ended, or its bytes are no frames. It is of no more use.
    Closed,
}

/// A byte stream with its threads. Dropping it closes the stream.
pub(crate) struct Link {
    queue: Arc<FrameQueue>,
    writer: JoinHandle<()>,
    closer: Option<Box<dyn StreamCloser>>,
    clock: Arc<dyn Clock>,
}

/// How long frames that are queued may take to be written when a stream is closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);
const CLOSE_INTERVAL: Duration = Duration::from_millis(5);

impl Link {
    /// Starts the threads. `deliver` is called with all that arrives, until it returns false.
    ///
    /// The window of the protocol limits the memory of both directions: neither queue has another limit.
    pub(crate) fn start(
        stream: ByteStream,
        options: LinkOptions,
        deliver: impl Fn(LinkEvent) -> bool + Send + Clone + 'static,
    ) -> std::io::Result<Self> {
        let LinkOptions {
            clock,
            compression,
            rate,
        } = options;
        let queue = Arc::new(FrameQueue::default());
        let ByteStream { input, output, closer } = stream;
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let writer = FrameWriter {
            queue: Arc::clone(&queue),
            clock: Arc::clone(&clock),
            compression,
            rate,
            deliver: deliver.clone(),
        };
        named("frames in").spawn(move || read_frames(input, &deliver))?;
        if compression == LinkCompression::Adaptive {
            let (queue, clock) = (Arc::clone(&queue), Arc::clone(&clock));
            named("compress").spawn(move || compress_frames(&queue, &*clock))?;
        }
        let writer = named("frames out").spawn(move || writer.run(output))?;
        Ok(Self {
            queue,
            writer,
            closer: Some(closer),
            clock,
        })
    }

    /// Sends a frame. If the stream has ended, the event says so.
    pub(crate) fn send(&self, frame: Frame, treatment: FrameTreatment) {
        self.queue.push(frame, treatment);
    }

    /// Sends what is queued, closes the stream, and returns the reason of the other side, if it has failed.
    pub(crate) fn close(mut self) -> Option<String> {
        self.end()
    }

    fn end(&mut self) -> Option<String> {
        let closer = self.closer.take()?;
        self.queue.close();
        let until = self.clock.now() + CLOSE_PATIENCE;
        while !self.writer.is_finished() && self.clock.now() < until {
            self.clock.sleep(CLOSE_INTERVAL);
        }
        closer.close()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end();
    }
}

fn read_frames(mut input: Box<dyn Read + Send>, deliver: &impl Fn(LinkEvent) -> bool) {
    let mut decoder = FrameDecoder::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match input.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => decoder.push(&buffer[..count]),
        }
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => {
                    if !deliver(LinkEvent::Frame(frame)) {
                        return;
                    }
                }
                Ok(None) => break,
                Err(_) => {
                    deliver(LinkEvent::Closed);
                    return;
                }
            }
        }
    }
    deliver(LinkEvent::Closed);
}

/// The thread that writes.
struct FrameWriter<Deliver> {
    queue: Arc<FrameQueue>,
    clock: Arc<dyn Clock>,
    compression: LinkCompression,
    rate: Arc<SendRate>,
    deliver: Deliver,
}

impl<Deliver: Fn(LinkEvent) -> bool> FrameWriter<Deliver> {
    fn run(self, output: Box<dyn Write + Send>) {
        if self.write_frames(output).is_err() {
            self.queue.break_off();
            (self.deliver)(LinkEvent::Closed);
        }
    }

    /// Writes frames until the queue ends. Small frames that wait are written together.
    fn write_frames(&self, mut output: Box<dyn Write + Send>) -> std::io::Result<()> {
        let mut bytes = Vec::with_capacity(BUFFER_BYTES);
        while let Some(frames) = self.queue.take(BUFFER_BYTES as u64) {
            // Before they are written: then it arrives before any answer to them.
            self.report(&frames);
            bytes.clear();
            for frame in frames {
                frame.encode(&mut bytes);
            }
            let begun = self.clock.now();
            // A stream that is closed sends what is left at once.
            for piece in bytes.chunks(self.rate.piece_bytes(bytes.len())) {
                self.rate.pass(piece.len(), &|| self.queue.is_ended());
                output.write_all(piece)?;
            }
            output.flush()?;
            let took = self.clock.now().saturating_sub(begun);
            self.queue.written(bytes.len() as u64, took);
        }
        Ok(())
    }

    fn report(&self, frames: &[Frame]) {
        let has_data = |frame: &&Frame| matches!(frame.message, Message::Range(_) | Message::Compressed(_));
        let data = || frames.iter().filter(has_data);
        let written = FrameBytes {
            plain_bytes: data().map(Frame::plain_bytes).sum(),
            wire_bytes: data().map(Frame::encoded_bytes).sum(),
        };
        if self.compression == LinkCompression::Adaptive && written != FrameBytes::default() {
            (self.deliver)(LinkEvent::Written(written));
        }
    }
}

/// Compresses frames that wait, until the queue ends.
fn compress_frames(queue: &FrameQueue, clock: &dyn Clock) {
    let mut compressor = RangeCompressor::default();
    while let Some(mut candidate) = queue.take_to_compress() {
        let plain_bytes = candidate.frame.plain_bytes();
        let begun = clock.now();
        let compressed = match &candidate.frame.message {
            Message::Range(range) => compressor.compress(range),
            _ => None,
        };
        let took = clock.now().saturating_sub(begun);
        let result = match compressed {
            Some(compressed) => {
                candidate.frame.message = Message::Compressed(compressed);
                CompressionResult::Smaller
            }
            None => CompressionResult::NotSmaller,
        };
        queue.give_back(candidate, plain_bytes, CompressionAttempt { took, result });
    }
}
