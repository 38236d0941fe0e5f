//! `holdfast host hold` and `release`: keep a host snapshot from being removed.

use std::ffi::OsString;

use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::output::{Page, Report};

/// Arguments of `host hold`.
#[derive(Debug, clap::Args)]
pub(super) struct HoldArgs {
    #[command(flatten)]
    hold: HolderArgs,
}

/// Arguments of `host release`.
#[derive(Debug, clap::Args)]
pub(super) struct ReleaseArgs {
    #[command(flatten)]
    hold: HolderArgs,
}

/// Which host snapshots, and the name of the hold.
#[derive(Debug, clap::Args)]
struct HolderArgs {
    /// Host snapshots: tank/vm@NAME, btrfs:/srv/vms@NAME, lvm:vg0/web1@NAME
    #[arg(value_name = "DATASET@NAME", required = true)]
    snapshots: Vec<OsString>,
    /// Tag of the hold; each tag is released by itself
    #[arg(long, value_name = "WORD", default_value = "holdfast")]
    tag: String,
}

/// Hold, or let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// They cannot be removed.
    Hold,
    /// They can be removed again.
    Release,
}

impl Verb for HoldArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Keep a host snapshot regardless of any policy",
        line: "holdfast host hold tank/vm@before-update --tag audit",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(&self.hold, Change::Hold, context)
    }
}

impl Verb for ReleaseArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Release it",
        line: "holdfast host release tank/vm@before-update --tag audit",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(&self.hold, Change::Release, context)
    }
}

/// What `host hold` and `host release` answer.
#[derive(Debug, Serialize)]
struct HoldChanged {
    snapshots: Vec<String>,
    tag: String,
    #[serde(skip)]
    change: Change,
}

impl Report for HoldChanged {
    fn command(&self) -> &'static str {
        match self.change {
            Change::Hold => "host hold",
            Change::Release => "host release",
        }
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        for snapshot in &self.snapshots {
            page.line(&match self.change {
                Change::Hold => format!("{snapshot} is held by {}", self.tag),
                Change::Release => format!("{snapshot} is not held by {} any more", self.tag),
            });
        }
    }
}

/// Holds, or lets go.
fn run(args: &HolderArgs, change: Change, context: &Context) -> Result<Exit, Error> {
    let providers = datasets::providers(context);
    let mut changed = Vec::new();
    for word in &args.snapshots {
        let name = datasets::parse_snapshot(word)?;
        let provider = providers.of_dataset(&name.dataset);
        let done = match change {
            Change::Hold => provider.hold(&name, &args.tag),
            Change::Release => provider.release(&name, &args.tag),
        };
        done.map_err(holdfast_engine::Error::from)?;
        changed.push(name.to_string());
    }
    context.report(&HoldChanged {
        snapshots: changed,
        tag: args.tag.clone(),
        change,
    })
}
