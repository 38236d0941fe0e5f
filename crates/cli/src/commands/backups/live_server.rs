//! `holdfast live-server`: the process that serves disks to a machine while they are filled. `restore --live` starts
//! it.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::SystemClock;
use holdfast_engine::{Error as JobError, InstantError, InstantJob, paper_key, serve_instantly};
use holdfast_host::keep_request_buffers;
use holdfast_repo::Repository;
use holdfast_serve::nbd::Event;

use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::server_process::{ServerStart, received_key, report_ready, start_server};
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `live-server`.
#[derive(Debug, clap::Args)]
pub(crate) struct LiveServerArgs {
    /// The folder of the restore
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
}

impl Verb for LiveServerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Restores start it by themselves",
        line: "holdfast live-server -r /backup/vms --folder /images/.web1.holdfast",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Log file of the server, in the folder of the restore.
const LOG: &str = "server.log";

fn run(args: &LiveServerArgs, context: &Context) -> Result<Exit, Error> {
    let location = context.location()?;
    let key = received_key("the restore")?;
    let repository = context.open_by_key(&location, &key)?;
    drop(key);
    let console = context.shared_console();
    let events = move |event: &Event<'_>| match event {
        Event::RequestFailed { export, error, .. } | Event::OpenFailed { export, error, .. } => {
            console.warning(&format!("{export}: {error}"));
        }
        _ => {}
    };
    let (events, clock) = (Arc::new(events), Arc::clone(context.clock()));
    let mut left = Ok(());
    let mut ready = || left = leave(args);
    keep_request_buffers();
    context.work(1, |job| {
        serve_instantly(&repository, &args.folder, events, clock, job, &mut ready)
    })?;
    left?;
    Ok(Exit::Ok)
}

/// Reports to the restore that clients can connect.
fn leave(args: &LiveServerArgs) -> Result<(), Error> {
    let path = args.folder.join(LOG);
    let log = || report_ready(File::options().create(true).append(true).mode(0o600).open(&path)?);
    log().map_err(|source| Error::File {
        action: "write",
        path: path.clone(),
        source,
    })
}

/// Starts the server process of a restore, which outlives this process.
pub(crate) fn launch(instant: &InstantJob, repository: &Repository) -> holdfast_engine::Result<()> {
    let failed = |reason: String| {
        JobError::from(InstantError::Server {
            machine: instant.machine.clone(),
            reason,
        })
    };
    let words = [
        "live-server".into(),
        "--folder".into(),
        instant.folder.clone().into(),
        "--repository".into(),
        instant.repository.clone().into(),
    ];
    match start_server(&words, Some(paper_key(repository).text()), &SystemClock::new())
        .map_err(|error| failed(error.to_string()))?
    {
        ServerStart::Ready => Ok(()),
        ServerStart::Silent | ServerStart::Ended { .. } => Err(failed("it has ended, or does not answer".to_owned())),
    }
}
