//! Verbs that make backups, and those that read, keep and remove them.

pub(super) mod backup;
pub(super) mod copy;
pub(super) mod diff;
pub(super) mod forget;
pub(super) mod list;
pub(super) mod live_server;
pub(super) mod machines;
pub(super) mod prune;
pub(super) mod restore;
pub(super) mod resume;
pub(super) mod serve;
pub(super) mod show;
pub(super) mod verify;
pub(super) mod watchdog;
