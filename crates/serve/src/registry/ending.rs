//! How a connection ends when its export is removed.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::ClientSession;
use crate::stream::SocketStream;

/// Ends the session of a client whose export is removed.
pub(crate) struct ClientEnding {
    is_ending: AtomicBool,
    stream: Arc<SocketStream>,
}

impl ClientEnding {
    pub(crate) fn new(stream: Arc<SocketStream>) -> Self {
        Self {
            is_ending: AtomicBool::new(false),
            stream,
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        // Relaxed: seeing the change late has the same effect as a request that arrived slightly earlier.
        self.is_ending.load(Ordering::Relaxed)
    }
}

impl ClientSession for ClientEnding {
    fn ask_to_end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        // Requests that were already sent are still received.
        self.stream.shut_down(Shutdown::Read);
    }

    fn cut(&self) {
        self.stream.shut_down(Shutdown::Both);
    }
}
