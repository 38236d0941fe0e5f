//! `holdfast serve list`, `add`, `remove` and `stop`: other commands' access to running servers.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_engine::{ControlAnswer, ControlRequest, ServerStatus, ask_server, control_sockets};

use super::document::{ExportsAdded, ExportsRemoved, RemovedDocument, ServerDocument, ServerStopped, ServersListed};
use super::sources::SourceArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;

/// Time between the two samples of rates.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Which server.
#[derive(Debug, clap::Args)]
struct ServerArgs {
    /// Process number of the server, or path of its control socket [default: the only server]
    #[arg(long, value_name = "PID|SOCKET")]
    server: Option<String>,
}

/// Arguments of `serve list`.
#[derive(Debug, clap::Args)]
pub(super) struct ListServersArgs {
    #[command(flatten)]
    server: ServerArgs,
}

/// Arguments of `serve add`.
#[derive(Debug, clap::Args)]
pub(super) struct AddExportsArgs {
    /// Snapshots of the server's repository, and images
    #[arg(value_name = "SNAPSHOT[:DISK]|IMAGE", required = true)]
    exports: Vec<String>,
    #[command(flatten)]
    sources: SourceArgs,
    #[command(flatten)]
    server: ServerArgs,
}

/// Arguments of `serve remove`.
#[derive(Debug, clap::Args)]
pub(super) struct RemoveExportsArgs {
    /// Names of exports
    #[arg(value_name = "EXPORT", required = true)]
    exports: Vec<String>,
    /// Disconnect clients, after their requests in progress were answered
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Arguments of `serve stop`.
#[derive(Debug, clap::Args)]
pub(super) struct StopServerArgs {
    #[command(flatten)]
    server: ServerArgs,
}

const NEITHER: &[SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

impl Verb for ListServersArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See which disks are served, and who uses them",
        line: "holdfast serve list",
    }];
    const UNUSED: &'static [SharedOptions] = NEITHER;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let before = self.server.running(context)?;
        context.clock().sleep(SAMPLE_INTERVAL);
        let mut servers = Vec::new();
        for server in &before {
            // It may have ended meanwhile.
            if let Some(now) = server.status_now()? {
                servers.push(ServerDocument::between(&server.socket, &server.status, now));
            }
        }
        context.report(&ServersListed { servers })
    }
}

impl Verb for AddExportsArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Serve another snapshot",
            line: "holdfast serve add web2@latest",
        },
        Example {
            wish: "Serve an image, and discard what clients write",
            line: "holdfast serve add --discard ./db.qcow2",
        },
    ];
    const UNUSED: &'static [SharedOptions] = NEITHER;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let request = ControlRequest::Add(self.sources.request(&self.exports)?);
        match self.server.one(context)?.ask(&request)? {
            ControlAnswer::Added(exports) => context.report(&ExportsAdded::new(exports)),
            _ => Err(unexpected()),
        }
    }
}

impl Verb for RemoveExportsArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Stop serving a disk that no client uses",
            line: "holdfast serve remove web1/vda",
        },
        Example {
            wish: "Disconnect the clients of an image, to move it",
            line: "holdfast serve remove --force db",
        },
    ];
    const UNUSED: &'static [SharedOptions] = NEITHER;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let server = self.server.one(context)?;
        let mut done = ExportsRemoved::default();
        for name in &self.exports {
            match self.remove(name, &server) {
                Ok(removed) => {
                    if removed.busy {
                        context.console().warning(&format!(
                            "a request to {name} did not end in time: its files are in use, and its last writes not \
                             durable, until it does"
                        ));
                    }
                    done.exports.push(removed);
                }
                Err(error) if self.exports.len() == 1 => return Err(error),
                // Exports that were removed are reported, too.
                Err(error) => done.fail(name, &error, context),
            }
        }
        context.report(&done)
    }
}

