//! Detects damage: reads back what is stored, and determines the impact on disks.

pub(crate) mod difference;
pub(crate) mod finding;
pub(crate) mod impact;
pub(crate) mod map_walk;
pub(crate) mod scrub;
pub(crate) mod verify;
