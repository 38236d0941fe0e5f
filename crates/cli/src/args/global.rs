//! Options that every verb accepts, before or after its name.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use holdfast_repo::key::SlotId;

use crate::errors::Error;
use crate::process::environment::{self, Environment};

/// All of them.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct GlobalArgs {
    /// Which repository, and how to open it.
    #[command(flatten)]
    pub repository: RepositoryArgs,
    /// How to answer.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Which repository, and how to open it.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Repository options")]
pub struct RepositoryArgs {
    /// The repository: a folder, or its name in holdfast.toml [default: the only one there] [env: HOLDFAST_REPOSITORY]
    #[arg(short = 'r', long, value_name = "LOCATION", global = true)]
    pub repository: Option<OsString>,
    /// Where its password comes from.
    #[command(flatten)]
    pub password: PasswordArgs,
}

impl RepositoryArgs {
    /// The location of the repository: from the option, otherwise from the environment.
    pub fn location(&self, environment: &Environment) -> Result<OsString, Error> {
        self.repository
            .as_deref()
            .filter(|location| !location.is_empty())
            .or_else(|| environment.get(environment::REPOSITORY))
            .map(OsString::from)
            .ok_or(Error::NoRepository)
    }
}

/// Where the password of the repository comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct PasswordArgs {
    /// File whose first line is the password [env: HOLDFAST_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", global = true, conflicts_with = "password_command")]
    pub password_file: Option<PathBuf>,
    /// Shell command whose first line of output is the password [env: HOLDFAST_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND", global = true)]
    pub password_command: Option<OsString>,
    /// Try only this key slot
    #[arg(long, value_name = "ID", global = true, hide_short_help = true)]
    pub key_slot: Option<SlotId>,
}

/// Where a new password comes from, which is not the one that opens the repository.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "New password (asked for on the terminal without these)")]
pub struct NewPasswordArgs {
    /// File whose first line is the new password
    #[arg(long, value_name = "FILE", conflicts_with = "new_password_command")]
    pub new_password_file: Option<PathBuf>,
    /// Shell command whose first line of output is the new password
    #[arg(long, value_name = "COMMAND")]
    pub new_password_command: Option<OsString>,
}

/// Where the password of the repository comes from that is copied to.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct ToPasswordArgs {
    /// File whose first line is the password of that repository [env: HOLDFAST_TO_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "to_password_command")]
    pub to_password_file: Option<PathBuf>,
    /// Shell command whose first line of output is the password of that repository [env: HOLDFAST_TO_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND")]
    pub to_password_command: Option<OsString>,
}

/// Where the password of the repository comes from that a new one is made like.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct LikePasswordArgs {
    /// File whose first line is the password of that repository [default: ask]
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "like_password_command",
        requires = "like"
    )]
    pub like_password_file: Option<PathBuf>,
    /// Shell command whose first line of output is the password of that repository
    #[arg(long, value_name = "COMMAND", requires = "like")]
    pub like_password_command: Option<OsString>,
}

/// Heading of options that follow those under a heading but do not belong to it.
pub const NO_HEADING: Option<&str> = None;

/// How much of the machine a job may use.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct JobArgs {
    /// Threads per kind of work [default: number of processors]
    #[arg(long, value_name = "N", hide_short_help = true, value_parser = parse_threads, help_heading = NO_HEADING)]
    pub threads: Option<NonZeroUsize>,
}

/// More threads than any machine can use; each thread has its own stack and buffers.
const THREADS_MAX: usize = 1024;

fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    let count = text
        .parse::<NonZeroUsize>()
        .ok()
        .filter(|count| count.get() <= THREADS_MAX);
    count.ok_or_else(|| format!("threads are a number between 1 and {THREADS_MAX}"))
}

impl JobArgs {
    /// Threads for each kind of work.
    pub fn thread_count(&self) -> usize {
        let all = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        self.threads.map_or_else(all, NonZeroUsize::get)
    }
}

/// How to answer.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Output options")]
pub struct OutputArgs {
    /// Print the result as one JSON document
    #[arg(long, global = true)]
    pub json: bool,
    /// Print nothing on success but requested data; no progress, no notes
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// How to show progress
    #[arg(long, value_name = "HOW", value_enum, default_value_t, global = true)]
    pub progress: ProgressHow,
    /// Do not show progress
    #[arg(long, global = true, conflicts_with = "progress")]
    pub no_progress: bool,
    /// Print what the program does in detail, for bug reports; twice for more [env: HOLDFAST_LOG]
    #[arg(short, long, action = clap::ArgAction::Count, global = true, hide_short_help = true)]
    pub verbose: u8,
    /// When to use colours
    #[arg(long, value_name = "WHEN", value_enum, default_value_t, global = true)]
    pub color: ColorWhen,
}

/// How to show progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ProgressHow {
    /// A bar on a terminal, otherwise a line every 30 seconds
    #[default]
    Auto,
    /// JSON events on standard error, one per line; messages too
    Json,
    /// Not at all
    None,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ColorWhen {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

#[cfg(test)]
mod tests {
    use super::RepositoryArgs;
    use crate::errors::Error;
    use crate::process::environment::Environment;

    #[test]
    fn the_option_beats_the_environment() {
        let environment: Environment = [("HOLDFAST_REPOSITORY", "/env")].into_iter().collect();
        let given = RepositoryArgs {
            repository: Some("/option".into()),
            ..RepositoryArgs::default()
        };
        let none = RepositoryArgs::default();
        assert_eq!(given.location(&environment).unwrap(), "/option");
        assert_eq!(none.location(&environment).unwrap(), "/env");
        assert!(matches!(
            none.location(&Environment::default()),
            Err(Error::NoRepository)
        ));
    }
}
