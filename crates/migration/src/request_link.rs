//! Requests to a process of the other host, and its answers: a line of JSON each.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use holdfast_host::{Piped, StreamTools, ToolError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Limit of a line. A configuration has some ten thousand bytes.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// A `holdfast` of the other host that answers requests.
pub(crate) struct RequestLink {
    host: String,
    process: Mutex<LinkedProcess>,
}

struct LinkedProcess {
    /// None if it is reached by a socket.
    program: Option<Piped>,
    input: Box<dyn Write + Send>,
    output: BufReader<Box<dyn Read + Send>>,
}

impl RequestLink {
    /// Starts it by `tools` with these arguments.
    pub(crate) fn start(tools: &dyn StreamTools, arguments: &[&str]) -> Result<Self> {
        let host = tools.host().unwrap_or("this host").to_owned();
        Self::of_program(tools.start("holdfast", arguments), host, &[])
    }

    /// A process of `host` that `started` reaches, after it got the bytes `first`.
    pub(crate) fn of_program(
        started: std::result::Result<Piped, ToolError>,
        host: String,
        first: &[u8],
    ) -> Result<Self> {
        let no_answer = |reason: String| Error::FarHost {
            host: host.clone(),
            reason,
        };
        let mut program = started.map_err(|error| no_answer(error.to_string()))?;
        let ends = program.take_input().zip(program.take_output());
        let (mut input, output) = ends.ok_or_else(|| no_answer("it has no pipes".to_owned()))?;
        // If the program has ended, the first request says why.
        input.write_all(first).ok();
        Ok(Self {
            process: Mutex::new(LinkedProcess {
                program: Some(program),
                input: Box::new(input),
                output: BufReader::new(Box::new(output)),
            }),
            host,
        })
    }

    /// A process of `host` that answers at the other end of a socket.
    pub(crate) fn of_socket(socket: UnixStream, host: String) -> std::io::Result<Self> {
        Ok(Self {
            process: Mutex::new(LinkedProcess {
                program: None,
                input: Box::new(socket.try_clone()?),
                output: BufReader::new(Box::new(socket)),
            }),
            host,
        })
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// # Errors
    /// The host does not answer.
    pub(crate) fn ask<Q: Serialize, A: DeserializeOwned>(&self, request: &Q) -> Result<A> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        process.exchange(request).map_err(|error| {
            let program = process.program.as_mut();
            let reason = program.and_then(|program| program.try_end().ok().flatten());
            Error::FarHost {
                host: self.host.clone(),
                reason: reason.map_or_else(|| error.to_string(), |end| end.reason()),
            }
        })
    }

    /// An answer does not belong to its request.
    pub(crate) fn other_version(&self) -> Error {
        Error::FarHost {
            host: self.host.clone(),
            reason: "the answer is not from a holdfast of about the same version".to_owned(),
        }
    }
}

impl LinkedProcess {
    fn exchange<Q: Serialize, A: DeserializeOwned>(&mut self, request: &Q) -> std::io::Result<A> {
        write_line(&mut self.input, request)?;
        let mut answer = Vec::new();
        (&mut self.output).take(LINE_BYTES_MAX).read_until(b'\n', &mut answer)?;
        if !answer.ends_with(b"\n") {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&answer)?)
    }
}

fn write_line(output: &mut impl Write, value: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

/// Answers requests until `input` ends.
///
/// # Errors
/// A line is not a request, or an answer cannot be sent.
pub(crate) fn serve_requests<Q: DeserializeOwned, A: Serialize>(
    input: impl Read,
    mut output: impl Write,
    mut answer: impl FnMut(Q) -> A,
) -> std::io::Result<()> {
    let mut input = BufReader::new(input);
    loop {
        let mut line = Vec::new();
        (&mut input).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        write_line(&mut output, &answer(serde_json::from_slice(&line)?))?;
    }
}

/// Every line is a `T`, and is written as it was read.
#[cfg(test)]
pub(crate) fn assert_lines_unchanged<T: Serialize + DeserializeOwned>(lines: &str) {
    for line in lines.lines() {
        let value: T = serde_json::from_str(line).unwrap();
        assert_eq!(serde_json::to_string(&value).unwrap(), line);
    }
}
