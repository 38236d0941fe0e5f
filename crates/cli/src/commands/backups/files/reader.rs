//! `holdfast files-reader`: the process that reads the file system of a guest. The `files` verbs start it.
//!
//! It reads what a guest wrote, so it gives up all rights first: it can only answer the process that started it.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

use holdfast_guest_files::protocol::serve;
use holdfast_host::{ConfinedReader, confine};

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

const VERB: &str = "files-reader";
/// A reader that does not ask for a byte or answer for this long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Arguments of `files-reader`.
#[derive(Debug, clap::Args)]
pub(crate) struct FilesReaderArgs {}

impl Verb for FilesReaderArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The files verbs start it by themselves",
        line: "holdfast files-reader",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json];

    fn run(&self, _context: &Context) -> Result<Exit, Error> {
        let failed = |source| Error::File {
            action: "use",
            path: "/dev/stdin".into(),
            source,
        };
        let input = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
        let output = std::io::stdout().as_fd().try_clone_to_owned().map_err(failed)?;
        // A panic becomes an answer.
        std::panic::set_hook(Box::new(|_| {}));
        let note = confine().err().map(|error| {
            format!(
                "the reader of the file system runs without seccomp, as an ordinary process without privileges: {error}"
            )
        });
        serve(
            Box::new(File::from(input)),
            Box::new(File::from(output)),
            note.as_slice(),
        )
        .map_err(failed)?;
        Ok(Exit::Ok)
    }
}

/// Starts a reader.
pub(crate) fn launch() -> std::io::Result<ConfinedReader> {
    ConfinedReader::start(&[VERB.into()], PATIENCE)
}
