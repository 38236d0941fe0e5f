//! `holdfast freeze-commands`: the process that freezes and thaws the source of `holdfast live-copy`.

use std::io::BufReader;
use std::sync::Arc;
use std::time::Duration;

use holdfast_live_copy::{FreezeCommands, serve_freeze_commands};

use super::copy_advice::copy_error;
use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::server_process::leave_group;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `freeze-commands`.
#[derive(Debug, clap::Args)]
pub(crate) struct FreezeCommandsArgs {
    /// The command that freezes
    #[arg(value_name = "FREEZE")]
    freeze: String,
    /// The command that thaws
    #[arg(value_name = "THAW")]
    thaw: String,
    /// Thaw after this time in any case
    #[arg(long, value_name = "MILLISECONDS")]
    thaw_after: u64,
    /// How long a command may take
    #[arg(long, value_name = "MILLISECONDS", default_value = "60000")]
    command_time: u64,
}

impl Verb for FreezeCommandsArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The command live-copy starts it",
        line: "holdfast freeze-commands 'fsfreeze --freeze /srv' 'fsfreeze --unfreeze /srv' --thaw-after 20000",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        // Ctrl-C on the terminal is for the copy, which thaws.
        leave_group();
        let commands = FreezeCommands {
            freeze: self.freeze.clone(),
            thaw: self.thaw.clone(),
            frozen_max: Duration::from_millis(self.thaw_after),
            command_time_max: Duration::from_millis(self.command_time),
        };
        let clock = Arc::clone(context.clock());
        let input = BufReader::new(std::io::stdin());
        serve_freeze_commands(&commands, input, &mut std::io::stdout().lock(), &clock).map_err(copy_error)?;
        Ok(Exit::Ok)
    }
}
