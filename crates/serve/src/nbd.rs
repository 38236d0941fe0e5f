//! NBD, the network block device protocol.
//!
//! Source: `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd> and its branch `extension-ext-header`;
//! quotations in comments are from there. Only the fixed newstyle handshake is supported.

pub mod client;
mod kernel;
pub(crate) mod server;
mod wire;

pub use crate::server::connections::StopReport;
pub use crate::server::export_device::{Absent, ExportDevice};
pub use crate::server::limits::Limits;
pub use crate::server::listen::Listener;
pub use crate::server::peer::Peer;
pub use crate::server::resources::ServerResources;
pub use crate::stream::Socket;
pub use crate::tls::{ClientTrust, TlsServer};
pub use kernel::{KernelConnection, KernelServer};
pub use server::{
    Closed, Event, EventSink, Export, ExportEntry, Exports, FixedExports, HandshakeEnd, Server, ServerOptions,
    TlsPolicy, ZeroSpeed,
};
