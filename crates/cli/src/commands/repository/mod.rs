//! Verbs about a repository as a whole.

mod gc;
mod init;
mod key;
mod repair;
mod scrub;
mod stats;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum RepositoryVerb {
        /// Create a repository
        "init" => Init(init::InitArgs),
        /// Manage the passwords and keys of a repository
        "key" => Key(key::KeyArgs),
        /// Show statistics of a repository
        "stats" => Stats(stats::StatsArgs),
        /// Read everything that is stored, and report damage
        "scrub" => Scrub(scrub::ScrubArgs),
        /// Free the space of data that no snapshot uses
        "gc" => Gc(gc::GcArgs),
        /// Repair what can be repaired, and list what is lost
        "repair" => Repair(repair::RepairArgs),
    }
}
