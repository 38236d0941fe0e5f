//! Verbs about the program itself, and about what went wrong.

mod completions;
mod doctor;
mod man;
mod version;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum HelpVerb {
        /// Find what dead backups and forgotten snapshots left at machines, and mend it
        "doctor" => Doctor(doctor::DoctorArgs),
        /// Show the version of the program and what it was built for
        "version" => Version(version::VersionArgs),
        /// Print a script that completes holdfast's command line in a shell
        "completions" => Completions(completions::CompletionsArgs),
        /// Write the manual pages into a folder
        "man" => Man(man::ManArgs),
    }
}
