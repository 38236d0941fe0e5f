//! `holdfast receive-migration`: the side of the other host of `holdfast migrate --connect-command`, once for each connection.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use holdfast_engine::{ContainerPlace, DiskTransport};
use holdfast_migration::{HostRequests, HostServices, RECEIVE_MIGRATION_COMMAND, RequestSubject, serve_connection};

use super::far::{receive_tools, require_protocol};
use super::receive_container::{arrival_tools, mount_arrived};
use super::receive_machine::{far_hypervisor, far_tools};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `receive-migration`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReceiveMigrationArgs {
    /// The version of the protocol
    #[arg(value_name = "PROTOCOL")]
    protocol: String,
    /// The hypervisor's address: qemu:///system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
}

impl Verb for ReceiveMigrationArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "A service starts it for each connection of holdfast migrate --connect-command: socat, stunnel, inetd",
        line: "holdfast receive-migration 1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        require_protocol(&self.protocol, RECEIVE_MIGRATION_COMMAND)?;
        let failed = |source| Error::File {
            action: "serve the migration on",
            path: "standard input".into(),
            source,
        };
        let requests = AnyRequests {
            connect: self.connect.as_deref(),
            context,
        };
        let services = HostServices {
            requests: &requests,
            disks: receive_tools(context),
        };
        let input = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
        let output = std::io::stdout().as_fd().try_clone_to_owned().map_err(failed)?;
        serve_connection(File::from(input), File::from(output), &services).map_err(failed)?;
        Ok(Exit::Ok)
    }
}

/// Answers requests of each kind. A host without libvirt receives containers.
struct AnyRequests<'a> {
    connect: Option<&'a str>,
    context: &'a Context,
}

impl HostRequests for AnyRequests<'_> {
    fn serve(&self, subject: RequestSubject, stream: &UnixStream) -> std::io::Result<()> {
        match subject {
            RequestSubject::Machine => {
                let hypervisor = far_hypervisor(self.connect, self.context).map_err(std::io::Error::other)?;
                far_tools(&*hypervisor, self.context).serve(subject, stream)
            }
            RequestSubject::Container => {
                let mount = |place: &ContainerPlace, point: &Path, transport: DiskTransport| {
                    mount_arrived(place, point, transport, self.context)
                };
                arrival_tools(self.context, None, &drop, &mount).serve(subject, stream)
            }
        }
    }

    fn hypervisor_socket(&self) -> Option<PathBuf> {
        let hypervisor = far_hypervisor(self.connect, self.context).ok()?;
        far_tools(&*hypervisor, self.context).hypervisor_socket()
    }
}
