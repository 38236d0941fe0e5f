//! A host that is reached by a command, which is called for each connection: `migrate --connect-command`.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use holdfast_block::{Clock, error_text};
use holdfast_host::StreamTools;
use holdfast_live_copy::ProgramConnector;

use crate::error::{Error, Result};
use crate::far::{FarHost, HostService};
use crate::forwarded_sockets::ForwardedSockets;
use crate::request_link::RequestLink;
use crate::service_link::{ServiceLink as _, ServiceProgram};

const SHELL: &str = "/bin/sh";

/// A host with a `holdfast receive-migration` at the other end of a shell command.
pub struct CommandHost {
    tools: Arc<dyn StreamTools>,
    command: String,
    clock: Arc<dyn Clock>,
    forwarded: ForwardedSockets,
}

impl CommandHost {
    /// The host to which `command` connects its standard input and output, called by a shell of the host of `tools`.
    pub fn new(tools: Arc<dyn StreamTools>, command: String, clock: Arc<dyn Clock>) -> Self {
        Self {
            tools,
            command,
            clock,
            forwarded: ForwardedSockets::default(),
        }
    }

    /// Requests about a machine.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn far(&self) -> Result<FarHost> {
        self.link(&HostService::machine()).map(FarHost::of_link)
    }

    /// Requests about a container.
    ///
    /// # Errors
    /// The command cannot be started.
    pub(crate) fn container_link(&self) -> Result<RequestLink> {
        self.link(&HostService::container())
    }

    /// The receivers of the host.
    ///
    /// # Errors
    /// None is expected.
    pub fn connector(&self) -> Result<ProgramConnector> {
        let line = self.line(&HostService::disk())?;
        let (tools, clock) = (Arc::clone(&self.tools), Arc::clone(&self.clock));
        Ok(ProgramConnector::by_command(tools, self.command.clone(), clock).with_first_line(line))
    }

    /// Forwards connections to the new socket `here` to the socket `there` of the host, as long as this exists.
    ///
    /// # Errors
    /// The new socket cannot be made.
    pub fn forward(&self, here: &Path, there: &Path) -> Result<()> {
        let line = self.line(&HostService::of_socket(there))?;
        let program = self.program();
        let connect = move |stream: UnixStream| {
            if let Err(error) = program.join(&line, stream) {
                log::info!("{}", error_text(&error));
            }
        };
        self.forwarded.listen(here, &self.name(), connect)
    }

    /// Services of the host.
    pub fn program(&self) -> ServiceProgram {
        ServiceProgram {
            tools: Arc::clone(&self.tools),
            name: self.name(),
            program: SHELL,
            arguments: vec!["-c".to_owned(), self.command.clone()],
            clock: Arc::clone(&self.clock),
        }
    }

    fn link(&self, service: &HostService) -> Result<RequestLink> {
        let line = self.line(service)?;
        RequestLink::of_program(self.tools.start(SHELL, &["-c", &self.command]), self.name(), &line)
    }

    fn line(&self, service: &HostService) -> Result<Vec<u8>> {
        service.line().map_err(|error| Error::FarHost {
            host: self.name(),
            reason: error.to_string(),
        })
    }

    /// Its name for people.
    fn name(&self) -> String {
        format!("`{}`", self.command)
    }
}
