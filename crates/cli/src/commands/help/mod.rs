//! Verbs about the program itself, and about what went wrong.

pub(super) mod completions;
pub(super) mod doctor;
pub(super) mod man;
pub(super) mod version;
