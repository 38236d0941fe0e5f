//! `holdfast container resume`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_engine::{
    ContainerPlace, ResumeChoice, ResumePlan, RuntimeRequest, check_resume, plan_resume, preview_resume,
    restore_memory, return_to_memory, unmount_container,
};
use serde::Serialize;

use super::ContainerArg;
use super::runtime_args::{RuntimeProgramArgs, absolute};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::empty_mount_point;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Arguments of `container resume`.
#[derive(Debug, clap::Args)]
pub(super) struct ResumeContainerArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// The name of the container for runc [default: as in the snapshot]
    #[arg(long, value_name = "ID")]
    runc: Option<String>,
    /// Use the config.json in this folder, also if it is not the one of the snapshot
    #[arg(long, value_name = "FOLDER")]
    bundle: Option<PathBuf>,
    #[command(flatten)]
    programs: RuntimeProgramArgs,
    /// Check everything, and show what would happen; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for ResumeContainerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Go on where a snapshot with memory was taken, after container switch",
        line: "holdfast container resume /srv/web1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let choice = ResumeChoice {
            id: self.runc.clone(),
            root: self.programs.root()?,
            bundle: self.bundle.as_deref().map(absolute).transpose()?,
        };
        let plan = plan_resume(&place, &choice)?;
        let folder = empty_mount_point(&plan.folder)?;
        let tools = self.programs.tools(context);
        let runtime = self.programs.request(&plan.id, plan.root.clone(), &tools)?;
        let mut report = ContainerResumed {
            dry_run: self.dry_run,
            container: place.folder.display().to_string(),
            snapshot: plan.snapshot.clone(),
            folder: folder.display().to_string(),
            runc: plan.id.clone(),
            restore_ms: None,
        };
        if self.dry_run {
            preview_resume(&plan, &runtime)?;
            return context.report(&report);
        }
        check_resume(&plan, &runtime)?;
        let words: Vec<OsString> = vec![
            "container".into(),
            "mount-server".into(),
            place.folder.clone().into(),
            folder.clone().into(),
        ];
        match context.serve_in_background(words, &folder, None) {
            Ok(None) => {}
            Ok(Some(exit)) => {
                // A mount that fails late, after a replay of the journal, has changed the disk.
                let returned = context.work(1, |_| return_to_memory(&place, &plan));
                warn_of_left(returned, &place, &plan, context);
                return Ok(exit);
            }
            Err(error) => {
                warn_of_left(undo(&place, &plan, context), &place, &plan, context);
                return Err(error);
            }
        }
        let took = restore(&place, &plan, &runtime, context)?;
        report.restore_ms = Some(took.as_secs_f64() * 1000.0);
        context.report(&report)
    }
}

/// Starts the processes. If that fails, the container is as it was: not mounted, and at the snapshot.
fn restore(
    place: &ContainerPlace,
    plan: &ResumePlan,
    runtime: &RuntimeRequest<'_>,
    context: &Context,
) -> Result<Duration, Error> {
    let restored = context.work(1, |job| restore_memory(place, plan, runtime, job));
    if restored.is_err() {
        warn_of_left(undo(place, plan, context), place, plan, context);
    }
    restored
}

/// Unmounts the container, and puts its disk back to the snapshot.
fn undo(place: &ContainerPlace, plan: &ResumePlan, context: &Context) -> Result<(), Error> {
    context.work(1, |job| {
        unmount_container(place, job)?;
        return_to_memory(place, plan)
    })
}

fn warn_of_left(undone: Result<(), Error>, place: &ContainerPlace, plan: &ResumePlan, context: &Context) {
    if let Err(error) = undone {
        context.console().warning(&format!(
            "{} is not at the snapshot {} any more: {}; unmount it from {} if it is mounted, and holdfast container \
             switch goes back",
            place.folder.display(),
            plan.snapshot,
            holdfast_block::error_text(&error),
            plan.folder.display(),
        ));
    }
}

/// Report of `container resume`.
#[derive(Debug, Serialize)]
struct ContainerResumed {
    dry_run: bool,
    container: String,
    snapshot: String,
    folder: String,
    runc: String,
    restore_ms: Option<f64>,
}

impl Report for ContainerResumed {
    fn command(&self) -> &'static str {
        "container resume"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let Self {
            container,
            snapshot,
            folder,
            runc,
            ..
        } = self;
        page.line(&match self.restore_ms {
            Some(took) => format!(
                "{runc} runs on from the snapshot {snapshot}, restored in {took:.0} ms; {container} is mounted on {folder}"
            ),
            None => format!("would mount {container} on {folder}, and resume {runc} from the snapshot {snapshot}"),
        });
    }
}
