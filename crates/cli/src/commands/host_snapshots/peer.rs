//! `holdfast peer`: answers requests of another host's `holdfast` over ssh; and `holdfast receive`, which is restricted
//! to one dataset.

use std::ffi::OsStr;
use std::sync::Arc;

use holdfast_host::provider::{Dataset, ProviderKind};
use holdfast_replicate::{PEER_PROTOCOL, PeerServer, serve_peer};

use crate::args::{Example, SharedOptions};
use crate::commands::host_snapshots::replicate::local_side;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::process::environment;

/// Arguments of `peer`.
#[derive(Debug, clap::Args)]
pub(crate) struct PeerArgs {
    /// The version of the protocol
    #[arg(value_name = "PROTOCOL")]
    protocol: String,
}

/// Arguments of `receive`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReceiveArgs {
    /// The dataset below which the other host may add snapshots; it can remove and change nothing
    #[arg(long, value_name = "DATASET", required = true)]
    append_only: String,
}

impl Verb for PeerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "holdfast replicate starts it on the other host by itself",
        line: "holdfast peer 1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

impl Verb for ReceiveArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "In ~/.ssh/authorized_keys, as command=\"...\" before the key of the host that sends",
        line: "holdfast receive --append-only tank/backup/web",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run_receive(self, context)
    }
}

fn run(args: &PeerArgs, context: &Context) -> Result<Exit, Error> {
    check(&format!("holdfast peer {}", args.protocol))?;
    serve(None, context)
}

/// Answers requests for one dataset.
fn run_receive(args: &ReceiveArgs, context: &Context) -> Result<Exit, Error> {
    let root = root(&args.append_only)?;
    match context.variable(environment::SSH_COMMAND).and_then(OsStr::to_str) {
        Some(asked) => check(asked)?,
        None => {
            return Err(Error::usage(
                "there is no command from ssh",
                "put it before a key in ~/.ssh/authorized_keys: restrict,command=\"holdfast receive --append-only ...\" ssh-ed25519 ...",
            ));
        }
    }
    serve(Some(root), context)
}

fn root(word: &str) -> Result<Dataset, Error> {
    // A dataset that does not exist yet has no folder to look up.
    let dataset = if word.starts_with('/') {
        Dataset {
            provider: ProviderKind::Btrfs,
            name: word.trim_end_matches('/').to_owned(),
        }
    } else {
        let parsed = datasets::parse(OsStr::new(word))?;
        parsed.unwrap_or_else(|| Dataset {
            provider: ProviderKind::Zfs,
            name: word.to_owned(),
        })
    };
    match dataset.provider {
        ProviderKind::Zfs | ProviderKind::Btrfs if !dataset.name.is_empty() => Ok(dataset),
        _ => Err(Error::usage(
            format!("{word} is no dataset that could be received into"),
            "name one of ZFS, or a subvolume of btrfs",
        )),
    }
}

/// The request must match this program and a known version of the protocol.
fn check(asked: &str) -> Result<(), Error> {
    if asked == format!("holdfast peer {PEER_PROTOCOL}") {
        return Ok(());
    }
    Err(Error::usage(
        format!("{asked:?} is refused: what is admitted here is \"holdfast peer {PEER_PROTOCOL}\""),
        "use holdfast replicate, of about the same version",
    ))
}

fn serve(root: Option<Dataset>, context: &Context) -> Result<Exit, Error> {
    let server = PeerServer {
        sides: &|kind| local_side(kind, context),
        root,
        clock: Arc::clone(context.clock()),
    };
    let notes = serve_peer(&server, std::io::stdin(), std::io::stdout())?;
    for note in &notes {
        context.console().warning(note);
    }
    Ok(Exit::Ok)
}
