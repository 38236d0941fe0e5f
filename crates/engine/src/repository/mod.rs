//! Verbs about a repository.

pub(crate) mod calendar;
pub(crate) mod copy;
pub(crate) mod diff;
pub(crate) mod forget;
pub(crate) mod gc;
pub(crate) mod init;
pub(crate) mod keys;
pub(crate) mod list;
pub(crate) mod name_conflict;
pub(crate) mod only_disk;
pub(crate) mod open;
pub(crate) mod prune;
pub(crate) mod removed;
pub(crate) mod repair;
pub(crate) mod resolve;
pub(crate) mod sighting;
pub(crate) mod snapshot_name;
pub(crate) mod verify;
