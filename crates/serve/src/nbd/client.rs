//! The client: opens exports of other programs as block devices.
//!
//! [`NbdDevice`] reads, [`NbdDeviceMut`] writes; [`list_exports`] and [`describe_export`] query a server. Below them:
//! `handshake` and `transmission` parse what the server sends and do no I/O; `connection` and `call` share a stream
//! between threads; `device` and `device_mut` implement [`BlockDevice`](holdfast_block::BlockDevice) on top.
//!
//! The server is not trusted: everything that it sends is bounded and checked against the request.

mod block_status;
mod call;
mod command;
mod connect;
mod connection;
mod coverage;
mod device;
mod device_mut;
mod error;
mod export;
mod handshake;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod inbox;
mod option_names;
mod read_ahead;
mod status;
mod stream;
mod tls;
mod transmission;
mod uri;
mod violation;

pub use block_status::StatusExtent;
pub use connect::{ExportContent, NbdOptions, describe_export, list_exports};
pub use device::{NbdDevice, NbdStopper};
pub use device_mut::NbdDeviceMut;
pub use error::{Error, Loss, Result};
pub use export::{BlockSizes, ExportInfo, ListedExport};
pub use stream::{Connector, Endpoint, PORT, Stream};
pub use tls::TlsClient;
pub use uri::{NbdUri, Security};
pub use violation::Violation;

/// The standard metadata context: which ranges are allocated, and which are zero.
pub const ALLOCATION: &str = "base:allocation";
/// Prefix of the names of dirty bitmaps in QEMU's metadata contexts.
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";
/// QEMU's metadata context with the layer of the backing chain that holds each byte.
pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
