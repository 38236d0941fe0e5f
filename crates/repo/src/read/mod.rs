//! Reads the disks of snapshots.

pub(crate) mod device;
pub(crate) mod diff;
pub(crate) mod frame_check;
pub(crate) mod frame_plan;
pub(crate) mod frame_set;
pub(crate) mod restore;
