//! The outside world that owns disks: hypervisors, their machines, and the agents in them.

pub mod qemu;
pub mod qmp;
