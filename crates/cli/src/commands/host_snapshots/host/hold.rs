//! `holdfast host hold` and `release`: prevent the removal of host snapshots, and allow it again.

use std::ffi::OsString;

use holdfast_host::provider::{HostSnapshotName, Provider, ProviderError};
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
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
    /// Check that the holds can be changed; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// The change to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Add the hold: the host snapshots cannot be removed.
    Hold,
    /// Release the hold.
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
    dry_run: bool,
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
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        for snapshot in &self.snapshots {
            let tag = &self.tag;
            page.line(&match (self.change, self.dry_run) {
                (Change::Hold, false) => format!("{snapshot} is held by {tag}"),
                (Change::Release, false) => format!("{snapshot} is not held by {tag} any more"),
                (Change::Hold, true) => format!("would hold {snapshot} by {tag}"),
                (Change::Release, true) => format!("would release {snapshot} from {tag}"),
            });
        }
    }
}

/// Returns an error if the host snapshot does not exist.
pub(super) fn require_host_snapshot(provider: &dyn Provider, name: &HostSnapshotName) -> Result<(), Error> {
    let snapshots = provider.snapshots(&name.dataset.name);
    let snapshots = snapshots.map_err(holdfast_engine::Error::from)?;
    if snapshots.iter().any(|snapshot| snapshot.name == *name) {
        return Ok(());
    }
    Err(Error::refused(
        Kind::NotFound,
        format!("there is no host snapshot {name}"),
        "holdfast host list shows those that there are",
    ))
}

/// Returns an error if the change would fail: the hold already exists, or there is none to release. Succeeds if holds
/// cannot be listed.
fn refuse_known_failure(
    provider: &dyn Provider,
    name: &HostSnapshotName,
    tag: &str,
    change: Change,
) -> Result<(), Error> {
    require_host_snapshot(provider, name)?;
    let Some(tags) = provider.hold_tags(name).map_err(holdfast_engine::Error::from)? else {
        return Ok(());
    };
    let is_held = tags.iter().any(|known| known == tag);
    let failure = match (change, is_held) {
        (Change::Hold, true) => ProviderError::Held {
            what: name.to_string(),
            reason: format!("by {tag} already"),
        },
        (Change::Release, false) => ProviderError::NotFound {
            what: format!("hold {tag} of {name}"),
        },
        (Change::Hold, false) | (Change::Release, true) => return Ok(()),
    };
    Err(holdfast_engine::Error::from(failure).into())
}

/// Adds or removes the hold `--tag` on each host snapshot.
fn run(args: &HolderArgs, change: Change, context: &Context) -> Result<Exit, Error> {
    let providers = datasets::providers(context);
    let mut changed = Vec::new();
    for word in &args.snapshots {
        let name = datasets::parse_snapshot(word)?;
        let provider = providers.of_dataset(&name.dataset);
        match (change, args.dry_run) {
            (_, true) => refuse_known_failure(provider, &name, &args.tag, change)?,
            (Change::Hold, false) => provider.hold(&name, &args.tag).map_err(holdfast_engine::Error::from)?,
            (Change::Release, false) => provider
                .release(&name, &args.tag)
                .map_err(holdfast_engine::Error::from)?,
        }
        changed.push(name.to_string());
    }
    context.report(&HoldChanged {
        dry_run: args.dry_run,
        snapshots: changed,
        tag: args.tag.clone(),
        change,
    })
}
