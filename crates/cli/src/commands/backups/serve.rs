//! `holdfast serve`: serves disks of snapshots as network block devices.

mod iscsi;
mod vhost_user;

use std::net::SocketAddr;
use std::num::NonZero;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{ClientWrites, ServeAddress, ServeRequest, SnapshotName, serve};
use holdfast_serve::nbd::{ClientTrust, Event, TlsPolicy, TlsServer};

use crate::args::{Example, SharedOptions, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::context::password::private_file_warning;
use crate::errors::Error;
use crate::exit::Exit;
use crate::units;

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    #[command(subcommand)]
    protocol: Protocol,
}

verbs! {
    enum Protocol {
        /// Serve the disks of snapshots over NBD, until Ctrl-C
        "nbd" => Nbd(NbdArgs),
        /// Serve the disks of snapshots over iSCSI, until Ctrl-C
        "iscsi" => Iscsi(iscsi::IscsiArgs),
        /// Serve disks to virtual machines of this host over vhost-user, until Ctrl-C
        "vhost-user" => VhostUser(vhost_user::VhostUserArgs),
    }
}

/// Arguments of `serve nbd`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("door").required(true).multiple(true).args(["socket", "listen"]))]
struct NbdArgs {
    /// Snapshots; each disk is an NBD export named MACHINE/DISK
    #[arg(value_name = "SNAPSHOT[:DISK]", required = true)]
    snapshots: Vec<SnapshotName>,
    /// Serve on this Unix socket, which only this user can open
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve on this address and port (127.0.0.1:10809)
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Allow writes, which are discarded at the end; the snapshot never changes
    #[arg(long)]
    writable: bool,
    /// Keep writes in files in this folder, for the next time
    #[arg(long, value_name = "FOLDER")]
    overlay: Option<PathBuf>,
    /// Maximum number of clients; one address gets at most half of them
    #[arg(long, value_name = "COUNT", default_value = "256")]
    max_connections: NonZero<usize>,
    /// Encrypt connections: the server's certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the server's certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Serve only clients with a certificate of this authority, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_clients: Option<PathBuf>,
}

impl Verb for ServeArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Open the newest snapshot of a machine as block devices",
        line: "holdfast serve nbd -r /backup/vms web1 --socket /run/web1.sock",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];
    const BELOW: &'static [VerbEntry] = Protocol::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.protocol.run(context)
    }
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
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Default folder for data that clients write; it must be on a disk.
const OVERLAY_DEFAULT: &str = "/var/tmp";

/// How writes are treated, by the options `--overlay` and `--writable`.
fn writes_of(overlay: Option<&Path>, is_writable: bool) -> ClientWrites {
    match (overlay, is_writable) {
        (Some(folder), _) => ClientWrites::Keep(folder.to_owned()),
        (None, true) => ClientWrites::ThrowAway(OVERLAY_DEFAULT.into()),
        (None, false) => ClientWrites::Refuse,
    }
}

fn run(args: &NbdArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("serve nbd")?;
    let tls = tls(args, context)?;
    if let Some(address) = args.listen
        && args.tls_clients.is_none()
    {
        context.console().warning(&open_door(address, args.tls_cert.is_some()));
    }
    let repository = context.open_repository()?;
    let doors = args.socket.clone().map(ServeAddress::Unix);
    let doors: Vec<ServeAddress> = doors.into_iter().chain(args.listen.map(ServeAddress::Tcp)).collect();
    let console = context.shared_console();
    let events = move |event: &Event<'_>| match event {
        Event::RequestFailed { export, error, .. } | Event::OpenFailed { export, error, .. } => {
            console.warning(&format!("{export}: {error}"));
        }
        _ => {}
    };
    let request = ServeRequest {
        names: args.snapshots.clone(),
        zone: context.zone().clone(),
        doors: doors.clone(),
        writes: writes_of(args.overlay.as_deref(), args.writable),
        tls,
        connection_count_max: Some(args.max_connections),
        events: Arc::new(events),
        clock: Arc::clone(context.clock()),
    };
    let mut printed = Ok(());
    context.work(1, |job| {
        serve(&repository, request, job, &mut |served| {
            for disk in served {
                for door in &doors {
                    let line = format!(
                        "{}  {}, {}\n",
                        uri(door, &disk.export, args.tls_cert.is_some()),
                        disk.description,
                        units::bytes(disk.size_bytes)
                    );
                    if printed.is_ok() {
                        printed = context.output().data(line.as_bytes());
                    }
                }
            }
        })
    })?;
    printed?;
    Ok(Exit::Ok.with_warning_count(context.console().warnings().len()))
}

/// The warning for a server that accepts every client.
fn open_door(address: SocketAddr, is_encrypted: bool) -> String {
    let readers = if address.ip().is_loopback() {
        "any user of this host".to_owned()
    } else {
        format!("anyone who can connect to {address}")
    };
    let (what, advice) = if is_encrypted {
        ("", "--tls-clients admits only clients with a certificate")
    } else {
        (
            "without encryption and ",
            "see --tls-cert and --tls-clients, or --socket",
        )
    };
    format!("{readers} can read these disks {what}without authentication; {advice}")
}

/// The NBD URI of an export.
fn uri(door: &ServeAddress, export: &str, is_encrypted: bool) -> String {
    let scheme = if is_encrypted { "nbds" } else { "nbd" };
    match door {
        ServeAddress::Unix(path) => format!("{scheme}+unix:///{export}?socket={}", path.display()),
        ServeAddress::Tcp(address) => format!("{scheme}://{address}/{export}"),
    }
}

fn tls(args: &NbdArgs, context: &Context) -> Result<TlsPolicy, Error> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else {
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
    let authority = args.tls_clients.as_ref().map(read).transpose()?;
    let clients = authority.as_deref().map_or(ClientTrust::Anyone, ClientTrust::SignedBy);
    let server =
        TlsServer::from_pem(&read(certificate)?, &read(key)?, clients).map_err(holdfast_engine::Error::Serve)?;
    Ok(TlsPolicy::Required(server))
}
