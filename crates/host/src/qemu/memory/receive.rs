//! Takes in a memory stream while QEMU sends it.

use std::io::BufReader;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::parse::{MakeStore, Memory, MemoryStreamError, disassemble};

/// Bytes that are taken from the pipe at once.
const INPUT_BYTES: usize = 1 << 20;

/// The end of a pipe that QEMU writes its memory to, and word of when it has.
#[derive(Debug)]
pub struct MemoryPipe {
    writer: OwnedFd,
    ended: StreamEnd,
}

/// Word of the end.
#[derive(Debug)]
pub(crate) struct StreamEnd(Receiver<()>);

impl MemoryPipe {
    /// What QEMU gets, and what stays. The stream ends when QEMU closes its end: nobody else may have it.
    pub(crate) fn split(self) -> (OwnedFd, StreamEnd) {
        (self.writer, self.ended)
    }
}

impl StreamEnd {
    /// Waits until all is taken in, or cannot be; false where the time is over before.
    pub(crate) fn wait(&self, deadline: Duration) -> bool {
        // Whoever takes it in says nothing, and ends.
        self.0.recv_timeout(deadline) == Err(RecvTimeoutError::Disconnected)
    }
}

/// Memory that is being taken in.
#[derive(Debug)]
pub struct MemoryReceiver {
    thread: JoinHandle<Result<Memory, MemoryStreamError>>,
}

/// Begins to take in a memory stream. When that fails, QEMU's migration does, and the machine runs on.
///
/// # Errors
/// Where the system gives no pipe or no thread.
pub fn receive(
    page_bytes: u64,
    mut make_store: Box<MakeStore<'static>>,
) -> std::io::Result<(MemoryPipe, MemoryReceiver)> {
    let (reader, writer) = std::io::pipe()?;
    let (end, ended) = channel::<()>();
    let thread = std::thread::Builder::new().name("memory".to_owned()).spawn(move || {
        let mut input = BufReader::with_capacity(INPUT_BYTES, reader);
        let taken = disassemble(&mut input, page_bytes, &mut *make_store);
        // QEMU must not wait for somebody who does not read any more.
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
    /// Waits for the end; gives the state, and the device with the pages.
    pub fn finish(self) -> Result<Memory, MemoryStreamError> {
        self.thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
