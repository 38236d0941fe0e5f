//! Block devices for others: over the network, and as files.
//!
//! [`nbd`] implements both ends of the network block device protocol, [`iscsi`] a target, [`vhost_user`] disks for virtual
//! machines of this host, and [`fuse`] the server of a mounted file system. [`registry`] holds the exports of a process,
//! for all protocols. The protocol cores are pure state machines: bytes in, values out. The code that does the I/O is
//! separate.

mod error;
pub mod fuse;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
pub mod iscsi;
pub mod lines;
pub mod nbd;
pub mod registry;
mod server;
mod stream;
mod tls;
pub mod vhost_user;

pub use error::{Error, Result};
