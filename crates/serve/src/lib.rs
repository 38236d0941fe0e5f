//! Block devices to others, and from others.
//!
//! [`nbd`] is the network block device protocol, both ends of it. The protocol cores are pure: bytes in, values out; what
//! moves the bytes stands beside them.

mod error;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
pub mod nbd;

pub use error::{Error, Result};
