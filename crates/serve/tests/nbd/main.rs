//! NBD: our server with our clients and others, and our client with other servers.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod client;
mod raw;
mod server;
mod servers;
