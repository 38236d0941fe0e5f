//! Block devices over the network: servers and clients.
//!
//! [`nbd`] implements both ends of the network block device protocol, [`iscsi`] a target. The protocol cores are pure state machines: bytes
//! in, values out. The code that does the I/O is separate.

mod error;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
pub mod iscsi;
pub mod nbd;
mod server;
mod stream;
mod tls;

pub use error::{Error, Result};
