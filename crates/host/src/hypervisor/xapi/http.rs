//! The part of HTTP that XAPI needs, over TLS: one request per connection.
//!
//! XAPI has peculiarities that general HTTP clients do not support. It answers an upload before it reads the body, so
//! the client must wait for the answer before it sends the first byte. A download may have no length, and then ends
//! with the connection.
//!
//! Bounds: [`HEAD_BYTES_MAX`] for the header block of an answer, [`HEADER_COUNT_MAX`] headers.

use std::io;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::address::host_and_port;
use super::retry::{RetryContext, TICK};
use super::trust::unknown_certificate;
use super::{XapiError, XapiResult};

const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADER_COUNT_MAX: usize = 100;
/// Limit on the interim answers (1xx) before the final one.
const INTERIM_COUNT_MAX: u32 = 16;
/// Timeout of a connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// A connection to a host.
pub(super) struct Connection {
    tls: StreamOwned<ClientConnection, TcpStream>,
    host: String,
    retry_context: RetryContext,
    /// Bytes that were read after the header block.
    ahead: Vec<u8>,
}

/// Status line and headers of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResponseHead {
    pub(super) status: u16,
    pub(super) reason: String,
    headers: Vec<(String, String)>,
}

impl ResponseHead {
    /// A header's value, by its name in lower case.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let mut headers = [httparse::EMPTY_HEADER; HEADER_COUNT_MAX];
        let mut answer = httparse::Response::new(&mut headers);
        let length = match answer.parse(bytes).map_err(|error| error.to_string())? {
            httparse::Status::Complete(length) => length,
            httparse::Status::Partial => return Ok(None),
        };
        let header = |header: &httparse::Header<'_>| {
            (
                header.name.to_owned(),
                String::from_utf8_lossy(header.value).into_owned(),
            )
        };
        let head = Self {
            status: answer.code.unwrap_or_default(),
            reason: answer.reason.unwrap_or_default().to_owned(),
            headers: answer.headers.iter().map(header).collect(),
        };
        Ok(Some((head, length)))
    }

    /// How the end of the body is found.
    fn framing(&self) -> Result<Framing, String> {
        if let Some(encoding) = self.header("transfer-encoding") {
            return if encoding.eq_ignore_ascii_case("chunked") {
                Ok(Framing::Chunked {
                    left: 0,
                    is_first: true,
                })
            } else {
                Err(format!("unsupported transfer encoding {encoding:?}"))
            };
        }
        match self.header("content-length") {
            None => Ok(Framing::UntilClosed),
            Some(length) => match length.trim().parse() {
                Ok(left) => Ok(Framing::Length { left }),
                Err(_) => Err(format!("invalid content length {length:?}")),
            },
        }
    }
}

/// How the end of a body is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    Length { left: u64 },
    Chunked { left: u64, is_first: bool },
    UntilClosed,
    Over,
}

impl Connection {
    /// Connects, and checks the certificate.
    pub(super) fn open(
        host: &str,
        port: u16,
        config: &Arc<ClientConfig>,
        retry_context: &RetryContext,
    ) -> XapiResult<Self> {
        let shown = host_and_port(host, port);
        let failed = |source| XapiError::Connect {
            host: shown.clone(),
            source,
        };
        let socket = connect(host, port, &*retry_context.is_stopped).map_err(|error| stopped_or(error, failed))?;
        socket.set_nodelay(true).map_err(failed)?;
        socket.set_read_timeout(Some(TICK)).map_err(failed)?;
        socket.set_write_timeout(Some(TICK)).map_err(failed)?;
        let name = ServerName::try_from(host.to_owned()).map_err(|error| failed(io::Error::other(error)))?;
        let session =
            ClientConnection::new(Arc::clone(config), name).map_err(|error| failed(io::Error::other(error)))?;
        let mut connection = Self {
            tls: StreamOwned::new(session, socket),
            host: shown.clone(),
            retry_context: retry_context.clone(),
            ahead: Vec::new(),
        };
        while connection.tls.conn.is_handshaking() {
            let step = connection.until_progress(|tls| tls.conn.complete_io(&mut tls.sock));
            step.map_err(|error| match unknown_certificate(&error) {
                Some((fingerprint, reason)) => XapiError::Untrusted {
                    host: shown.clone(),
                    fingerprint,
                    reason,
                },
                None => stopped_or(error, failed),
            })?;
        }
        Ok(connection)
    }

