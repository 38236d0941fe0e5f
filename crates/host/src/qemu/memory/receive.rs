//! Receives a memory stream while QEMU sends it.

use std::io::BufReader;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::parse::{MakeStore, Memory, MemoryStreamError, disassemble};

/// Bytes per read from the pipe.
const INPUT_BYTES: usize = 1 << 20;

/// The end of a pipe that QEMU writes its memory to, and a signal for the end of the stream.
#[derive(Debug)]
pub struct MemoryPipe {
    writer: OwnedFd,
    ended: StreamEnd,
}

/// Signals the end of the stream.
#[derive(Debug)]
pub(crate) struct StreamEnd(Receiver<()>);

impl MemoryPipe {
    /// Returns the end for QEMU, and the signal. The stream ends when QEMU closes its end of the pipe, so no other
    /// process may have that end open.
    pub(crate) fn split(self) -> (OwnedFd, StreamEnd) {
        (self.writer, self.ended)
    }
}

impl StreamEnd {
    /// Waits until the receiver has read everything or failed; false if `deadline` passes before.
    pub(crate) fn wait(&self, deadline: Duration) -> bool {
        // The receiver sends no message. It disconnects when it ends.
        self.0.recv_timeout(deadline) == Err(RecvTimeoutError::Disconnected)
    }
}

/// A memory stream that is being received.
#[derive(Debug)]
pub struct MemoryReceiver {
    thread: JoinHandle<Result<Memory, MemoryStreamError>>,
}

/// Starts to receive a memory stream. If receiving fails, QEMU's migration fails, and the machine continues to run.
///
/// # Errors
/// The system provides no pipe or no thread.
pub fn receive(
    page_bytes: u64,
    mut make_store: Box<MakeStore<'static>>,
) -> std::io::Result<(MemoryPipe, MemoryReceiver)> {
    let (reader, writer) = std::io::pipe()?;
    let (end, ended) = channel::<()>();
    let thread = std::thread::Builder::new().name("memory".to_owned()).spawn(move || {
        let mut input = BufReader::with_capacity(INPUT_BYTES, reader);
        let taken = disassemble(&mut input, page_bytes, &mut *make_store);
        // QEMU must not wait for a reader that has stopped reading.
        drop((input, end));
        taken
    })?;
    let pipe = MemoryPipe {
        writer: writer.into(),
        ended: StreamEnd(ended),
    };
    Ok((pipe, MemoryReceiver { thread }))
}

impl MemoryReceiver {
    /// Waits for the end, and returns the state and the device with the pages.
    pub fn finish(self) -> Result<Memory, MemoryStreamError> {
        self.thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
