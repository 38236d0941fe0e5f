//! `holdfast host datasets`: lists the datasets of this host and their sizes.

use std::ffi::OsString;

use holdfast_host::provider::{DatasetState, ProviderError, ProviderKind};
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// Arguments of `host datasets`.
#[derive(Debug, clap::Args)]
pub(super) struct DatasetsArgs {
    /// Only these; without any, all of ZFS, all mounted subvolumes of btrfs, and all thin volumes of LVM
    #[arg(value_name = "DATASET")]
    datasets: Vec<OsString>,
}

impl Verb for DatasetsArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See the datasets, and their sizes",
        line: "holdfast host datasets",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `host datasets`.
#[derive(Debug, Serialize)]
struct DatasetsListed {
    datasets: Vec<DatasetRow>,
}

/// A dataset and its sizes.
#[derive(Debug, Serialize)]
pub(super) struct DatasetRow {
    pub(super) dataset: String,
    /// Where it is mounted.
    pub(super) folder: Option<String>,
    is_volume: bool,
    used_bytes: Option<u64>,
    snapshots_bytes: Option<u64>,
    referenced_bytes: Option<u64>,
    available_bytes: Option<u64>,
    /// 1.5 if the data takes two thirds of its size.
    compression_ratio: Option<f64>,
    origin: Option<String>,
}

impl From<DatasetState> for DatasetRow {
    fn from(state: DatasetState) -> Self {
        Self {
            dataset: state.dataset.to_string(),
            folder: state.folder.map(|folder| folder.display().to_string()),
            is_volume: state.is_volume,
            used_bytes: state.used_bytes,
            snapshots_bytes: state.snapshots_bytes,
            referenced_bytes: state.referenced_bytes,
            available_bytes: state.available_bytes,
            #[expect(clippy::cast_precision_loss, reason = "a ratio has four digits")]
            compression_ratio: state.compression_percent.map(|percent| percent as f64 / 100.0),
            origin: state.origin,
        }
    }
}

impl Report for DatasetsListed {
    fn command(&self) -> &'static str {
        "host datasets"
    }

    fn human(&self, page: &mut Page) {
        if self.datasets.is_empty() {
            page.line("there is no dataset of ZFS, no thin volume of LVM, and no subvolume of btrfs is mounted; any folder on XFS can be one: reflink:FOLDER");
            return;
        }
        let mut table = Table::new([
            Column::long_text("DATASET"),
            Column::number("USED"),
            Column::number("SNAPSHOTS"),
            Column::number("REFERS"),
            Column::number("FREE"),
            Column::number("RATIO"),
            Column::long_text("FOLDER"),
        ]);
        let bytes = |bytes: Option<u64>| bytes.map(units::bytes).unwrap_or_default();
        for one in &self.datasets {
            table.row([
                one.dataset.clone(),
                bytes(one.used_bytes),
                bytes(one.snapshots_bytes),
                bytes(one.referenced_bytes),
                bytes(one.available_bytes),
                one.compression_ratio
                    .map(|ratio| format!("{ratio:.2}"))
                    .unwrap_or_default(),
                match (&one.folder, one.is_volume) {
                    (Some(folder), _) => folder.clone(),
                    (None, true) => "a volume".to_owned(),
                    (None, false) => "not mounted".to_owned(),
                },
            ]);
        }
        page.table(&table);
    }
}

fn run(args: &DatasetsArgs, context: &Context) -> Result<Exit, Error> {
    let providers = datasets::providers(context);
    let mut states = Vec::new();
    if args.datasets.is_empty() {
        for kind in ProviderKind::ALL {
            match providers.of(kind).datasets() {
                Ok(found) => states.extend(found),
                Err(error) if is_without(&error) => {}
                Err(error) => return Err(holdfast_engine::Error::from(error).into()),
            }
        }
    }
    for dataset in datasets::parse_all(&args.datasets)? {
        let state = providers.of_dataset(&dataset).dataset(&dataset.name);
        states.push(state.map_err(holdfast_engine::Error::from)?);
    }
    context.report(&DatasetsListed {
        datasets: states.into_iter().map(DatasetRow::from).collect(),
    })
}

/// Whether this host does not use the provider: its program is missing or gets no answer from the kernel.
pub(super) fn is_without(error: &ProviderError) -> bool {
    matches!(
        error,
        ProviderError::Tool(holdfast_host::ToolError::NotFound { .. }) | ProviderError::NoService { .. }
    )
}
