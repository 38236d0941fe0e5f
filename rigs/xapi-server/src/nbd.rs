//! NBD as served by `xapi-nbd`: only with TLS, and with one export for each disk, whose name contains the session.
//!
//! Source: `ocaml/nbd` of xen-api. An export is `/UUID?session_id=REF`; it is read-only, there is no list of exports,
//! and a client without a session gets no access.

use std::collections::btree_map::Entry;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::{fmt, io};

use holdfast_block::{BlockDevice, ExtentList, FileDevice, IoMode};
use holdfast_serve::nbd::{
    ClientTrust, Event, Export, ExportDevice, ExportEntry, Exports, Limits, Listener, Server, ServerOptions,
    ServerResources, TlsPolicy, TlsServer,
};

use crate::database::text;
use crate::pool::{ADDRESSES, Pool};

/// Starts the servers of both hosts, each with the certificate of its host. With `port` 0 the system chooses one port
/// for both.
pub(crate) fn start(pool: &Arc<Pool>, listeners: [Listener; 2]) -> io::Result<Vec<Server>> {
    let mut servers = Vec::new();
    for (host, listener) in listeners.into_iter().enumerate() {
        let identity = pool.identity(host);
        let (certificate, key) = (identity.certificate_pem(), identity.key_pem());
        let tls = TlsServer::from_pem(certificate.as_bytes(), key.as_bytes(), ClientTrust::Anyone)
            .map_err(io::Error::other)?;
        let mut server = Server::new(ServerOptions {
            exports: Arc::new(Disks {
                pool: Arc::clone(pool),
                host,
            }),
            resources: ServerResources::new(Limits::default()),
            tls: TlsPolicy::Required(tls),
            clock: Arc::new(pool.clock),
            events: Arc::new(|_: &Event<'_>| {}),
        });
        server.listen(listener).map_err(io::Error::other)?;
        servers.push(server);
    }
    Ok(servers)
}

/// Listens on the same port of both hosts.
pub(crate) fn listen() -> io::Result<([Listener; 2], u16)> {
    crate::server::on_both_hosts(|address| {
        let listener = Listener::tcp(SocketAddr::from(address)).map_err(io::Error::other)?;
        let port = listener.tcp_address().map_or(0, |address| address.port());
        Ok((listener, port))
    })
}

/// The disks that a host sees, as exports.
struct Disks {
    pool: Arc<Pool>,
    host: usize,
}

impl Exports for Disks {
    fn list(&self) -> Vec<ExportEntry> {
        Vec::new()
    }

    fn open(&self, name: &str) -> holdfast_block::Result<Option<Arc<Export>>> {
        let Some((uuid, session)) = name.strip_prefix('/').unwrap_or(name).split_once("?session_id=") else {
            return Ok(None);
        };
        let mut state = self.pool.state();
        state.calls.push(format!("NBD {} {uuid}", ADDRESSES[self.host]));
        if !state.database.exists("session", session) {
            return Ok(None);
        }
        let Ok(vdi) = state.database.by_uuid("VDI", uuid) else {
            return Ok(None);
        };
        let sr = state
            .database
            .get("VDI", &vdi)
            .map(|record| text(record, "SR").to_owned());
        if !sr.is_ok_and(|sr| state.host_sees(self.host, &sr)) {
            return Ok(None);
        }
        let device = FileDevice::open(&self.pool.disk_path(uuid), IoMode::Buffered)?;
        *state.users.entry(vdi.clone()).or_default() += 1;
        let device = AttachedDisk {
            device,
            pool: Arc::clone(&self.pool),
            vdi,
        };
        Ok(Some(Arc::new(Export::new(
            name,
            ExportDevice::ReadOnly(Arc::new(device)),
        ))))
    }
}

/// A disk that is in use until the client disconnects.
struct AttachedDisk {
    device: FileDevice,
    pool: Arc<Pool>,
    vdi: String,
}

impl BlockDevice for AttachedDisk {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }
}

impl Drop for AttachedDisk {
    fn drop(&mut self) {
        release(&mut self.pool.state(), &self.vdi);
    }
}

impl fmt::Debug for AttachedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachedDisk")
            .field("vdi", &self.vdi)
            .finish_non_exhaustive()
    }
}

/// Removes one user of a disk.
pub(crate) fn release(state: &mut crate::pool::State, vdi: &str) {
    if let Entry::Occupied(mut users) = state.users.entry(vdi.to_owned()) {
        *users.get_mut() -= 1;
        if *users.get() == 0 {
            users.remove();
        }
    }
}
