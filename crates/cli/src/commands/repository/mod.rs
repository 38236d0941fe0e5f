//! Verbs about a repository as a whole.

pub(super) mod gc;
pub(super) mod init;
pub(super) mod key;
pub(super) mod repair;
pub(super) mod scrub;
pub(super) mod stats;
