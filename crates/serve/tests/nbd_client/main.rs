//! The client against servers of other people, and against one that does everything wrong.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod conformance;
mod crowd;
mod dialects;
mod extents;
mod peer;
mod tls;
mod wicked;
