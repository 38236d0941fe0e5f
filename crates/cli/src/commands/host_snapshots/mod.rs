//! Verbs about snapshots that the storage of this host makes.

pub(super) mod clone;
pub(super) mod cron;
pub(super) mod host;
pub(super) mod mount;
pub(super) mod peer;
pub(super) mod point;
pub(super) mod replicate;
pub(super) mod rollback;
pub(super) mod snapshot;
