//! `holdfast host clone`: a writable dataset of a host snapshot.

use std::ffi::OsString;
use std::path::Path;

use holdfast_host::provider::ProviderKind;
use serde::Serialize;

use super::datasets::DatasetRow;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::output::{Page, Report};

/// Arguments of `host clone`.
#[derive(Debug, clap::Args)]
pub(super) struct HostCloneArgs {
    /// The host snapshot, by its full name: tank/vm@NAME, btrfs:/srv/vms@NAME, lvm:vg0/web1@NAME
    #[arg(value_name = "DATASET@NAME")]
    snapshot: OsString,
    /// What the clone is called: a dataset of the same pool, a volume of the same group (vg0/trial), or a folder on the same file system that is not there yet
    #[arg(value_name = "CLONE")]
    clone: String,
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

/// What `host clone` answers.
#[derive(Debug, Serialize)]
struct Cloned {
    snapshot: String,
    clone: DatasetRow,
}

impl Report for Cloned {
    fn command(&self) -> &'static str {
        "host clone"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!("{} is a clone of {}", self.clone.dataset, self.snapshot));
        if let Some(folder) = &self.clone.folder {
            page.line(&format!("its files are in {folder}"));
        }
    }
}

/// Clones.
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
    let clone = providers.of_dataset(&snapshot.dataset).clone_to(&snapshot, &name);
    context.report(&Cloned {
        snapshot: snapshot.to_string(),
        clone: DatasetRow::from(clone.map_err(holdfast_engine::Error::from)?),
    })
}
