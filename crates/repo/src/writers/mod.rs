//! Writers: how they announce themselves, and what they change so that no other writer is harmed.

pub(crate) mod claim;
pub(crate) mod emergency_space;
pub(crate) mod forget;
pub(crate) mod lease;
pub(crate) mod manifest_copies;
pub(crate) mod moves;
