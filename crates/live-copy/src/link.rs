//! The threads of one byte stream: one turns bytes into frames, the other frames into bytes.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_transfer::{Frame, FrameDecoder};

use crate::stream::{ByteStream, StreamCloser};

/// Bytes that are read at once, and that are collected before they are written.
const BUFFER_BYTES: usize = 256 << 10;

/// What arrives.
pub(crate) enum LinkEvent {
    Frame(Frame),
    /// The stream has ended, or its bytes are no frames. It is of no more use.
    Closed,
}

/// A byte stream with its threads. Dropping it closes the stream.
pub(crate) struct Link {
    frames: Option<Sender<Frame>>,
    writer: JoinHandle<()>,
    closer: Box<dyn StreamCloser>,
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
        clock: Arc<dyn Clock>,
        deliver: impl Fn(LinkEvent) -> bool + Send + Clone + 'static,
    ) -> std::io::Result<Self> {
        let (frames, queue) = channel();
        let ByteStream { input, output, closer } = stream;
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let from_writer = deliver.clone();
        named("frames in").spawn(move || read_frames(input, &deliver))?;
        let writer = named("frames out").spawn(move || {
            if write_frames(output, &queue).is_err() {
                from_writer(LinkEvent::Closed);
            }
        })?;
        Ok(Self {
            frames: Some(frames),
            writer,
            closer,
            clock,
        })
    }

    /// Sends a frame. If the stream has ended, the event says so.
    pub(crate) fn send(&self, frame: Frame) {
        if let Some(frames) = &self.frames {
            frames.send(frame).ok();
        }
    }

    /// Sends what is queued, closes the stream, and returns the reason of the other side, if it has failed.
    pub(crate) fn close(mut self) -> Option<String> {
        self.end()
    }

    fn end(&mut self) -> Option<String> {
        self.frames = None;
        let until = self.clock.now() + CLOSE_PATIENCE;
        while !self.writer.is_finished() && self.clock.now() < until {
            self.clock.sleep(CLOSE_INTERVAL);
        }
        self.closer.close()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.frames.is_some() {
            self.end();
        }
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

/// Writes frames until the queue ends. Small frames that wait are written together.
fn write_frames(mut output: Box<dyn Write + Send>, queue: &Receiver<Frame>) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(BUFFER_BYTES);
    while let Ok(frame) = queue.recv() {
        frame.encode(&mut bytes);
        while bytes.len() < BUFFER_BYTES
            && let Ok(frame) = queue.try_recv()
        {
            frame.encode(&mut bytes);
        }
        output.write_all(&bytes)?;
        output.flush()?;
        bytes.clear();
    }
    Ok(())
}
