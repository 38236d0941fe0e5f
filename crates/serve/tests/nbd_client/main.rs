//! The client against other servers, and against a hostile one.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod concurrency;
mod conformance;
mod extents;
mod hostile_server;
mod peer;
mod tls;
mod variants;
