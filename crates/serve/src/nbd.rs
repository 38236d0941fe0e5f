//! NBD, the network block device protocol.
//!
//! Source: `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>. Only the fixed newstyle handshake is spoken.

pub mod client;
#[allow(dead_code, reason = "each end uses its half")]
mod wire;
