//! `holdfast live-server`: the process that serves disks to a machine while they are filled. `restore --live` starts
//! it.

use std::fs::File;
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::{Error as JobError, InstantError, InstantJob, paper_key, serve_instantly};
use holdfast_host::LineProcess;
use holdfast_repo::Repository;
use holdfast_serve::nbd::Event;
use rustix::process::setsid;
use zeroize::Zeroizing;

use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::password::Password;
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

const READY: &str = "ready";
/// Time limit for opening the repository, which connects to no server.
const READY_DEADLINE: Duration = Duration::from_secs(120);
/// Log file of the server, in the folder of the restore.
const LOG: &str = "server.log";
/// Maximum bytes of the line with the key.
const LINE_BYTES_MAX: u64 = 1 << 10;

fn run(args: &LiveServerArgs, context: &Context) -> Result<Exit, Error> {
    // Interrupting the restore from a terminal, or killing its group, must not end the server.
    setsid().ok();
    let location = context.location()?;
    let key = received_key()?;
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
    context.work(1, |job| {
        serve_instantly(&repository, &args.folder, events, clock, job, &mut ready)
    })?;
    left?;
    Ok(Exit::Ok)
}

/// Reports to the restore that clients can connect, and detaches from its terminal and pipes.
fn leave(args: &LiveServerArgs) -> Result<(), Error> {
    let path = args.folder.join(LOG);
    let log = || {
        let log = File::options().create(true).append(true).mode(0o600).open(&path)?;
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{READY}").and_then(|()| stdout.flush())?;
        rustix::stdio::dup2_stdout(&log)?;
        rustix::stdio::dup2_stderr(&log)?;
        std::io::Result::Ok(())
    };
    log().map_err(|source| Error::File {
        action: "write",
        path: path.clone(),
        source,
    })
}

/// Reads the paper key of the repository from the first line of standard input.
///
/// The restore has already derived the key from the password, which is slow by design and may have required a prompt.
fn received_key() -> Result<Password, Error> {
    let mut line = Zeroizing::new(String::new());
    let read = std::io::stdin().lock().take(LINE_BYTES_MAX).read_line(&mut line);
    read.map_err(|source| Error::File {
        action: "read",
        path: "/dev/stdin".into(),
        source,
    })?;
    let bytes = Zeroizing::new(line.trim_end().as_bytes().to_vec());
    Ok(Password::from_line(bytes, "the restore")?)
}

/// Starts the server process of a restore, which outlives this process. The key of the repository is passed through a
/// pipe only.
pub(crate) fn launch(instant: &InstantJob, repository: &Repository) -> holdfast_engine::Result<()> {
    let failed = |reason: String| {
        JobError::from(InstantError::Server {
            machine: instant.machine.clone(),
            reason,
        })
    };
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let words = [
        "live-server".into(),
        "--folder".into(),
        instant.folder.clone().into(),
        "--repository".into(),
        instant.repository.clone().into(),
    ];
    let mut process = LineProcess::start(&program.into(), &words).map_err(|error| failed(error.to_string()))?;
    process
        .send_line(paper_key(repository).text())
        .map_err(|error| failed(error.to_string()))?;
    match process.receive_line(READY_DEADLINE) {
        Some(line) if line == READY => Ok(()),
        _ => Err(failed("it has ended, or does not answer".to_owned())),
    }
}
