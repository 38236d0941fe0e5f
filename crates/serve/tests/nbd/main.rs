//! NBD: Holdfast's server with its own client and others, and Holdfast's client with other servers.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod client;
mod raw;
mod server;
mod servers;
