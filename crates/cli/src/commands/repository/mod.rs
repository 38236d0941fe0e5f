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
        /// Make a repository
        "init" => Init(init::InitArgs),
        /// Manage the keys of a repository
        "key" => Key(key::KeyArgs),
        /// Show the repository in figures
        "stats" => Stats(stats::StatsArgs),
        /// Read the repository at rest, to find damage before it is needed
        "scrub" => Scrub(scrub::ScrubArgs),
        /// Give back the space of what no snapshot needs
        "gc" => Gc(gc::GcArgs),
        /// Mend what can be mended, and name what is lost
        "repair" => Repair(repair::RepairArgs),
    }
}
