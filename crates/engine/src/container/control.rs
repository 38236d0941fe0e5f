//! The requests to the worker of a mounted container, and their answers: a line of JSON each, on a socket that only the
//! owner can open.

#![deny(clippy::indexing_slicing, reason = "the other process may run another version")]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use holdfast_block::Clock;
use serde::{Deserialize, Serialize};

use super::place::ContainerPlace;
use crate::job::error::{ContainerError, ServerFailure};
use crate::job::{Job, Result};

/// The version of the requests.
const VERSION: u32 = 1;
/// Limit of a line.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// How long a worker that was killed may take until its successor listens.
const PATIENCE: Duration = Duration::from_secs(20);
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// A line of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Envelope {
    pub(super) version: u32,
    pub(super) request: ContainerControlRequest,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ContainerControlRequest {
    /// Take a snapshot.
    Snapshot {
        name: Option<String>,
        comment: String,
        created_s: u64,
        properties: BTreeMap<String, String>,
        consistency: Consistency,
    },
    /// Delete snapshots, and merge their layers.
    Delete { names: Vec<String> },
    /// Merge the layers of deleted snapshots.
    Collapse {},
    /// Grow the disk.
    Grow { size_bytes: u64 },
    /// Replace the facts of the container.
    SetProperties { properties: BTreeMap<String, String> },
    /// The traffic since the worker began.
    Status {},
}

/// How the file system is treated when a snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Consistency {
    /// It is frozen, or there is no snapshot.
    Frozen,
    /// It is frozen if it is mounted where the server can see it.
    Automatic,
    /// It is not frozen: the snapshot is the disk as after a power failure.
    Crash,
}

/// A line of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ControlReply {
    /// A merge has advanced.
    Progress { position: u64, size_bytes: u64 },
    /// The request was executed.
    Done(ControlResult),
    /// The request failed.
    Failed { failure: ServerFailure, message: String },
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ControlResult {
    Taken {
        id: String,
        is_frozen: bool,
        paused_us: u64,
        /// Why the file system was not frozen, although that was requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        not_frozen: Option<String>,
        /// Why the file system could not be thawed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        thaw_failure: Option<String>,
    },
    Collapsed {
        merged_count: usize,
        removed_count: usize,
    },
    Grown {},
    Stored {},
    Status {
        read_count: u64,
        read_bytes: u64,
        write_count: u64,
        write_bytes: u64,
        flush_count: u64,
    },
}

/// A connection to the worker of a mounted container.
pub(super) struct ControlClient {
    stream: BufReader<UnixStream>,
    place: ContainerPlace,
}

impl ControlClient {
    /// Connects to the worker. None if no process listens, because the container is not mounted.
    ///
    /// # Errors
    /// The connection is refused for another reason.
    pub(super) fn connect(place: &ContainerPlace) -> Result<Option<Self>> {
        match UnixStream::connect(place.socket()) {
            Ok(stream) => Ok(Some(Self {
                stream: BufReader::new(stream),
                place: place.clone(),
            })),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(None),
            Err(source) => Err(ContainerError::NoAnswer {
                container: place.folder.clone(),
                source,
            }
            .into()),
        }
    }

    /// Connects to the worker of a container that is in use, and waits for a successor of a worker that was killed.
    pub(super) fn connect_to_used(place: &ContainerPlace, clock: &dyn Clock) -> Result<Self> {
        let deadline = clock.now() + PATIENCE;
        loop {
            if let Some(client) = Self::connect(place)? {
                return Ok(client);
            }
            if clock.now() >= deadline {
                return Err(ContainerError::NoAnswer {
                    container: place.folder.clone(),
                    source: ErrorKind::ConnectionRefused.into(),
                }
                .into());
            }
            clock.sleep(RETRY_INTERVAL);
        }
    }

    /// Sends a request, and reports progress until it is executed. If the job is interrupted, the connection is closed,
    /// which stops a merge.
    pub(super) fn call(&mut self, request: ContainerControlRequest, job: Job<'_>) -> Result<ControlResult> {
        let mut reported = 0;
        self.exchange(request, &mut |progress| {
            job.interrupt.check()?;
            if let Some((position, size_bytes)) = progress {
                job.progress.total(size_bytes);
                // A merge of several layers begins again.
                job.progress.advance(position.saturating_sub(reported));
                reported = position;
            }
            Ok(())
        })
    }