impl RemoveExportsArgs {
    fn remove(&self, name: &str, server: &KnownServer) -> Result<RemovedDocument, Error> {
        let request = ControlRequest::Remove {
            export: name.to_owned(),
            force: self.force,
        };
        match server.ask(&request)? {
            ControlAnswer::Removed { ended_clients, busy } => Ok(RemovedDocument {
                name: name.to_owned(),
                ended_clients,
                busy,
            }),
            _ => Err(unexpected()),
        }
    }
}

impl Verb for StopServerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Stop the only server of this user",
        line: "holdfast serve stop",
    }];
    const UNUSED: &'static [SharedOptions] = NEITHER;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let server = self.server.one(context)?;
        match server.ask(&ControlRequest::Stop)? {
            ControlAnswer::Stopping => context.report(&ServerStopped { pid: server.status.pid }),
            _ => Err(unexpected()),
        }
    }
}

/// A server that answers.
struct KnownServer {
    socket: PathBuf,
    status: ServerStatus,
}

impl KnownServer {
    /// `None` if no server listens on the socket.
    fn at(socket: PathBuf) -> Result<Option<Self>, Error> {
        let Some(answer) = ask_server(&socket, &ControlRequest::List)? else {
            return Ok(None);
        };
        match answer {
            ControlAnswer::Server(status) => Ok(Some(Self {
                socket,
                status: *status,
            })),
            ControlAnswer::Error(error) => Err(Error::Server(error)),
            _ => Err(unexpected()),
        }
    }

    fn status_now(&self) -> Result<Option<ServerStatus>, Error> {
        Ok(Self::at(self.socket.clone())?.map(|server| server.status))
    }

    fn ask(&self, request: &ControlRequest) -> Result<ControlAnswer, Error> {
        match ask_server(&self.socket, request)? {
            None => Err(Error::refused(Kind::NotFound, "the server has ended", HINT_START)),
            Some(ControlAnswer::Error(error)) => Err(Error::Server(error)),
            Some(answer) => Ok(answer),
        }
    }
}

const HINT_START: &str = "start one with holdfast serve all, nbd or iscsi";

impl ServerArgs {
    /// The servers of this user, or the one that is named.
    fn running(&self, context: &Context) -> Result<Vec<KnownServer>, Error> {
        let is_path = |text: &&String| text.contains('/');
        if let Some(path) = self.server.as_ref().filter(is_path) {
            let found = KnownServer::at(path.into())?;
            return found.map(|server| vec![server]).ok_or_else(|| self.not_found());
        }
        let mut servers = Vec::new();
        for socket in control_sockets(&context.runtime_folders()) {
            match KnownServer::at(socket) {
                Ok(server) => servers.extend(server),
                // A server that does not answer must not hide the others.
                Err(error) => context.console().warning(&holdfast_block::error_text(&error)),
            }
        }
        if let Some(text) = &self.server {
            servers.retain(|server| server.status.pid.to_string() == *text);
            if servers.is_empty() {
                return Err(self.not_found());
            }
        }
        Ok(servers)
    }

    fn not_found(&self) -> Error {
        let name = self.server.as_deref().unwrap_or_default();
        Error::refused(
            Kind::NotFound,
            format!("no server {name} runs"),
            "holdfast serve list shows the running servers",
        )
    }

    /// The only server, or the one that is named.
    fn one(&self, context: &Context) -> Result<KnownServer, Error> {
        let mut servers = self.running(context)?;
        match (servers.pop(), servers.len()) {
            (None, _) => Err(Error::refused(Kind::NotFound, "no server runs", HINT_START)),
            (Some(server), 0) => Ok(server),
            (Some(last), _) => {
                let numbers = servers
                    .iter()
                    .chain([&last])
                    .map(|server| server.status.pid.to_string());
                let numbers: Vec<String> = numbers.collect();
                Err(Error::refused(
                    Kind::Ambiguous,
                    format!("several servers run: {}", numbers.join(", ")),
                    "choose one with --server",
                ))
            }
        }
    }
}

fn unexpected() -> Error {
    Error::refused(
        Kind::Io,
        "the server sent an answer to another request",
        "use the same version of holdfast as the server",
    )
}
