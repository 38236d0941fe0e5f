//! Connections to services of another host.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::StreamTools;

use crate::error::{Error, Result};
use crate::streams::join_program;

/// Words after which the program serves one connection: `holdfast receive-migration 1`.
pub const RECEIVE_MIGRATION_COMMAND: [&str; 2] = ["receive-migration", "1"];

/// How long a program whose output has ended may take to say why.
const END_PATIENCE: Duration = Duration::from_millis(500);
const END_INTERVAL: Duration = Duration::from_millis(10);

/// Reaches services of another host.
pub trait ServiceLink: Send + Sync {
    /// Opens a connection that begins with `line`, and joins it with `stream` until both have ended.
    ///
    /// # Errors
    /// The host cannot be reached.
    fn join(&self, line: &[u8], stream: UnixStream) -> Result<()>;
}

/// A program that connects its standard input and output to a `holdfast receive-migration`.
pub struct ServiceProgram {
    pub(crate) tools: Arc<dyn StreamTools>,
    /// The host, for people.
    pub(crate) name: String,
    pub(crate) program: &'static str,
    pub(crate) arguments: Vec<String>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl ServiceProgram {
    /// The `holdfast` of the host of `tools`. `uri` is the address of its hypervisor.
    pub fn of_host(tools: Arc<dyn StreamTools>, uri: &str, clock: Arc<dyn Clock>) -> Self {
        let [verb, version] = RECEIVE_MIGRATION_COMMAND;
        Self {
            name: tools.host().unwrap_or("this host").to_owned(),
            tools,
            program: "holdfast",
            arguments: [verb, version, "--connect", uri].map(str::to_owned).into(),
            clock,
        }
    }
}

impl ServiceLink for ServiceProgram {
    fn join(&self, line: &[u8], stream: UnixStream) -> Result<()> {
        let failed = |reason: String| Error::FarHost {
            host: self.name.clone(),
            reason,
        };
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let mut program = self
            .tools
            .start(self.program, &arguments)
            .map_err(|error| failed(error.to_string()))?;
        // If the program has ended, its end says why.
        program.write_input(line).ok();
        join_program(&stream, &mut program);
        let until = self.clock.now() + END_PATIENCE;
        while self.clock.now() < until {
            match program.try_end() {
                Ok(Some(end)) if end.is_success() => return Ok(()),
                Ok(Some(end)) => return Err(failed(end.reason())),
                Ok(None) => self.clock.sleep(END_INTERVAL),
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        Ok(())
    }
}
