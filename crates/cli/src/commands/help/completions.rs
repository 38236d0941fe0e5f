//! `holdfast completions SHELL`: a script for the shell.

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

/// Prints the script.
fn run(args: &CompletionsArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("completions")?;
    let shell = match args.shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Fish => clap_complete::Shell::Fish,
        Shell::Zsh => clap_complete::Shell::Zsh,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut context.command_line().tree(), "holdfast", &mut script);
    context.output().data(&script)?;
    Ok(Exit::Ok)
}
