//! Verbs about the program itself and about troubleshooting.

mod command_help;
mod complete;
mod completions;
mod doctor;
mod man;
mod version;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum HelpVerb {
        /// Find and clean up what interrupted jobs left behind
        "doctor" => Doctor(doctor::DoctorArgs),
        /// Show the version; with --verbose, also build, formats and host
        "version" => Version(version::VersionArgs),
        /// Print a completion script for a shell
        "completions" => Completions(completions::CompletionsArgs),
        /// Write the manual pages to a folder
        "man" => Man(man::ManArgs),
        /// Show the help of a command
        "help" => Help(command_help::HelpArgs),
    }
    internal {
        /// List what can stand at the cursor, for the completion scripts
        "complete" => Complete(complete::CompleteArgs),
    }
}
