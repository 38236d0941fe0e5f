//! `holdfast files-machine`: becomes the QEMU of an appliance. The `files` verbs start it.

use holdfast_appliance::become_machine;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

pub(super) const VERB: &str = "files-machine";

/// Arguments of `files-machine`.
#[derive(Debug, clap::Args)]
pub(crate) struct FilesMachineArgs {}

impl Verb for FilesMachineArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The files verbs start it by themselves",
        line: "holdfast files-machine",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json];

    fn run(&self, _context: &Context) -> Result<Exit, Error> {
        Err(Error::File {
            action: "start the appliance of",
            path: "/dev/stdin".into(),
            source: become_machine(),
        })
    }
}
