//! How a sender starts receivers, here or on another host, and opens streams to them.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::{Clock, error_text};
use holdfast_host::{Piped, StreamTools};

use crate::error::{Error, Result, THIS_HOST};
use crate::receive::{ReceiveTools, TargetScope, serve_receiver};
use crate::request::{Answer, READY_BYTES_MAX, ReceiveRequest, RefusalKind, SeedProgress};
use crate::stream::{ByteStream, StreamCloser};
use crate::target::ExportTarget;

/// Words after which the program receives: `holdfast receive-disk 1`.
pub const RECEIVE_COMMAND: [&str; 2] = ["receive-disk", "1"];

/// How a sender opens connections.
pub trait Connector: Send + Sync {
    /// Starts a receiver, and opens a stream to it. `watch` learns how much of a seed is copied there.
    ///
    /// # Errors
    /// [`Error::Refused`]: the receiver cannot take the disk, and another attempt is useless. Other errors may end.
    fn connect(&self, request: &ReceiveRequest, watch: &SeedObserver) -> Result<ByteStream>;

    /// Where the receiver is, for people.
    fn place(&self) -> String;

    /// Whether the receiver is in this process: its connection is as fast as memory.
    fn is_local(&self) -> bool {
        false
    }
}

/// Sees how much of a seed the receiver has copied.
pub type SeedObserver = dyn Fn(SeedProgress) + Send;

/// Sends the request, and waits for the answer.
fn greet(mut stream: ByteStream, request: &ReceiveRequest, watch: &SeedObserver, place: &str) -> Result<ByteStream> {
    let lost = |source| Error::Connection {
        place: place.to_owned(),
        source,
    };
    let mut line = serde_json::to_vec(request).map_err(|error| lost(error.into()))?;
    line.push(b'\n');
    stream
        .output
        .write_all(&line)
        .and_then(|()| stream.output.flush())
        .map_err(lost)?;
    // The receiver sends nothing after the line before it gets a frame.
    let mut input = BufReader::new(stream.input);
    loop {
        let mut answer = Vec::new();
        let read = (&mut input).take(READY_BYTES_MAX).read_until(b'\n', &mut answer);
        match read.map_err(lost) {
            Ok(_) if answer.ends_with(b"\n") => {}
            result => {
                let reason = stream.closer.close();
                return Err(match (reason, result) {
                    (Some(reason), _) => Error::ConnectionRefused {
                        place: place.to_owned(),
                        reason,
                    },
                    (None, Err(error)) => error,
                    (None, Ok(_)) => lost(std::io::ErrorKind::UnexpectedEof.into()),
                });
            }
        }
        match serde_json::from_slice(&answer) {
            Ok(Answer::Seeding(progress)) => watch(progress),
            Ok(Answer::Ready {}) => {
                stream.input = Box::new(input);
                return Ok(stream);
            }
            Ok(Answer::Refused { kind, reason }) => {
                return Err(Error::Refused {
                    place: place.to_owned(),
                    kind,
                    reason: match (kind, &request.format) {
                        // It does not know the field.
                        (RefusalKind::OtherVersion, Some(format)) => {
                            format!("the holdfast there is too old for {format} images: {reason}")
                        }
                        _ => reason,
                    },
                });
            }
            Err(_) => {
                return Err(Error::Refused {
                    place: place.to_owned(),
                    kind: RefusalKind::OtherVersion,
                    reason: "the answer is not from a holdfast of about the same version".to_owned(),
                });
            }
        }
    }
}

/// A receiver in this process.
pub struct LocalConnector {
    tools: ReceiveTools,
    export: Option<Arc<ExportTarget>>,
}

impl LocalConnector {
    /// A connector to receivers that use these tools.
    pub fn new(tools: ReceiveTools) -> Self {
        Self { tools, export: None }
    }

    /// A connector to receivers that write to an export.
    pub fn to_export(tools: ReceiveTools, export: ExportTarget) -> Self {
        Self {
            tools,
            export: Some(Arc::new(export)),
        }
    }
}

impl Connector for LocalConnector {
    fn connect(&self, request: &ReceiveRequest, watch: &SeedObserver) -> Result<ByteStream> {
        let place = self.place();
        let failed = |source| Error::Connection {
            place: place.clone(),
            source,
        };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let (tools, export) = (self.tools.clone(), self.export.clone());
        let stream = ByteStream::of_socket(theirs).map_err(failed)?;
        let receiver = std::thread::Builder::new()
            .name("receive".to_owned())
            .spawn(move || {
                let scope = export.as_deref().map_or(TargetScope::Host, TargetScope::Export);
                serve_receiver(stream, scope, &tools)
                    .err()
                    .map(|error| error_text(&error))
            })
            .map_err(failed)?;
        let stream = socket_stream(ours, Some(receiver)).map_err(failed)?;
        greet(stream, request, watch, &place)
    }

    fn place(&self) -> String {
        let export = self.export.as_deref().map(ExportTarget::address);
        export.unwrap_or(THIS_HOST).to_owned()
    }

    fn is_local(&self) -> bool {
        true
    }
}

