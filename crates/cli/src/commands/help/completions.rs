//! `holdfast completions SHELL`: prints a completion script for the shell.

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Shells that there are scripts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Shell {
    Bash,
    Fish,
    Zsh,
}

impl Verb for CompletionsArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Complete in bash, for all users",
            line: "holdfast completions bash > /usr/share/bash-completion/completions/holdfast",
        },
        Example {
            wish: "Complete in fish, for this user",
            line: "holdfast completions fish > ~/.config/fish/completions/holdfast.fish",
        },
        Example {
            wish: "Complete in zsh, from a folder of $fpath",
            line: "holdfast completions zsh > ~/.zfunc/_holdfast",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

fn run(args: &CompletionsArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("completions")?;
    let script = match args.shell {
        Shell::Bash => include_str!("complete/bash.sh"),
        Shell::Fish => include_str!("complete/fish.sh"),
        Shell::Zsh => include_str!("complete/zsh.sh"),
    };
    context.output().data(script.as_bytes())?;
    Ok(Exit::Ok)
}
