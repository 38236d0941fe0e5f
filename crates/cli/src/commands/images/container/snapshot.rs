//! `holdfast container snapshot`.

use std::time::Duration;

use holdfast_engine::{Consistency, SnapshotRequest, SnapshotState, TakenSnapshot, take_snapshot};
use serde::Serialize;

use super::{ContainerArg, now_s};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Arguments of `container snapshot`.
#[derive(Debug, clap::Args)]
pub(super) struct SnapshotArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// A name for the snapshot
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// A comment
    #[arg(long, value_name = "TEXT", default_value = "")]
    comment: String,
    /// Take no snapshot if the file system cannot be frozen
    #[arg(long, conflicts_with = "no_freeze")]
    require_freeze: bool,
    /// Do not freeze the file system: the snapshot is the disk as after a power failure
    #[arg(long)]
    no_freeze: bool,
}

impl Verb for SnapshotArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Take a snapshot before an upgrade",
        line: "holdfast container snapshot /srv/web1 before-upgrade",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let request = SnapshotRequest {
            name: self.name.clone(),
            comment: self.comment.clone(),
            created_s: now_s(),
            consistency: match (self.require_freeze, self.no_freeze) {
                (true, _) => Consistency::Frozen,
                (_, true) => Consistency::Crash,
                _ => Consistency::Automatic,
            },
        };
        let taken = context.work(1, |job| take_snapshot(&place, &request, job))?;
        if taken.state == SnapshotState::Crash && !self.no_freeze {
            context.console().warning(
                "the file system was not frozen, because it is not mounted where the server can see it: the snapshot is the disk as after a power failure",
            );
        }
        context.report(&SnapshotTaken::new(&taken, place.folder.display().to_string()))
    }
}

/// Report of `container snapshot`.
#[derive(Debug, Serialize)]
struct SnapshotTaken {
    container: String,
    id: String,
    name: String,
    consistency: &'static str,
    paused_ms: f64,
}

impl SnapshotTaken {
    fn new(taken: &TakenSnapshot, container: String) -> Self {
        Self {
            container,
            id: taken.id.clone(),
            name: taken.name.clone(),
            consistency: taken.state.word(),
            paused_ms: Duration::from_micros(taken.paused_us).as_secs_f64() * 1000.0,
        }
    }
}

impl Report for SnapshotTaken {
    fn command(&self) -> &'static str {
        "container snapshot"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let how = match self.consistency {
            "unmounted" => "the container is not mounted".to_owned(),
            "frozen" => format!("its file system was frozen for {:.1} ms", self.paused_ms),
            _ => format!("as after a power failure; writes waited for {:.1} ms", self.paused_ms),
        };
        page.line(&format!("{} of {}: {how}", self.name, self.container));
    }
}
