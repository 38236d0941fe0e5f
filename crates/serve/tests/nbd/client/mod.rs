//! The client with other servers, and with a hostile one.

mod concurrency;
mod conformance;
mod extents;
mod hostile_server;
mod peer;
mod tls;
mod variants;
