//! The host to which a machine moves, as ssh or a socket reaches it.

use std::path::Path;
use std::sync::Arc;

use holdfast_host::{LocalTools, StreamTools};
use holdfast_live_copy::{Connector, ProgramConnector};
use holdfast_migration::{CommandHost, Error as MigrationError, FarHost, ServiceLink, ServiceProgram, SocketHost};
use rustix::process::{Signal, getpid, kill_process};

use super::super::far::{MoveRoute, MoveTarget};
use super::MigrateArgs;
use super::advice::migration_error;
use crate::context::Context;
use crate::errors::Error;
use crate::machines::datasets::TOOL_TIME_OUT;

/// Forwards connections to the first socket, here, to the second one, there.
type SocketForwarder = dyn Fn(&Path, &Path) -> Result<(), MigrationError> + Sync;
/// Starts the program there again.
type FarStarter = dyn Fn() -> Result<FarHost, MigrationError> + Sync;

/// A host that can be asked, that receives disks, and whose sockets can be reached.
pub(super) struct OtherHost {
    /// As the user has written it.
    pub(super) address: String,
    pub(super) far: FarHost,
    pub(super) reach_again: Box<FarStarter>,
    pub(super) connector: Arc<dyn Connector>,
    pub(super) forward: Box<SocketForwarder>,
    pub(super) link: Arc<dyn ServiceLink>,
}

impl OtherHost {
    pub(super) fn reach(target: &MoveTarget, args: &MigrateArgs, context: &Context) -> Result<Self, Error> {
        match &target.route {
            MoveRoute::Ssh(host) => {
                let ssh = Arc::new(host.connect(&args.sending.ssh_option, context)?);
                let (uri, started_by) = (args.address_there(), Arc::clone(&ssh));
                let start = move || FarHost::start(&*started_by, &uri);
                let far = start().map_err(migration_error)?;
                let streams: Arc<dyn StreamTools> = Arc::clone(&ssh) as _;
                let clock = Arc::clone(context.clock());
                let host = far.host().to_owned();
                let link = ServiceProgram::of_host(Arc::clone(&streams), &args.address_there(), Arc::clone(&clock));
                Ok(Self {
                    address: target.to_string(),
                    far,
                    link: Arc::new(link),
                    reach_again: Box::new(start),
                    connector: Arc::new(ProgramConnector::new(streams, "holdfast".to_owned(), clock)),
                    forward: Box::new(move |here, there| {
                        let forwarded = ssh.forward_socket(here, there);
                        forwarded.map_err(|source| MigrationError::Forward {
                            host: host.clone(),
                            source,
                        })
                    }),
                })
            }
            MoveRoute::Command(command) => {
                let host = Arc::new(command_host(command, context));
                let reached = Arc::clone(&host);
                Ok(Self {
                    address: target.to_string(),
                    far: host.far().map_err(migration_error)?,
                    link: Arc::new(host.program()),
                    reach_again: Box::new(move || reached.far()),
                    connector: Arc::new(host.connector().map_err(migration_error)?),
                    forward: Box::new(move |here, there| host.forward(here, there)),
                })
            }
            MoveRoute::Socket { name, path } => {
                stop_with_input();
                let host = Arc::new(SocketHost::new(path.clone(), name.clone()));
                let reached = Arc::clone(&host);
                Ok(Self {
                    address: target.to_string(),
                    far: host.far().map_err(migration_error)?,
                    link: Arc::clone(&host) as _,
                    reach_again: Box::new(move || reached.far()),
                    connector: Arc::new(host.connector()),
                    forward: Box::new(move |here, there| host.forward(here, there)),
                })
            }
        }
    }
}

/// A host that a shell command reaches.
pub(super) fn command_host(command: &str, context: &Context) -> CommandHost {
    let tools: Arc<dyn StreamTools> = Arc::new(LocalTools::new(Arc::clone(context.clock()), TOOL_TIME_OUT));
    CommandHost::new(tools, command.to_owned(), Arc::clone(context.clock()))
}

/// The host that serves the migration has started this program. It keeps the input open until the program is to stop; if that
/// host or the connection to it fails, the input ends, too.
pub(super) fn stop_with_input() {
    std::thread::spawn(|| {
        std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).ok();
        kill_process(getpid(), Signal::TERM).ok();
    });
}
