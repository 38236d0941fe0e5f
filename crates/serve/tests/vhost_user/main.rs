//! vhost-user-blk: legal and illegal requests through rings in shared memory, hostile and slow front ends, and a
//! comparison with QEMU's server.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod comparison;
mod front_end;
mod hostile_cases;
mod limits;
mod message_cases;
mod registry_cases;
mod request_cases;
mod successors;
