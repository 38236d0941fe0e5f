//! Hypervisors, their machines, and the agents in them.

pub mod agent;
pub(crate) mod bare;
pub mod domain_xml;
pub(crate) mod error;
pub(crate) mod exit_report;
#[cfg(feature = "libvirt")]
pub(crate) mod libvirt;
pub(crate) mod live_disks;
pub(crate) mod machine;
pub(crate) mod migration;
pub(crate) mod overlays;
pub(crate) mod swtpm;
pub(crate) mod tpm;
pub(crate) mod traits;
pub mod virtualbox;
pub mod xapi;
