//! `holdfast receive-disk`: the receiver of `holdfast live-copy`, which ssh starts.

use std::ffi::OsStr;
use std::path::PathBuf;

use holdfast_live_copy::{ByteStream, RECEIVE_COMMAND, ReceiveOutcome, StreamCloser, TargetScope, serve_receiver};

use super::copy_advice::copy_error;
use super::far::receive_tools;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::process::environment;

/// Arguments of `receive-disk`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReceiveDiskArgs {
    /// The version of the protocol
    #[arg(value_name = "PROTOCOL", required_unless_present = "below")]
    protocol: Option<String>,
    /// In ~/.ssh/authorized_keys: receive disks into files of this folder only, and nothing else
    #[arg(long, value_name = "FOLDER")]
    below: Option<PathBuf>,
}

impl Verb for ReceiveDiskArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "holdfast live-copy starts it on the other host by itself",
            line: "holdfast receive-disk 1",
        },
        Example {
            wish: "In ~/.ssh/authorized_keys, as command=\"...\" before the key of the host that sends",
            line: "holdfast receive-disk --below /srv/copies",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let [verb, version] = RECEIVE_COMMAND;
        let permitted = format!("holdfast {verb} {version}");
        let by_ssh = context.variable(environment::SSH_COMMAND).and_then(OsStr::to_str);
        let asked = match &self.protocol {
            Some(protocol) => format!("holdfast {verb} {protocol}"),
            None => by_ssh.unwrap_or_default().to_owned(),
        };
        if asked != permitted {
            return Err(Error::refused(
                Kind::Refused,
                format!("{asked:?} is refused: only {permitted:?} is permitted here"),
                "use holdfast live-copy, of about the same version",
            ));
        }
        let stream = ByteStream {
            input: Box::new(std::io::stdin()),
            output: Box::new(std::io::stdout()),
            closer: Box::new(StandardStreams),
        };
        let scope = self.below.as_deref().map_or(TargetScope::Host, TargetScope::Folder);
        let received = serve_receiver(stream, scope, &receive_tools(context)).map_err(copy_error)?;
        match received {
            ReceiveOutcome::Complete | ReceiveOutcome::Incomplete => Ok(Exit::Ok),
        }
    }
}

/// They are closed when the process ends.
struct StandardStreams;

impl StreamCloser for StandardStreams {
    fn close(&self) -> Option<String> {
        None
    }
}
