//! NBD, the network block device protocol.
//!
//! Source: `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>. Only the fixed newstyle handshake is spoken.

mod wire;
