//! `holdfast container clone`.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_engine::{CloneContainerReport, CloneContainerRequest, check_clone, clone_container};
use holdfast_image::CONTAINER_FILE;
use holdfast_repo::{Processes as _, SystemProcesses};
use serde::Serialize;

use super::freeze_args::{FreezeArgs, warn_of_freeze};
use super::{ContainerArg, now_s};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs::note_places;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `container clone`.
#[derive(Debug, clap::Args)]
pub(super) struct CloneContainerArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// The folder to create
    #[arg(value_name = "NEW")]
    new: PathBuf,
    /// Clone this snapshot instead of the current state
    #[arg(long, value_name = "NAME", conflicts_with_all = ["require_freeze", "no_freeze"])]
    snapshot: Option<String>,
    #[command(flatten)]
    freeze: FreezeArgs,
    /// Show what would be made; make nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for CloneContainerArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Clone a container, also while it is used",
            line: "holdfast container clone /srv/web1 /srv/web2",
        },
        Example {
            wish: "Clone it as it was at a snapshot",
            line: "holdfast container clone /srv/web1 /srv/web2 --snapshot before-upgrade",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let source = self.container.place(context)?;
        let target = std::path::absolute(&self.new).map_err(|source| Error::File {
            action: "look at",
            path: self.new.clone(),
            source,
        })?;
        let request = CloneContainerRequest {
            source: &source,
            snapshot: self.snapshot.as_deref(),
            target: &target,
            consistency: self.freeze.consistency(),
            now_s: now_s(),
            process: &SystemProcesses.this(),
        };
        let mut report = ContainerCloned {
            dry_run: self.dry_run,
            container: target.display().to_string(),
            source: source.folder.display().to_string(),
            snapshot: self.snapshot.clone(),
            ..ContainerCloned::default()
        };
        if self.dry_run {
            check_clone(&request)?;
        } else {
            let in_source = source.folder.join(CONTAINER_FILE);
            let _noted = note_places([target.as_path(), in_source.as_path()], context);
            let made = context.work(1, |job| clone_container(&request, job))?;
            if let Some(taken) = &made.taken {
                warn_of_freeze(taken, context);
            }
            report.add(&made);
        }
        context.report(&report)
    }
}

/// Report of `container clone`.
#[derive(Debug, Default, Serialize)]
struct ContainerCloned {
    dry_run: bool,
    container: String,
    source: String,
    snapshot: Option<String>,
    /// Of the new container; none in a dry run.
    id: Option<String>,
    size_bytes: Option<u64>,
    shared_files: usize,
    copied_files: usize,
    copied_bytes: u64,
    consistency: Option<&'static str>,
    paused_ms: f64,
}

impl ContainerCloned {
    fn add(&mut self, made: &CloneContainerReport) {
        self.id = Some(made.id.clone());
        self.size_bytes = Some(made.size_bytes);
        self.shared_files = made.shared_count;
        self.copied_files = made.copied_count;
        self.copied_bytes = made.copied_bytes;
        if let Some(taken) = &made.taken {
            self.consistency = Some(taken.state.word());
            self.paused_ms = Duration::from_micros(taken.paused_us).as_secs_f64() * 1000.0;
        }
    }
}

impl Report for ContainerCloned {
    fn command(&self) -> &'static str {
        "container clone"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let of = match &self.snapshot {
            Some(snapshot) => format!("the snapshot {snapshot} of {}", self.source),
            None => self.source.clone(),
        };
        let Some(size_bytes) = self.size_bytes else {
            page.line(&format!("{} would be a clone of {of}", self.container));
            return;
        };
        let size = units::bytes(size_bytes);
        page.line(&format!("{} is a clone of {of}: {size} disk", self.container));
        page.line(&match self.copied_files {
            0 => "  it shares the bytes of its layers with the source; the file system separates what is written"
                .to_owned(),
            _ => format!("  {} copied", units::bytes(self.copied_bytes)),
        });
        match self.consistency {
            Some("frozen") => page.line(&format!("  the file system was frozen for {:.1} ms", self.paused_ms)),
            Some("crash") => page.line(&format!(
                "  as after a power failure; writes waited for {:.1} ms",
                self.paused_ms
            )),
            _ => {}
        }
    }
}
