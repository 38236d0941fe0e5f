//! Threads that serve a mounted file system over its FUSE device.

use std::io::IoSlice;
use std::os::fd::{AsFd as _, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::event::MountEvents;
use super::session::{FuseAnswer, FuseSession, Negotiation, SessionStart};
use super::tree::FileTree;
use super::wire::{self, ParseError};
use crate::{Error, Result};

/// Threads of a mounted file system. A read of data that is not cached occupies its thread.
const THREAD_COUNT: usize = 8;

/// Serves a file tree as a mounted file system, until it is unmounted.
pub struct FuseServer {
    shared: Arc<SharedServer>,
}

struct SharedServer {
    device: OwnedFd,
    session: FuseSession,
    running_count: AtomicUsize,
}

impl FuseServer {
    /// Serves the file system that was mounted with `device`, an opened `/dev/fuse`.
    ///
    /// A successor first asks the kernel to send the requests again that its predecessor has not answered. Such a
    /// request may be executed twice: reads, writes and changes of space give the same result.
    pub fn start(
        device: OwnedFd,
        tree: Arc<FileTree>,
        events: Arc<dyn MountEvents>,
        start: SessionStart,
    ) -> Result<Self> {
        let shared = Arc::new(SharedServer {
            device,
            session: FuseSession::new(tree, events, start),
            running_count: AtomicUsize::new(0),
        });
        if let SessionStart::Successor { .. } = start {
            rustix::io::write(shared.device.as_fd(), &wire::resend_notification())
                .map_err(|errno| Error::TakeOver { source: errno.into() })?;
        }
        for _ in 0..THREAD_COUNT {
            shared.running_count.fetch_add(1, Ordering::SeqCst);
            let slot = ThreadSlot(Arc::clone(&shared));
            let thread = std::thread::Builder::new().name("fuse".to_owned());
            // An unused thread needs no join: it ends when the file system is unmounted.
            thread.spawn(move || slot.0.run()).map_err(|source| Error::Thread {
                purpose: "a mounted file system",
                source,
            })?;
        }
        Ok(Self { shared })
    }

    /// Whether the file system has been unmounted, and all requests are answered.
    pub fn is_ended(&self) -> bool {
        self.shared.running_count.load(Ordering::SeqCst) == 0
    }

    /// What the kernel and the server have agreed on.
    pub fn negotiation(&self) -> Negotiation {
        self.shared.session.negotiation()
    }

    /// Number of open files.
    pub fn open_file_count(&self) -> usize {
        self.shared.session.open_file_count()
    }
}

/// A running thread; it is counted until its end.
struct ThreadSlot(Arc<SharedServer>);

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        self.0.running_count.fetch_sub(1, Ordering::SeqCst);
    }
}

impl SharedServer {
    fn run(&self) {
        // Not zero, so that each page exists. If this process is killed while the kernel copies a request to a page that
        // does not exist yet, the caller gets an input/output error, and no successor gets the request.
        let mut request = vec![u8::MAX; self.session.request_bytes_max()];
        let mut body = Vec::new();
        loop {
            let length = match rustix::io::read(self.device.as_fd(), &mut request) {
                Ok(length) => length,
                // ENOENT: the caller of the request was interrupted before it was read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => continue,
                // ENODEV: the file system is unmounted. Other errors do not end, so reading again would not help.
                Err(_) => return,
            };
            let message = &request[..length];
            match self.answer(message, &mut body) {
                FuseAnswer::Nothing => {}
                FuseAnswer::Reply(header) => {
                    let parts = [IoSlice::new(&header), IoSlice::new(&body)];
                    // ENOENT: the caller was interrupted, and the kernel has forgotten the request. If a reply is
                    // invalid, the kernel answers the caller with an error.
                    rustix::io::writev(self.device.as_fd(), &parts).ok();
                }
            }
        }
    }

    /// Answers a message; a panic, which was reported already, becomes an input/output error.
    fn answer(&self, message: &[u8], body: &mut Vec<u8>) -> FuseAnswer {
        let answer = catch_unwind(AssertUnwindSafe(|| self.session.answer(message, body)));
        answer.unwrap_or_else(|_| {
            body.clear();
            match wire::parse(message) {
                Ok((header, _)) | Err(ParseError::Invalid(header)) => {
                    FuseAnswer::Reply(wire::reply_header(header.unique, 0, Errno::IO.raw_os_error()))
                }
                Err(ParseError::NoHeader) => FuseAnswer::Nothing,
            }
        })
    }
}
