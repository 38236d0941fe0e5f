//! HTTP requests and answers, with or without TLS.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use rustls::{ServerConnection, StreamOwned};

/// Maximum length of a line of a request.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of headers of a request.
const HEADER_COUNT_MAX: usize = 100;
/// Maximum length of the body of a call.
const CALL_BYTES_MAX: u64 = 8 << 20;

/// The connection of a client.
pub(crate) struct Connection {
    stream: BufReader<StreamOwned<ServerConnection, TcpStream>>,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// The target as sent, with the query.
    pub(crate) target: String,
    pub(crate) path: String,
    query: Vec<(String, String)>,
    headers: Vec<(String, String)>,
}

impl Connection {
    pub(crate) fn new(tls: ServerConnection, socket: TcpStream) -> Self {
        let stream = BufReader::with_capacity(64 << 10, StreamOwned::new(tls, socket));
        Self { stream }
    }

    /// Receives a request without its body; `None` if the client has closed the connection.
    pub(crate) fn receive(&mut self) -> io::Result<Option<Request>> {
        let Some(line) = self.line()? else { return Ok(None) };
        let mut request = Request::from_line(&line).ok_or_else(|| io::Error::other("no request"))?;
        for _ in 0..HEADER_COUNT_MAX {
            let line = self.line()?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let Some((name, value)) = line.split_once(':') else {
                return Ok(line.is_empty().then_some(request));
            };
            let header = (name.trim().to_lowercase(), value.trim().to_owned());
            request.headers.push(header);
        }
        Err(io::Error::other("too many headers"))
    }

    fn line(&mut self) -> io::Result<Option<String>> {
        let mut line = Vec::new();
        let read = (&mut self.stream).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        match read {
            Ok(0) => return Ok(None),
            // Many clients close the connection without a TLS close message.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && line.is_empty() => return Ok(None),
            other => other?,
        };
        if line.last() != Some(&b'\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = String::from_utf8(line).map_err(io::Error::other)?;
        Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
    }

    /// Receives the body of a call; `None` if its length is missing.
    pub(crate) fn call_body(&mut self, request: &Request) -> io::Result<Option<Vec<u8>>> {
        let Some(length) = request.content_length() else {
            return Ok(None);
        };
        if length > CALL_BYTES_MAX {
            return Err(io::Error::other("the call is too long"));
        }
        let mut body = Vec::new();
        (&mut self.stream).take(length).read_to_end(&mut body)?;
        Ok(Some(body))
    }

    /// Sends the status line and headers, one per line, and the empty line after them.
    pub(crate) fn send_head(&mut self, lines: &[String]) -> io::Result<()> {
        let head = lines.join("\r\n") + "\r\n\r\n";
        self.write_all(head.as_bytes())?;
        self.flush()
    }

    /// Sends an answer with a body of known length.
    pub(crate) fn send(&mut self, status: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        let mut lines = vec![format!("HTTP/1.1 {status}"), format!("content-length: {}", body.len())];
        lines.extend(headers.iter().map(|(name, value)| format!("{name}: {value}")));
        self.write_all((lines.join("\r\n") + "\r\n\r\n").as_bytes())?;
        self.write_all(body)?;
        self.flush()
    }

    /// Sends an error page in the form of xapi's web server.
    pub(crate) fn send_error(&mut self, status: u16, extra: &str) -> io::Result<()> {
        let words = match status {
            400 => "Bad Request",
            401 => "Unauthorised",
            403 => "Forbidden",
            404 => "Not Found",
            501 => "Method not implemented",
            503 => "Service Unavailable",
            _ => "Internal Error",
        };
        let body = format!(
            "<html><body><h1>HTTP {status} {}</h1>{extra}</body></html>",
            words.to_lowercase()
        );
        let mut headers = vec![
            ("content-type", "text/html"),
            ("connection", "close"),
            ("cache-control", "no-cache, no-store"),
        ];
        if status == 401 {
            headers.push(("WWW-Authenticate", "Basic realm=\"xapi\""));
        }
        self.send(&format!("{status} {words}"), &headers, body.as_bytes())
    }

    /// Closes the connection cleanly: sends a TLS close message, and does not wait for further input.
    pub(crate) fn say_goodbye(&mut self) {
        let stream = self.stream.get_mut();
        stream.conn.send_close_notify();
        // A client that has disconnected needs no close message.
        drop(stream.flush());
        drop(stream.sock.shutdown(std::net::Shutdown::Both));
    }

    /// Closes the connection abruptly.
    pub(crate) fn cut(&mut self) {
        drop(self.stream.get_mut().sock.shutdown(std::net::Shutdown::Both));
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.get_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.get_mut().flush()
    }
}

impl Request {
    fn from_line(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        if !version.starts_with("HTTP/1.") {
            return None;
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        Some(Self {
            method: method.to_owned(),
            target: target.to_owned(),
            path: path.to_owned(),
            query: pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(name, value)| (decode(name), decode(value)))
                .collect(),
            headers: Vec::new(),
        })
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The value of `name` in the query.
    pub(crate) fn query(&self, name: &str) -> Option<&str> {
        let found = self.query.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The value of `name` in a cookie or in the query.
    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        self.cookie(name).or_else(|| self.query(name))
    }

    fn cookie(&self, name: &str) -> Option<&str> {
        let cookies = self.header("cookie")?;
        cookies.split([';', ',']).find_map(|pair| {
            let (known, value) = pair.trim().split_once('=')?;
            (known == name).then_some(value)
        })
    }

    /// Whether `name` is true in the query.
    pub(crate) fn flag(&self, name: &str) -> bool {
        self.query(name) == Some("true")
    }

    pub(crate) fn content_length(&self) -> Option<u64> {
        self.header("content-length")?.parse().ok()
    }

    /// Whether the client may send another request on this connection.
    pub(crate) fn keeps_alive(&self) -> bool {
        self.header("connection")
            .is_none_or(|value| !value.eq_ignore_ascii_case("close"))
    }
}

/// Decodes percent-encoding; `+` is a space in a query.
fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = hex.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (first, byte) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            (b'+', _) => {
                bytes.push(b' ');
                rest = tail;
            }
            (byte, _) => {
                bytes.push(*byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::{Request, decode};

    #[test]
    fn a_target_has_a_path_and_a_query() {
        let mut request = Request::from_line("GET /export?ref=OpaqueRef%3Aa&use_compression=true HTTP/1.1").unwrap();
        assert_eq!(request.path, "/export");
        assert_eq!(request.query("ref"), Some("OpaqueRef:a"));
        assert!(request.flag("use_compression"));
        request
            .headers
            .push(("cookie".to_owned(), "session_id=OpaqueRef:s; task_id=t".to_owned()));
        assert_eq!(request.parameter("session_id"), Some("OpaqueRef:s"));
        assert_eq!(request.parameter("task_id"), Some("t"));
        assert!(Request::from_line("nonsense").is_none());
    }

    #[test]
    fn invalid_escapes_are_kept() {
        assert_eq!(decode("a%20b+c%zz%4"), "a b c%zz%4");
    }
}
