//! Sockets of this host whose connections are forwarded to another host.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use holdfast_host::ToolError;

use crate::error::{Error, Result};

/// Sockets that are served as long as this exists.
#[derive(Default)]
pub(crate) struct ForwardedSockets(Mutex<Vec<ForwardedSocket>>);

impl ForwardedSockets {
    /// Makes the socket `here`, whose connections `forward` forwards to `host`, each in its own thread.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) fn listen(
        &self,
        here: &Path,
        host: &str,
        forward: impl Fn(UnixStream) + Send + Sync + 'static,
    ) -> Result<()> {
        let socket = ForwardedSocket::listen(here, forward).map_err(|error| Error::Forward {
            host: host.to_owned(),
            source: ToolError::NoConnection {
                host: host.to_owned(),
                reason: format!("{}: {error}", here.display()),
            },
        })?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(socket);
        Ok(())
    }
}

struct ForwardedSocket {
    listener: UnixListener,
    thread: Option<JoinHandle<()>>,
}

impl ForwardedSocket {
    fn listen(here: &Path, forward: impl Fn(UnixStream) + Send + Sync + 'static) -> std::io::Result<Self> {
        let listener = UnixListener::bind(here)?;
        let accepting = listener.try_clone()?;
        let forward = Arc::new(forward);
        let accept = move || {
            while let Ok((stream, _)) = accepting.accept() {
                let forward = Arc::clone(&forward);
                std::thread::spawn(move || forward(stream));
            }
        };
        let thread = std::thread::Builder::new().name("forward".to_owned()).spawn(accept)?;
        Ok(Self {
            listener,
            thread: Some(thread),
        })
    }
}

impl Drop for ForwardedSocket {
    fn drop(&mut self) {
        // The thread waits for a connection.
        rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both).ok();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