    /// Repeats an I/O operation until it makes progress, the timeout expires, or a stop is requested.
    fn until_progress<T>(
        &mut self,
        mut step: impl FnMut(&mut StreamOwned<ClientConnection, TcpStream>) -> io::Result<T>,
    ) -> io::Result<T> {
        let start = self.retry_context.clock.now();
        loop {
            match step(&mut self.tls) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    let waited = self.retry_context.clock.now().saturating_sub(start);
                    if waited >= self.retry_context.idle_timeout {
                        let seconds = waited.as_secs();
                        let detail = format!("no data for {seconds} s");
                        return Err(io::Error::new(io::ErrorKind::TimedOut, detail));
                    }
                }
                other => return other,
            }
            if (self.retry_context.is_stopped)() {
                return Err(io::Error::other(StopRequested));
            }
        }
    }

    fn broken(&self, action: &'static str) -> impl Fn(io::Error) -> XapiError + use<> {
        let host = self.host.clone();
        move |source| {
            let host = host.clone();
            stopped_or(source, |source| XapiError::Broken { action, host, source })
        }
    }

    /// Sends the request line and the headers; `headers` are whole lines without line ends.
    pub(super) fn ask(&mut self, method: &str, target: &str, headers: &[String]) -> XapiResult<()> {
        let mut text = format!(
            "{method} {target} HTTP/1.1\r\nHost: {}\r\nUser-Agent: holdfast\r\n",
            self.host
        );
        for header in headers {
            text.push_str(header);
            text.push_str("\r\n");
        }
        text.push_str("Connection: close\r\n\r\n");
        self.send(text.as_bytes())
    }

    /// Sends bytes of a body.
    pub(super) fn send(&mut self, bytes: &[u8]) -> XapiResult<()> {
        self.write_all(bytes).map_err(self.broken("write to"))
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = self.until_progress(|tls| tls.write(bytes))?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[sent..];
        }
        self.until_progress(Write::flush)
    }

    /// Closes the sending direction of TLS.
    pub(super) fn end_sending(&mut self) -> XapiResult<()> {
        self.tls.conn.send_close_notify();
        let flushed = self.until_progress(Write::flush);
        flushed.map_err(self.broken("write to"))
    }

    /// Reads status line and headers of the answer; `request` is for errors.
    pub(super) fn head(&mut self, request: &str) -> XapiResult<ResponseHead> {
        let mut interim_count = 0;
        loop {
            let parsed = ResponseHead::parse(&self.ahead).map_err(|detail| self.invalid_answer(request, detail))?;
            if let Some((head, length)) = parsed {
                self.ahead.drain(..length);
                // An interim answer.
                if (100..200).contains(&head.status) {
                    interim_count += 1;
                    if interim_count > INTERIM_COUNT_MAX {
                        return Err(self.invalid_answer(request, "too many interim answers".to_owned()));
                    }
                    continue;
                }
                return Ok(head);
            }
            if self.ahead.len() >= HEAD_BYTES_MAX {
                return Err(self.invalid_answer(request, format!("its headers have more than {HEAD_BYTES_MAX} bytes")));
            }
            let mut bytes = [0; 4096];
            let count = self
                .until_progress(|tls| tls.read(&mut bytes))
                .map_err(self.broken("read from"))?;
            if count == 0 {
                return Err(self.broken("read from")(io::ErrorKind::UnexpectedEof.into()));
            }
            self.ahead.extend_from_slice(&bytes[..count]);
        }
    }

    fn invalid_answer(&self, request: &str, detail: String) -> XapiError {
        XapiError::Answer {
            host: self.host.clone(),
            request: request.to_owned(),
            detail,
        }
    }

    /// The body that follows the headers.
    pub(super) fn body(self, head: &ResponseHead, request: &str) -> XapiResult<Body> {
        let framing = head.framing().map_err(|detail| self.invalid_answer(request, detail))?;
        Ok(Body {
            connection: self,
            framing,
        })
    }

    /// Reads the next bytes. Returns 0 if the host has closed the connection, with or without a close_notify.
    fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.ahead.is_empty() {
            let count = self.ahead.len().min(buffer.len());
            buffer[..count].copy_from_slice(&self.ahead[..count]);
            self.ahead.drain(..count);
            return Ok(count);
        }
        match self.until_progress(|tls| tls.read(buffer)) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            other => other,
        }
    }

    /// Reads one line of at most 1 KiB, without its line end.
    fn read_line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        let mut byte = [0];
        while line.len() < 1024 {
            if self.read_some(&mut byte)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if byte == *b"\n" {
                let text = String::from_utf8_lossy(&line);
                return Ok(text.trim_end_matches('\r').to_owned());
            }
            line.push(byte[0]);
        }
        Err(io::Error::other("a line is too long"))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The host may have closed the connection before.
        drop(self.tls.sock.shutdown(Shutdown::Both));
    }
}

