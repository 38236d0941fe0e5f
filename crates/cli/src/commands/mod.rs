//! The verbs, one file each: arguments, examples, and the way from there to a report.

mod completions;
mod man;
mod version;

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// All verbs.
#[derive(Debug, clap::Subcommand)]
pub enum Verb {
    /// Show the version of the program and what it was built for
    Version(version::VersionArgs),
    /// Print a script that completes holdfast's command line in a shell
    Completions(completions::CompletionsArgs),
    /// Write the manual pages into a folder
    #[command(hide = true)]
    Man(man::ManArgs),
}

impl Verb {
    /// Does it, and answers how it went.
    pub fn run(&self, context: &Context) -> Result<Exit, Error> {
        match self {
            Self::Version(args) => version::run(args, context),
            Self::Completions(args) => completions::run(args, context),
            Self::Man(args) => man::run(args, context),
        }
    }
}

/// Examples of the program as a whole.
pub const EXAMPLES: &[Example] = &[
    Example {
        wish: "See what this build can do",
        line: "holdfast version --verbose",
    },
    Example {
        wish: "See the options of a verb",
        line: "holdfast version --help",
    },
];

/// Examples of the verb at `path` (`list`, `image info`); none for what is no verb.
pub fn examples_of(path: &str) -> &'static [Example] {
    match path {
        "version" => version::EXAMPLES,
        "completions" => completions::EXAMPLES,
        "man" => man::EXAMPLES,
        _ => &[],
    }
}
