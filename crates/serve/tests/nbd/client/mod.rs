//! The client against other servers, and against a hostile one.

mod concurrency;
mod conformance;
mod extents;
mod hostile_server;
mod peer;
mod tls;
mod variants;
