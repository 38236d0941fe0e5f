//! The parsers of network protocols for fuzzing; see [`holdfast_block::hostile`].

use holdfast_block::hostile::{Outcome, Parser};

use crate::fuse;
use crate::nbd;
use crate::nbd::client::hostile as client;

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "fuse_requests",
        feed: fuse_requests,
    },
    Parser {
        name: "nbd_server_handshake",
        feed: nbd_server_handshake,
    },
    Parser {
        name: "nbd_server_requests",
        feed: nbd_server_requests,
    },
    Parser {
        name: "nbd_handshake",
        feed: client::handshake,
    },
    Parser {
        name: "nbd_replies",
        feed: client::replies,
    },
    Parser {
        name: "nbd_uri",
        feed: client::uri,
    },
];

/// Valid bytes for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    fuse::hostile::seeds()
        .into_iter()
        .chain(nbd::server::hostile::seeds())
        .chain(client::seeds())
        .collect()
}

/// The messages of a client to an NBD server during the handshake.
pub fn nbd_server_handshake(bytes: &[u8]) -> Outcome {
    nbd::server::hostile::handshake(bytes)
}

/// The requests of a client to an NBD server. They are executed on a device in memory.
pub fn nbd_server_requests(bytes: &[u8]) -> Outcome {
    nbd::server::hostile::requests(bytes)
}

/// The requests of a kernel to a FUSE server. They are executed on files in memory.
pub fn fuse_requests(bytes: &[u8]) -> Outcome {
    fuse::hostile::requests(bytes)
}