/// Opens a socket at whose other end a receiver waits for a request.
pub type SocketOpener = dyn Fn() -> std::io::Result<UnixStream> + Send + Sync;

/// A receiver at the other end of a socket.
pub struct SocketConnector {
    open: Box<SocketOpener>,
    place: String,
}

impl SocketConnector {
    /// A connector to receivers to which `open` connects. `place` is where they are, for people.
    pub fn new(open: Box<SocketOpener>, place: String) -> Self {
        Self { open, place }
    }
}

impl Connector for SocketConnector {
    fn connect(&self, request: &ReceiveRequest, watch: &SeedObserver) -> Result<ByteStream> {
        let stream = (self.open)().and_then(ByteStream::of_socket);
        let stream = stream.map_err(|source| Error::Connection {
            place: self.place(),
            source,
        })?;
        greet(stream, request, watch, &self.place)
    }

    fn place(&self) -> String {
        self.place.clone()
    }
}

impl ByteStream {
    /// A stream over a socket.
    ///
    /// # Errors
    /// The process has too many open files.
    pub fn of_socket(socket: UnixStream) -> std::io::Result<Self> {
        socket_stream(socket, None)
    }
}

fn socket_stream(socket: UnixStream, receiver: Option<ReceiverThread>) -> std::io::Result<ByteStream> {
    Ok(ByteStream {
        input: Box::new(socket.try_clone()?),
        output: Box::new(socket.try_clone()?),
        closer: Box::new(SocketCloser {
            socket,
            receiver: Mutex::new(receiver),
        }),
    })
}

/// A receiver in this process. It returns the reason if it failed.
type ReceiverThread = JoinHandle<Option<String>>;

struct SocketCloser {
    socket: UnixStream,
    /// The receiver at the other end, if it is in this process.
    receiver: Mutex<Option<ReceiverThread>>,
}

impl StreamCloser for SocketCloser {
    fn close(&self) -> Option<String> {
        // It fails if the other end is closed already.
        self.socket.shutdown(Shutdown::Both).ok();
        let receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        receiver?
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// A receiver on another host: a `holdfast` that ssh starts there, or to which a command connects.
pub struct ProgramConnector {
    tools: Arc<dyn StreamTools>,
    program: String,
    arguments: Vec<String>,
    /// What it gets before the request.
    first_line: Vec<u8>,
    place: String,
    clock: Arc<dyn Clock>,
}

impl ProgramConnector {
    /// A connector to receivers that `tools` start.
    pub fn new(tools: Arc<dyn StreamTools>, program: String, clock: Arc<dyn Clock>) -> Self {
        Self {
            place: tools.host().unwrap_or(THIS_HOST).to_owned(),
            tools,
            program,
            arguments: RECEIVE_COMMAND.map(str::to_owned).into(),
            first_line: Vec::new(),
            clock,
        }
    }

    /// A connector to receivers that `command`, called by a shell of the host of `tools`, connects with its standard input and
    /// output.
    pub fn by_command(tools: Arc<dyn StreamTools>, command: String, clock: Arc<dyn Clock>) -> Self {
        Self {
            tools,
            program: "/bin/sh".to_owned(),
            place: format!("`{command}`"),
            arguments: vec!["-c".to_owned(), command],
            first_line: Vec::new(),
            clock,
        }
    }

    /// The program gets this line before the request, to reach the receiver.
    #[must_use]
    pub fn with_first_line(mut self, line: Vec<u8>) -> Self {
        self.first_line = line;
        self
    }
}

impl Connector for ProgramConnector {
    fn connect(&self, request: &ReceiveRequest, watch: &SeedObserver) -> Result<ByteStream> {
        let place = self.place();
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let mut program = self
            .tools
            .start(&self.program, &arguments)
            .map_err(|source| Error::Program {
                place: place.clone(),
                source,
            })?;
        let no_pipe = || Error::Connection {
            place: place.clone(),
            source: std::io::ErrorKind::BrokenPipe.into(),
        };
        let input = program.take_output().ok_or_else(no_pipe)?;
        let mut output = program.take_input().ok_or_else(no_pipe)?;
        // If the program has ended, the request fails, too, with its reason.
        output.write_all(&self.first_line).ok();
        let closer = ProgramCloser {
            program: Mutex::new(program),
            clock: Arc::clone(&self.clock),
        };
        let stream = ByteStream {
            input: Box::new(input),
            output: Box::new(output),
            closer: Box::new(closer),
        };
        greet(stream, request, watch, &place)
    }

    fn place(&self) -> String {
        self.place.clone()
    }
}

struct ProgramCloser {
    program: Mutex<Piped>,
    clock: Arc<dyn Clock>,
}

impl StreamCloser for ProgramCloser {
    fn close(&self) -> Option<String> {
        /// A program that ends by itself has this long to say why.
        const PATIENCE: Duration = Duration::from_millis(500);
        const INTERVAL: Duration = Duration::from_millis(10);
        let mut program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        let until = self.clock.now() + PATIENCE;
        while self.clock.now() < until {
            if let Ok(Some(end)) = program.try_end() {
                return (!end.is_success()).then(|| end.reason());
            }
            self.clock.sleep(INTERVAL);
        }
        program.kill();
        None
    }
}
