//! Writers: their announcements, and changes that are safe with concurrent writers.

pub(crate) mod claim;
pub(crate) mod emergency_space;
pub(crate) mod forget;
pub(crate) mod lease;
pub(crate) mod manifest_copies;
pub(crate) mod moves;
