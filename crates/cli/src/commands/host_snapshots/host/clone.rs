//! `holdfast host clone`: clones a host snapshot to a writable dataset.

use std::ffi::OsString;
use std::path::Path;

use holdfast_host::provider::{Dataset, Provider, ProviderKind};
use serde::Serialize;

use super::datasets::DatasetRow;
use super::hold::require_host_snapshot;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::machines::datasets;
use crate::output::{Page, Report};

/// Arguments of `host clone`.
#[derive(Debug, clap::Args)]
pub(super) struct HostCloneArgs {
    /// The host snapshot, by its full name: tank/vm@NAME, btrfs:/srv/vms@NAME, lvm:vg0/web1@NAME
    #[arg(value_name = "DATASET@NAME")]
    snapshot: OsString,
    /// The name of the clone: a dataset of the same pool, a volume of the same group (vg0/trial), or a new folder on the same file system
    #[arg(value_name = "CLONE")]
    clone: String,
    /// Check that the host snapshot exists, and that the name is free; create nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for HostCloneArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Look into a host snapshot, and try things out, without harm to anything",
        line: "holdfast host clone tank/vm@before-update tank/trial",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `host clone`.
#[derive(Debug, Serialize)]
struct Cloned {
    dry_run: bool,
    snapshot: String,
    /// The name of the clone.
    dataset: String,
    /// Null for a dry run.
    clone: Option<DatasetRow>,
}

impl Report for Cloned {
    fn command(&self) -> &'static str {
        "host clone"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let Some(clone) = &self.clone else {
            return page.line(&format!("would clone {} to {}", self.snapshot, self.dataset));
        };
        page.line(&format!("{} is a clone of {}", clone.dataset, self.snapshot));
        if let Some(folder) = &clone.folder {
            page.line(&format!("its files are in {folder}"));
        }
    }
}

fn run(args: &HostCloneArgs, context: &Context) -> Result<Exit, Error> {
    let snapshot = datasets::parse_snapshot(&args.snapshot)?;
    let providers = datasets::providers(context);
    let name = match snapshot.dataset.provider {
        ProviderKind::Zfs => args.clone.clone(),
        ProviderKind::Lvm => {
            let name = args.clone.strip_prefix("lvm:").unwrap_or(&args.clone);
            name.strip_prefix("/dev/").unwrap_or(name).to_owned()
        }
        ProviderKind::Btrfs | ProviderKind::Reflink => {
            let path = std::path::absolute(Path::new(&args.clone)).map_err(|source| Error::File {
                action: "find",
                path: args.clone.clone().into(),
                source,
            })?;
            path.display().to_string()
        }
    };
    let provider = providers.of_dataset(&snapshot.dataset);
    if args.dry_run {
        require_host_snapshot(provider, &snapshot)?;
        let clone = Dataset {
            provider: snapshot.dataset.provider,
            name,
        };
        refuse_existing(provider, &clone)?;
        return context.report(&Cloned {
            dry_run: true,
            snapshot: snapshot.to_string(),
            dataset: clone.to_string(),
            clone: None,
        });
    }
    let clone = provider.clone_to(&snapshot, &name);
    let clone = DatasetRow::from(clone.map_err(holdfast_engine::Error::from)?);
    context.report(&Cloned {
        dry_run: false,
        snapshot: snapshot.to_string(),
        dataset: clone.dataset.clone(),
        clone: Some(clone),
    })
}

/// Returns an error if the clone's name is in use.
fn refuse_existing(provider: &dyn Provider, clone: &Dataset) -> Result<(), Error> {
    let is_taken = if clone.provider.has_folders() {
        Path::new(&clone.name).symlink_metadata().is_ok()
    } else {
        provider.dataset(&clone.name).is_ok()
    };
    if !is_taken {
        return Ok(());
    }
    Err(Error::refused(
        Kind::Exists,
        format!("{clone} exists already"),
        "choose another name for the clone",
    ))
}
