//! The iSCSI target: legal and illegal requests at the level of PDUs, limits on initiators, and real initiators.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod command_cases;
mod device_cases;
mod initiator;
mod limits;
mod lio;
mod login_cases;
mod programs;
mod registry_cases;
mod reservation_cases;
mod targets;
mod transport_cases;
