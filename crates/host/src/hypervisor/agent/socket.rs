//! The host's end of the guest agent's socket, for a QEMU without a management layer.
//!
//! The channel is a serial line that knows nothing of clients: what an earlier one asked and did not wait for is answered to the
//! next. So every question begins with `guest-sync-delimited`: the agent answers it with a byte that no JSON has, and with our own
//! number, and whatever came before is not for us. Source: QEMU's `qga/qapi-schema.json`.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use crate::system::rights::Rights;
use crate::system::waits::Wait;

/// No JSON text has this byte: before a question it ends what is half said, and in an answer it stands before what counts.
const DELIMITER: u8 = 0xff;
/// Bytes of all that is read for one question, at most.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// No process listens, or the connection broke.
    #[error("its socket {path}: {source}")]
    Socket {
        /// Where it is.
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

/// Where an agent's socket is. QEMU has named it, so it is reached with the rights of QEMU's user.
pub(crate) struct AgentSocket<'a> {
    pub(crate) path: &'a Path,
    pub(crate) rights: &'a Rights,
}

/// Asks the agent at a socket, and gives the line that it answers.
///
/// `number` is a number that nobody else synchronizes with. All in all it takes no longer than `deadline`.
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
    let mut question = vec![DELIMITER];
    question.extend(format!("{sync}\n").into_bytes());
    line.say(&question)?;
    // An earlier client may have synchronized and gone: its answer is before ours.
    loop {
        line.hear_until(DELIMITER)?;
        let answer = line.hear_until(b'\n')?;
        let value: Value = serde_json::from_slice(&answer).unwrap_or_default();
        if value.get("return").and_then(Value::as_u64) == Some(number.into()) {
            break;
        }
    }
    line.say(format!("{command}\n").as_bytes())?;
    let answer = line.hear_until(b'\n')?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// The channel, for one question.
struct AgentConnection<'a> {
    stream: UnixStream,
    path: &'a Path,
    deadline: Duration,
    until: Duration,
    clock: &'a dyn Clock,
    /// What was read and not yet used.
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

    fn say(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        self.stream.write_all(bytes).map_err(|error| self.failed(error))
    }

    /// What comes before `end`, which is taken away with it.
    fn hear_until(&mut self, end: u8) -> Result<Vec<u8>, AgentError> {
        loop {
            if let Some(place) = self.pending.iter().position(|byte| *byte == end) {
                let mut heard: Vec<u8> = self.pending.drain(..=place).collect();
                heard.pop();
                return Ok(heard);
            }
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

    /// An agent that says `greeting` when somebody comes, and answers one sync; `answer` is what it says to the question.
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
            let question: Value = serde_json::from_slice(&line).unwrap();
            assert_eq!(question["execute"], "guest-sync-delimited");
            let sync = json!({ "return": question["arguments"]["id"] });
            stream.write_all(&[0xff]).unwrap();
            stream.write_all(format!("{sync}\n").as_bytes()).unwrap();
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            stream.write_all(answer).unwrap();
            // Until the other end hangs up.
            reader.read_line(&mut line).ok();
        });
        path
    }

    #[test]
    fn what_was_not_for_us_is_thrown_away() {
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
    fn an_agent_that_drips_and_one_that_is_silent_meet_the_deadline() {
        let clock = SystemClock::new();
        let folder = tempfile::tempdir().unwrap();
        let path = agent(&folder, b"", b"{\"retu");
        let start = clock.now();
        let answer = ask(&own(&path), "{}", 5, SECOND / 4, &clock);
        assert!(matches!(answer, Err(AgentError::TimedOut(_))), "{answer:?}");
        assert!(clock.now().saturating_sub(start) < 5 * SECOND);
        // Somebody listens, and does not take us: QEMU has another client.
        let queue = folder.path().join("queue");
        let _listener = UnixListener::bind(&queue).unwrap();
        let answer = ask(&own(&queue), "{}", 5, SECOND / 4, &clock);
        assert!(matches!(answer, Err(AgentError::TimedOut(_))), "{answer:?}");
    }

    #[test]
    fn a_flood_is_stopped() {
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
