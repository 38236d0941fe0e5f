//! `holdfast container switch`.

use std::collections::BTreeMap;

use holdfast_engine::{plan_container_switch, switch_container};
use holdfast_image::{CurrentState, NewSnapshot};
use jiff::tz::TimeZone;
use serde::Serialize;

use super::{ContainerArg, now_s};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::process::time;
use crate::units;

/// Arguments of `container switch`.
#[derive(Debug, clap::Args)]
pub(super) struct SwitchArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// The snapshot to go back to
    #[arg(value_name = "SNAPSHOT")]
    snapshot: String,
    /// The name of the snapshot that keeps the current state [default: before-switch-TIME]
    #[arg(long, value_name = "NAME", conflicts_with = "discard")]
    keep_as: Option<String>,
    /// Delete what was written since the last snapshot
    #[arg(long)]
    discard: bool,
    /// Show what would happen; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for SwitchArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Go back to a snapshot, and keep the current state as another one",
            line: "holdfast container switch /srv/web1 before-upgrade",
        },
        Example {
            wish: "Go back, and delete the current state",
            line: "holdfast container switch /srv/web1 before-upgrade --discard",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let plan = plan_container_switch(&place, &self.snapshot)?;
        let name = self.keep_as.clone().unwrap_or_else(|| {
            let now = time::now().to_zoned(TimeZone::UTC);
            format!("before-switch-{}", now.strftime("%Y%m%dT%H%M%SZ"))
        });
        let kept_as = (!self.discard && plan.written_bytes > 0).then_some(name);
        if !self.dry_run {
            let current = match &kept_as {
                Some(name) => CurrentState::Keep(NewSnapshot {
                    name: Some(name.clone()),
                    created_s: Some(now_s()),
                    comment: String::new(),
                    properties: BTreeMap::new(),
                }),
                None => CurrentState::Discard,
            };
            switch_container(&place, &self.snapshot, &current)?;
        }
        context.report(&Switched {
            dry_run: self.dry_run,
            container: place.folder.display().to_string(),
            snapshot: self.snapshot.clone(),
            discarded_bytes: if kept_as.is_some() { 0 } else { plan.written_bytes },
            kept_as,
        })
    }
}

/// Report of `container switch`.
#[derive(Debug, Serialize)]
struct Switched {
    dry_run: bool,
    container: String,
    snapshot: String,
    kept_as: Option<String>,
    discarded_bytes: u64,
}

impl Report for Switched {
    fn command(&self) -> &'static str {
        "container switch"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let state = match &self.kept_as {
            Some(name) => format!("the state before is the snapshot {name}"),
            None if self.discarded_bytes > 0 => {
                format!(
                    "{} written since the last snapshot are deleted",
                    units::bytes(self.discarded_bytes)
                )
            }
            None => "nothing was written since the last snapshot".to_owned(),
        };
        let verb = if self.dry_run { "would be" } else { "is" };
        page.line(&format!(
            "{} {verb} at the snapshot {}; {state}",
            self.container, self.snapshot
        ));
    }
}
