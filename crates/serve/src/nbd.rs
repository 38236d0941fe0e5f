//! NBD, the network block device protocol.
//!
//! Source: `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd> and its branch `extension-ext-header`;
//! quotations in comments are from there. Only the fixed newstyle handshake is supported.

pub mod client;
pub(crate) mod server;
mod stream;
mod tls;
mod wire;

pub use server::{
    Absent, Closed, Event, EventSink, Export, ExportDevice, ExportEntry, Exports, FixedExports, HandshakeEnd, Limits,
    Listener, Peer, Server, ServerOptions, StopReport, TlsPolicy, ZeroSpeed,
};
pub use stream::Socket;
pub use tls::{ClientTrust, TlsServer};