/// The body of an answer.
pub(super) struct Body {
    connection: Connection,
    framing: Framing,
}

impl Body {
    /// Reads all of it, as text of at most `bytes_max` bytes.
    pub(super) fn text(mut self, request: &str, bytes_max: u64) -> XapiResult<String> {
        let failed = self.connection.broken("read from");
        let mut bytes = Vec::new();
        let read = (&mut self).take(bytes_max + 1).read_to_end(&mut bytes);
        read.map_err(failed)?;
        if bytes.len() as u64 > bytes_max {
            let detail = format!("it has more than {bytes_max} bytes");
            return Err(self.connection.invalid_answer(request, detail));
        }
        String::from_utf8(bytes).map_err(|_| self.connection.invalid_answer(request, "it is not UTF-8".to_owned()))
    }

    /// The size of the next chunk; 0 for the last.
    fn next_chunk(&mut self, is_first: bool) -> io::Result<u64> {
        if !is_first && !self.connection.read_line()?.is_empty() {
            return Err(io::Error::other("a chunk is longer than its header says"));
        }
        let line = self.connection.read_line()?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        u64::from_str_radix(digits, 16).map_err(|_| io::Error::other("the size of a chunk is not a number"))
    }
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if let Framing::Chunked { left: 0, is_first } = self.framing {
            self.framing = match self.next_chunk(is_first)? {
                0 => Framing::Over,
                left => Framing::Chunked { left, is_first: false },
            };
        }
        let (Framing::Length { left } | Framing::Chunked { left, .. }) = &mut self.framing else {
            return match self.framing {
                Framing::UntilClosed => self.connection.read_some(buffer),
                _ => Ok(0),
            };
        };
        let wanted = buffer.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        let count = self.connection.read_some(&mut buffer[..wanted])?;
        if count == 0 {
            let left = *left;
            let detail = format!("the connection was closed {left} bytes before the end");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, detail));
        }
        *left -= count as u64;
        Ok(count)
    }
}

/// A stop was requested.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct StopRequested;

fn stopped_or(error: io::Error, other: impl FnOnce(io::Error) -> XapiError) -> XapiError {
    if error
        .get_ref()
        .is_some_and(<dyn std::error::Error + Send + Sync>::is::<StopRequested>)
    {
        XapiError::Interrupted
    } else {
        other(error)
    }
}

/// Connects to a host. A requested stop is handled even if the host does not answer.
pub(super) fn connect(host: &str, port: u16, is_stopped: &dyn Fn() -> bool) -> io::Result<TcpStream> {
    let (sender, receiver) = mpsc::channel();
    let place = host.to_owned();
    // The thread ends by itself, even after the receiver has been dropped.
    std::thread::spawn(move || sender.send(connect_to_any(&place, port)));
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(connected) => return connected,
            Err(_) if is_stopped() => return Err(io::Error::other(StopRequested)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

fn connect_to_any(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut failure = None;
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(socket) => return Ok(socket),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the host has no address")))
}

/// Percent-encodes a text for a query.
pub(super) fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let digits = [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789ABCDEF"[usize::from(digit)]));
            encoded.push('%');
            encoded.extend(digits);
        }
    }
    encoded
}
