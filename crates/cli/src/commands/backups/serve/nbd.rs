//! `holdfast serve nbd`: serves disks as network block devices.

use std::net::SocketAddr;
use std::num::NonZero;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_engine::{NbdOptions, ServeAddress};
use holdfast_serve::nbd::{ClientTrust, Event, TlsPolicy, TlsServer};

use super::document::address_lines;
use super::run::{RepositoryUse, ServerPlan, readers, run_server};
use super::sources::SourceArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::password::private_file_warning;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `serve nbd`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("door").required(true).multiple(true).args(["socket", "listen"]))]
pub(super) struct NbdArgs {
    /// Snapshots and images; each disk is an NBD export: MACHINE/DISK, or the name of the image
    #[arg(value_name = "SNAPSHOT[:DISK]|IMAGE", required = true)]
    exports: Vec<String>,
    /// Serve on this Unix socket, which only this user can open
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve on this address and port (127.0.0.1:10809)
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    sources: SourceArgs,
    /// Maximum number of clients; one address gets at most half of them
    #[arg(long, value_name = "COUNT", default_value = "256")]
    max_connections: NonZero<usize>,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Encryption of NBD.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_field_names, reason = "the names are those of the options")]
pub(super) struct TlsArgs {
    /// Encrypt NBD connections: the server's certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the server's certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Serve only NBD clients with a certificate of this authority, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_clients: Option<PathBuf>,
}

impl Verb for NbdArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Open the newest snapshot of a machine as block devices",
            line: "holdfast serve nbd -r /backup/vms web1 --socket /run/web1.sock",
        },
        Example {
            wish: "Boot from it, and discard what the machine writes",
            line: "holdfast serve nbd -r /backup/vms web1:vda --socket /run/web1.sock --writable",
        },
        Example {
            wish: "Open an image of another hypervisor",
            line: "holdfast serve nbd web1.vmdk --socket /run/web1.sock",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        context.output().refuse_json("serve nbd")?;
        let doors = self.socket.clone().map(ServeAddress::Unix);
        let doors = doors.into_iter().chain(self.listen.map(ServeAddress::Tcp)).collect();
        let plan = ServerPlan {
            choice: self.sources.choice(&self.exports)?,
            nbd: Some(self.tls.options(doors, context)?),
            iscsi: None,
            vhost_user: None,
            lines: address_lines,
            max_connections: self.max_connections,
            control: None,
            repository: RepositoryUse::IfNeeded,
        };
        run_server(plan, context)
    }
}

impl TlsArgs {
    /// How NBD is served at `doors`. Warns if every client is accepted.
    pub(super) fn options(&self, doors: Vec<ServeAddress>, context: &Context) -> Result<NbdOptions, Error> {
        let tls = self.policy(context)?;
        if self.tls_clients.is_none() {
            for address in doors.iter().filter_map(ServeAddress::tcp_address) {
                context.console().warning(&self.open_door(address));
            }
        }
        let console = context.shared_console();
        let events = move |event: &Event<'_>| match event {
            Event::RequestFailed { export, error, .. } | Event::OpenFailed { export, error, .. } => {
                console.warning(&format!("{export}: {error}"));
            }
            _ => {}
        };
        Ok(NbdOptions {
            doors,
            tls,
            events: Arc::new(events),
        })
    }

    /// The warning for a server that accepts every client.
    fn open_door(&self, address: SocketAddr) -> String {
        let (what, advice) = if self.tls_cert.is_some() {
            ("", "--tls-clients admits only clients with a certificate")
        } else {
            (
                "without encryption and ",
                "see --tls-cert and --tls-clients, or serve on a Unix socket",
            )
        };
        format!(
            "{} can read these disks {what}without authentication; {advice}",
            readers(address)
        )
    }

    fn policy(&self, context: &Context) -> Result<TlsPolicy, Error> {
        let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) else {
            return Ok(TlsPolicy::Off);
        };
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|source| Error::File {
                action: "read",
                path: path.clone(),
                source,
            })
        };
        if let Ok(found) = key.metadata()
            && let Some(warning) = private_file_warning(key, found.permissions().mode() & 0o777, "key")
        {
            context.console().warning(&warning);
        }
        let authority = self.tls_clients.as_ref().map(read).transpose()?;
        let clients = authority.as_deref().map_or(ClientTrust::Anyone, ClientTrust::SignedBy);
        let server =
            TlsServer::from_pem(&read(certificate)?, &read(key)?, clients).map_err(holdfast_engine::Error::Serve)?;
        Ok(TlsPolicy::Required(server))
    }
}
