//! The host's end of the guest agent's socket, for a QEMU without a management layer.
//!
//! The channel is a serial line without connections: an answer that an earlier client did not wait for is read by the
//! next client. So every request begins with `guest-sync-delimited`. The agent answers it with a byte that no JSON
//! contains and with the number of the request, and everything before is discarded. Source: QEMU's
//! `qga/qapi-schema.json`.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use crate::system::rights::Rights;
use crate::system::waits::Wait;

/// A byte that no JSON text contains. Before a request, it ends an incomplete request; in an answer, it precedes the
/// valid part.
const DELIMITER: u8 = 0xff;
/// Limit on the bytes that are read for one request.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// No process listens, or the connection is lost.
    #[error("cannot use its socket {path}: {source}")]
    Socket {
        /// Path of the socket.
        path: String,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// There is no answer.
    #[error("it did not answer within {} ms: it does not run in the guest, or another client is connected to its socket", .0.as_millis())]
    TimedOut(Duration),
    /// The answer is too long.
    #[error("its answer has more than {ANSWER_BYTES_MAX} bytes")]
    TooLong,
}

/// The socket of an agent. QEMU reported its path, so it is opened with the rights of QEMU's user.
pub(crate) struct AgentSocket<'a> {
    pub(crate) path: &'a Path,
    pub(crate) rights: &'a Rights,
}

/// Sends a request to the agent, and returns the line of the answer.
///
/// `number` must be unique among the clients. The whole exchange takes no longer than `deadline`.
pub(crate) fn ask(
    agent: &AgentSocket<'_>,
    command: &str,
    number: u32,
    deadline: Duration,
    clock: &dyn Clock,
) -> Result<String, AgentError> {
    let &AgentSocket { path, rights } = agent;
    let failed = |source: std::io::Error| AgentError::Socket {
        path: path.display().to_string(),
        source,
    };
    let _wait = Wait::for_work("the guest agent");
    let connected = rights.exercise(|| UnixStream::connect(path));
    let stream = connected.and_then(|connected| connected).map_err(failed)?;
    stream.set_write_timeout(Some(deadline)).map_err(failed)?;
    let mut line = AgentConnection {
        stream,
        path,
        deadline,
        until: clock.now() + deadline,
        clock,
        pending: Vec::new(),
        read_bytes: 0,
    };
    let sync = json!({ "execute": "guest-sync-delimited", "arguments": { "id": number } });
    let mut message = vec![DELIMITER];
    message.extend(format!("{sync}\n").into_bytes());
    line.send(&message)?;
    // An earlier client may have synchronized and disconnected. Its answer then precedes that of this request.
    loop {
        line.read_to(DELIMITER)?;
        let answer = line.read_to(b'\n')?;
        let value: Value = serde_json::from_slice(&answer).unwrap_or_default();
        if value.get("return").and_then(Value::as_u64) == Some(number.into()) {
            break;
        }
    }
    line.send(format!("{command}\n").as_bytes())?;
    let answer = line.read_to(b'\n')?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// The connection for one request.
struct AgentConnection<'a> {
    stream: UnixStream,
    path: &'a Path,
    deadline: Duration,
    until: Duration,
    clock: &'a dyn Clock,
    /// Bytes that were read and not yet used.
    pending: Vec<u8>,
    read_bytes: usize,
}

impl AgentConnection<'_> {
    fn failed(&self, source: std::io::Error) -> AgentError {
        match source.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => AgentError::TimedOut(self.deadline),
            _ => AgentError::Socket {
                path: self.path.display().to_string(),
                source,
            },
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        self.stream.write_all(bytes).map_err(|error| self.failed(error))
    }

    /// Returns the bytes before `end`, and consumes `end`.
    fn read_to(&mut self, end: u8) -> Result<Vec<u8>, AgentError> {
        let mut searched = 0;
        loop {
            let found = self.pending[searched..].iter().position(|byte| *byte == end);
            if let Some(place) = found {
                let mut received: Vec<u8> = self.pending.drain(..=searched + place).collect();
                received.pop();
                return Ok(received);
            }
            searched = self.pending.len();
            let left = self.until.saturating_sub(self.clock.now());
            if left.is_zero() {
                return Err(AgentError::TimedOut(self.deadline));
            }
            let mut buffer = [0; 4096];
            let timed = self.stream.set_read_timeout(Some(left));
            let count = timed.and_then(|()| self.stream.read(&mut buffer));
            let count = match count {
                Ok(0) => return Err(self.failed(std::io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.failed(error)),
            };
            self.pending.extend_from_slice(&buffer[..count]);
            self.read_bytes += count;
            if self.read_bytes > ANSWER_BYTES_MAX {
                return Err(AgentError::TooLong);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use holdfast_block::{Clock as _, SystemClock};
    use serde_json::{Value, json};

    use super::{AgentError, AgentSocket, ask};
    use crate::system::rights::Rights;

    const SECOND: Duration = Duration::from_secs(1);

    fn own(path: &Path) -> AgentSocket<'_> {
        AgentSocket {
            path,
            rights: &Rights::Own,
        }
    }

    /// An agent that sends `greeting` to a new client, answers one sync, and answers the request with `answer`.
    fn agent(folder: &tempfile::TempDir, greeting: &'static [u8], answer: &'static [u8]) -> PathBuf {
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting).unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = Vec::new();
            reader.read_until(b'\n', &mut line).unwrap();
            assert_eq!(line.remove(0), 0xff);
            let message: Value = serde_json::from_slice(&line).unwrap();
            assert_eq!(message["execute"], "guest-sync-delimited");
            let sync = json!({ "return": message["arguments"]["id"] });
            stream.write_all(&[0xff]).unwrap();
            stream.write_all(format!("{sync}\n").as_bytes()).unwrap();
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            stream.write_all(answer).unwrap();
            // Reads until the other end closes.
            reader.read_line(&mut line).ok();
        });
        path
    }

    #[test]
    fn answers_to_other_clients_are_discarded() {
        let folder = tempfile::tempdir().unwrap();
        let stale = b"{\"return\": 99}\n{\"retu\xff{\"return\": 4}\n{\"error\": {}}\n";
        let path = agent(&folder, stale, b"{\"return\": 2}\n");
        let answer = ask(
            &own(&path),
            "{\"execute\":\"guest-fsfreeze-freeze\"}",
            5,
            SECOND,
            &SystemClock::new(),
        );
        assert_eq!(answer.unwrap(), "{\"return\": 2}");
    }

    #[test]
    fn slow_and_silent_agents_time_out() {
        let clock = SystemClock::new();
        let folder = tempfile::tempdir().unwrap();
        let path = agent(&folder, b"", b"{\"retu");
        let start = clock.now();
        let answer = ask(&own(&path), "{}", 5, SECOND / 4, &clock);
        assert!(matches!(answer, Err(AgentError::TimedOut(_))), "{answer:?}");
        assert!(clock.now().saturating_sub(start) < 5 * SECOND);
        // A socket that listens but does not accept, as if QEMU had another client.
        let queue = folder.path().join("queue");
        let _listener = UnixListener::bind(&queue).unwrap();
        let answer = ask(&own(&queue), "{}", 5, SECOND / 4, &clock);
        assert!(matches!(answer, Err(AgentError::TimedOut(_))), "{answer:?}");
    }

    #[test]
    fn a_flood_of_answers_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(&[b'x'; 4096]).is_ok() {}
        });
        let answer = ask(&own(&path), "{}", 5, 60 * SECOND, &SystemClock::new());
        assert!(matches!(answer, Err(AgentError::TooLong)), "{answer:?}");
    }
}
