//! `holdfast help [COMMAND]`: shows the help of the program or of a command.

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::Paint;

/// Arguments of `help`.
#[derive(Debug, clap::Args)]
pub(crate) struct HelpArgs {
    /// The command: backup, or image info
    #[arg(value_name = "COMMAND")]
    path: Vec<String>,
}

impl Verb for HelpArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See all commands",
            line: "holdfast help",
        },
        Example {
            wish: "See the options and examples of a command",
            line: "holdfast help image convert",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        context.output().refuse_json("help")?;
        let line = context.command_line();
        let mut root = line.tree();
        root.build();
        let mut command = &root;
        for (depth, word) in self.path.iter().enumerate() {
            let below = command.find_subcommand(word);
            command = below.ok_or_else(|| line.unknown_verb(&self.path[..depth].join(" "), word))?;
        }
        let help = command.clone().render_long_help();
        let text = match context.output().paint() {
            Paint::Color => help.ansi().to_string(),
            Paint::Plain => help.to_string(),
        };
        context.output().data(text.as_bytes())?;
        Ok(Exit::Ok)
    }
}
