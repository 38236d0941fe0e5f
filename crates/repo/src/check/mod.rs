//! Finding damage: reading back what is stored, and what a finding means for the disks in it.

pub(crate) mod difference;
pub(crate) mod finding;
pub(crate) mod impact;
pub(crate) mod map_walk;
pub(crate) mod scrub;
pub(crate) mod verify;
