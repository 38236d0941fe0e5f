//! `holdfast host hold` and `release`: who needs a host snapshot.

use std::ffi::OsString;

use serde::Serialize;

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::output::{Page, Report};

/// Arguments of `host hold` and `host release`.
#[derive(Debug, clap::Args)]
pub(super) struct HoldArgs {
    /// They, each by its full name: tank/vm@NAME, btrfs:/srv/vms@NAME, lvm:vg0/web1@NAME
    #[arg(value_name = "DATASET@NAME", required = true)]
    snapshots: Vec<OsString>,
    /// In whose name: each has to let go by itself
    #[arg(long, value_name = "WORD", default_value = "holdfast")]
    tag: String,
}

/// Hold, or let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nobody can remove them.
    Hold,
    /// They can be removed again.
    Release,
}

/// What a person may want of it.
pub(super) const EXAMPLES_HOLD: &[Example] = &[Example {
    wish: "Keep a host snapshot, whatever any policy says",
    line: "holdfast host hold tank/vm@before-update --tag audit",
}];

/// What a person may want of it.
pub(super) const EXAMPLES_RELEASE: &[Example] = &[Example {
    wish: "Let it go again",
    line: "holdfast host release tank/vm@before-update --tag audit",
}];

/// What `host hold` and `host release` answer.
#[derive(Debug, Serialize)]
struct Changed {
    snapshots: Vec<String>,
    tag: String,
    #[serde(skip)]
    change: Change,
}

impl Report for Changed {
    fn command(&self) -> &'static str {
        match self.change {
            Change::Hold => "host hold",
            Change::Release => "host release",
        }
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
pub(super) fn run(args: &HoldArgs, change: Change, context: &Context) -> Result<Exit, Error> {
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
    context.report(&Changed {
        snapshots: changed,
        tag: args.tag.clone(),
        change,
    })
}