    /// Sends a short request.
    pub(super) fn request(&mut self, request: ContainerControlRequest) -> Result<ControlResult> {
        self.exchange(request, &mut |_| Ok(()))
    }

    /// Calls `observe` with each progress, and regularly without one.
    fn exchange(
        &mut self,
        request: ContainerControlRequest,
        observe: &mut dyn FnMut(Option<(u64, u64)>) -> Result<()>,
    ) -> Result<ControlResult> {
        let envelope = Envelope {
            version: VERSION,
            request,
        };
        let no_answer = |source: std::io::Error| ContainerError::NoAnswer {
            container: self.place.folder.clone(),
            source,
        };
        let text = serde_json::to_string(&envelope).expect("strings and numbers are valid JSON");
        let stream = self.stream.get_mut();
        stream.set_read_timeout(Some(RETRY_INTERVAL)).map_err(no_answer)?;
        stream.write_all(format!("{text}\n").as_bytes()).map_err(no_answer)?;
        let mut line = Vec::new();
        loop {
            observe(None)?;
            match (&mut self.stream).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                Ok(0) => return Err(no_answer(ErrorKind::UnexpectedEof.into()).into()),
                Ok(_) if !line.ends_with(b"\n") => return Err(no_answer(ErrorKind::InvalidData.into()).into()),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
                Err(error) => return Err(no_answer(error).into()),
            }
            let reply: ControlReply = serde_json::from_slice(&line).map_err(|_| ContainerError::OtherVersion {
                container: self.place.folder.clone(),
            })?;
            line.clear();
            match reply {
                ControlReply::Progress { position, size_bytes } => observe(Some((position, size_bytes)))?,
                ControlReply::Done(result) => return Ok(result),
                ControlReply::Failed { failure, message } => {
                    return Err(ContainerError::Server { failure, message }.into());
                }
            }
        }
    }
}

/// Parses the line of a client.
pub(super) fn parse_request(line: &[u8]) -> std::result::Result<ContainerControlRequest, String> {
    let envelope: Envelope =
        serde_json::from_slice(line).map_err(|error| format!("the request is not valid: {error}"))?;
    if envelope.version != VERSION {
        return Err(format!(
            "the request has version {}, and this server knows version {VERSION}",
            envelope.version
        ));
    }
    Ok(envelope.request)
}

/// Reads the line of a client; none if it has closed the connection.
pub(super) fn read_request(stream: &UnixStream) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let count = BufReader::new(stream)
        .take(LINE_BYTES_MAX)
        .read_until(b'\n', &mut line)?;
    Ok((count > 0 && line.ends_with(b"\n")).then_some(line))
}

/// Sends a line to a client.
pub(super) fn send_reply(mut stream: &UnixStream, reply: &ControlReply) -> std::io::Result<()> {
    let text = serde_json::to_string(reply).expect("strings and numbers are valid JSON");
    stream.write_all(format!("{text}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::{Consistency, ContainerControlRequest, Envelope, VERSION, parse_request};

    #[test]
    fn requests_are_read_as_they_are_written() {
        let request = ContainerControlRequest::Snapshot {
            name: Some("before".to_owned()),
            comment: String::new(),
            created_s: 7,
            properties: std::collections::BTreeMap::new(),
            consistency: Consistency::Automatic,
        };
        let envelope = Envelope {
            version: VERSION,
            request: request.clone(),
        };
        let text = serde_json::to_vec(&envelope).unwrap();
        assert_eq!(parse_request(&text), Ok(request));
    }

    #[test]
    fn invalid_requests_are_refused() {
        for text in [
            "",
            "{",
            "{}",
            "[]",
            "{\"version\":1,\"request\":{\"burn\":{}}}",
            "\u{0}\n",
        ] {
            assert!(parse_request(text.as_bytes()).is_err(), "{text}");
        }
        let newer = parse_request(b"{\"version\":2,\"request\":{\"status\":{}}}").unwrap_err();
        assert_eq!(newer, "the request has version 2, and this server knows version 1");
    }
}
