//! The client: exports of other programs as block devices.
//!
//! [`NbdDevice`] reads, [`NbdDeviceMut`] writes; [`list_exports`] and [`describe_export`] look around. Below them, from pure to
//! less so: `handshake` and `dialogue` understand what the server says and do no I/O; `connection` and `call` let threads
//! share a stream; `device` and its kin make that a [`BlockDevice`](holdfast_block::BlockDevice).
//!
//! The server is not trusted: everything that it says is bounded and held against what was asked.

mod block_status;
mod call;
mod command;
mod connect;
mod connection;
mod coverage;
mod device;
mod device_mut;
mod dialogue;
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
mod uri;
mod violation;

pub use block_status::StatusExtent;
pub use connect::{NbdOptions, describe_export, list_exports};
pub use device::{NbdDevice, NbdStopper};
pub use device_mut::NbdDeviceMut;
pub use error::{Error, Loss, Result};
pub use export::{BlockSizes, ExportInfo, ListedExport};
pub use stream::{Connector, Endpoint, PORT, Stream};
pub use tls::TlsClient;
pub use uri::{NbdUri, Security};
pub use violation::Violation;

/// The metadata context of the protocol itself: which bytes take space, and which are zero.
pub const ALLOCATION: &str = "base:allocation";
/// What stands before the name of a dirty bitmap in QEMU's metadata contexts.
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";
/// The context of QEMU in which the layer of an image is told that each byte is in.
pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
