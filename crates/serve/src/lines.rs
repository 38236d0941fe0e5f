//! A server of requests that are one line, and are answered with one line.

use std::io::{ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::Clock;
use rustix::net::sockopt;
use rustix::process::{Uid, geteuid};

use crate::nbd::{Listener, Socket};
use crate::{Error, Result};

/// Interval at which a thread that waits for a client checks the clock, and whether the server is stopped.
const TICK: Duration = Duration::from_millis(100);

/// Limits on the clients of a [`LineServer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineLimits {
    /// Longest request in bytes, without the end of the line.
    pub request_bytes_max: usize,
    /// Time limit for sending the request, and for taking the answer.
    pub patience: Duration,
    /// Clients that are served at a time; further ones are disconnected.
    pub client_count_max: usize,
}

/// Answers the line of a client, on a thread of its own.
pub type LineHandler = dyn Fn(&[u8]) -> Vec<u8> + Send + Sync;

/// A server for root and for the user of this process; other clients are disconnected. Each client sends one line, gets
/// one line, and is disconnected. Dropping the server stops it; a request that is being answered is completed.
pub struct LineServer {
    shared: Arc<LineShared>,
    thread: Option<JoinHandle<()>>,
}

struct LineShared {
    limits: LineLimits,
    clock: Arc<dyn Clock>,
    handler: Box<LineHandler>,
    client_count: AtomicUsize,
    is_stopping: AtomicBool,
}

impl LineServer {
    /// Serves the clients of a Unix socket.
    ///
    /// # Errors
    /// The socket is one of TCP, which does not say which user connects.
    pub fn start(
        listener: Listener,
        limits: LineLimits,
        clock: Arc<dyn Clock>,
        handler: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static,
    ) -> Result<Self> {
        if listener.tcp_address().is_some() {
            return Err(Error::NotLocal);
        }
        listener
            .set_accept_interval(TICK)
            .map_err(|source| Error::Socket { source })?;
        let shared = Arc::new(LineShared {
            limits,
            clock,
            handler: Box::new(handler),
            client_count: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("control-listener".to_owned())
            .spawn(move || theirs.accept_clients(&listener))
            .map_err(|source| Error::Thread {
                purpose: "the control socket",
                source,
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for LineServer {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Relaxed);
        // A panic of that thread was already reported.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// A counted client.
struct ClientSlot(Arc<LineShared>);

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.0.client_count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl LineShared {
    fn accept_clients(self: &Arc<Self>, listener: &Listener) {
        while !self.is_stopping.load(Ordering::Relaxed) {
            match listener.accept() {
                // The mode of an inherited socket may admit all users.
                Ok(Socket::Unix(stream)) if is_trusted(user_of(&stream), geteuid()) => self.begin(stream),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => self.clock.sleep(TICK),
            }
        }
    }

    fn begin(self: &Arc<Self>, stream: UnixStream) {
        let count = self.client_count.fetch_add(1, Ordering::Relaxed);
        let slot = ClientSlot(Arc::clone(self));
        if count >= self.limits.client_count_max {
            return;
        }
        let thread = std::thread::Builder::new().name("control-client".to_owned());
        // Without a thread, the client is disconnected.
        drop(thread.spawn(move || {
            // A write error means that the client has closed.
            slot.0.serve(stream).unwrap_or_default();
            drop(slot);
        }));
    }

    fn serve(&self, mut stream: UnixStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(self.limits.patience))?;
        let Some(request) = self.receive(&stream)? else {
            return Ok(());
        };
        let mut answer = (self.handler)(&request);
        answer.push(b'\n');
        stream.write_all(&answer)
    }

    /// Receives a line; `None` if the client ends, is too slow, or sends too much.
    fn receive(&self, mut stream: &UnixStream) -> std::io::Result<Option<Vec<u8>>> {
        use std::io::Read as _;
        let deadline = self.clock.now() + self.limits.patience;
        let mut request = Vec::new();
        let mut buffer = [0; 4096];
        while request.len() <= self.limits.request_bytes_max && self.clock.now() < deadline {
            if self.is_stopping.load(Ordering::Relaxed) {
                return Ok(None);
            }
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(length) => {
                    let start = request.len();
                    request.extend_from_slice(&buffer[..length]);
                    if let Some(end) = request[start..].iter().position(|byte| *byte == b'\n') {
                        request.truncate(start + end);
                        return Ok((request.len() <= self.limits.request_bytes_max).then_some(request));
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

/// The user who has connected, according to the system; `None` if it does not say.
fn user_of(stream: &UnixStream) -> Option<Uid> {
    sockopt::socket_peercred(stream).ok().map(|peer| peer.uid)
}

fn is_trusted(user: Option<Uid>, own: Uid) -> bool {
    user.is_some_and(|user| user.is_root() || user == own)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::SystemClock;

    use rustix::process::Uid;

    use super::{LineLimits, LineServer, is_trusted};
    use crate::Error;
    use crate::nbd::Listener;

    const LIMITS: LineLimits = LineLimits {
        request_bytes_max: 100,
        patience: Duration::from_millis(500),
        client_count_max: 2,
    };

    fn start(path: &Path) -> LineServer {
        let clock = Arc::new(SystemClock::new());
        let listener = Listener::unix(path, &*clock).unwrap();
        LineServer::start(listener, LIMITS, clock, |line| [b"got ", line].concat()).unwrap()
    }

    fn ask(path: &Path, bytes: &[u8]) -> Vec<u8> {
        let mut stream = UnixStream::connect(path).unwrap();
        // The server may have closed the connection already.
        stream.write_all(bytes).unwrap_or_default();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap_or_default();
        answer
    }

    #[test]
    fn a_line_is_answered_with_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let server = start(&path);
        assert_eq!(ask(&path, b"this\nand more"), b"got this\n");
        assert_eq!(ask(&path, b"\n"), b"got \n");
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn only_root_and_the_own_user_are_trusted() {
        let [root, own, other] = [0, 1000, 1001].map(Uid::from_raw);
        assert!(is_trusted(Some(root), own) && is_trusted(Some(own), own));
        assert!(!is_trusted(Some(other), own) && !is_trusted(None, own));
        assert!(!is_trusted(Some(own), root), "root does not obey other users");
    }

    #[test]
    fn a_tcp_socket_is_refused() {
        let listener = Listener::tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let clock = Arc::new(SystemClock::new());
        let started = LineServer::start(listener, LIMITS, clock, <[u8]>::to_vec);
        assert!(matches!(started.err(), Some(Error::NotLocal)));
    }

    /// Clients that send too much, too little or nothing, and too many clients, harm only themselves.
    #[test]
    fn hostile_clients_are_disconnected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let _server = start(&path);
        assert_eq!(ask(&path, &[b'x'; 5000]), b"", "too long");
        assert_eq!(ask(&path, b"no end of the line"), b"", "too slow");
        let idle: Vec<_> = (0..LIMITS.client_count_max)
            .map(|_| UnixStream::connect(&path).unwrap())
            .collect();
        assert_eq!(ask(&path, b"late\n"), b"", "too many");
        drop(idle);
        let mut attempts = std::iter::repeat_with(|| ask(&path, b"again\n"));
        assert!(attempts.by_ref().take(10_000).any(|answer| answer == b"got again\n"));
    }
}
