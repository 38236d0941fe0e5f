//! vhost-user-blk: disks for virtual machines of this host, over memory that the server shares with them.
//!
//! ```text
//! server ─► session            the messages of a front end (QEMU): memory, rings, features
//!               └─► ring       one thread for each queue: takes requests, returns completed ones
//!                     ├─► chain     pure: descriptors in, segments of memory out
//!                     ├─► request   pure: header and lengths in, an action out
//!                     └─► execute   the action, on the device and the memory of the guest
//! ```
//! Messages and rings are parsed by crates of rust-vmm, which also contain the code that maps memory. Sources: the
//! vhost-user protocol of QEMU (docs/interop/vhost-user.rst), and Virtual I/O Device (VIRTIO) 1.2; section numbers in
//! comments are of the latter.

#![deny(clippy::indexing_slicing)]

mod chain;
mod config;
mod event;
mod execute;
mod export;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod inflight;
mod load;
mod memory;
mod notification;
mod request;
mod ring;
mod server;
mod session;

pub use crate::server::connections::{ReachedLimit, StopReport};
pub use crate::server::export_device::ExportDevice;
pub use crate::server::limits::Limits;
pub use crate::server::listen::Listener;
pub use crate::server::peer::Peer;
pub use crate::server::resources::ServerResources;
pub use crate::stream::Socket;
pub use config::{QUEUE_COUNT_MAX, VhostSectorSize};
pub use event::{FrontEndGone, VhostUserEvent, VhostUserEventSink};
pub use export::{AcceptedWrites, VhostUserExport, VhostUserExportOptions};
pub use server::{DiskNumber, VhostUserServer, VhostUserServerOptions};
