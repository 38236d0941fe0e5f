//! `holdfast container check`.

use holdfast_image::{Backing, ChainStatus, CheckReport, ContainerLock, OpenOptions};
use serde::Serialize;

use super::ContainerArg;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `container check`.
#[derive(Debug, clap::Args)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    container: ContainerArg,
}

impl Verb for CheckArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Check the layers of a container",
        line: "holdfast container check /srv/web1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let status = ChainStatus::load(&place.folder).map_err(holdfast_engine::Error::from)?;
        let is_used = ContainerLock::is_held(&place.folder).map_err(holdfast_engine::Error::from)?;
        let mut layers = Vec::new();
        for layer in status.tree.layers() {
            let path = place.folder.join(&layer.file);
            // A layer that is written changes during the check.
            if is_used && layer.id == status.tree.top() {
                continue;
            }
            let options = OpenOptions {
                format: Some(layer.format),
                backing: Backing::Ignore,
                ..OpenOptions::default()
            };
            let checked = holdfast_image::check(&path, &options).map_err(holdfast_engine::Error::from)?;
            layers.push(CheckedLayerDocument::new(path.display().to_string(), &checked));
        }
        context.report(&ContainerChecked {
            container: place.folder.display().to_string(),
            top_skipped: is_used,
            layers,
        })
    }
}

/// The result for a layer.
#[derive(Debug, Serialize)]
struct CheckedLayerDocument {
    file: String,
    corruption_count: u64,
    leak_count: u64,
    problems: Vec<String>,
}

impl CheckedLayerDocument {
    fn new(file: String, report: &CheckReport) -> Self {
        Self {
            file,
            corruption_count: report.corruption_count,
            leak_count: report.leak_count,
            problems: report.problems.iter().map(|problem| problem.kind.to_string()).collect(),
        }
    }
}

/// Report of `container check`.
#[derive(Debug, Serialize)]
struct ContainerChecked {
    container: String,
    /// Whether the layer that is written was not checked, because the container is used.
    top_skipped: bool,
    layers: Vec<CheckedLayerDocument>,
}

impl Report for ContainerChecked {
    fn command(&self) -> &'static str {
        "container check"
    }

    fn exit(&self) -> Exit {
        if self.layers.iter().any(|layer| layer.corruption_count > 0) {
            Exit::Damage
        } else {
            Exit::Ok
        }
    }

    fn human(&self, page: &mut Page) {
        let mut leaked = 0;
        for layer in &self.layers {
            leaked += layer.leak_count;
            if layer.corruption_count > 0 {
                page.styled(
                    Style::Bad,
                    &format!("{}: {} errors", layer.file, units::count(layer.corruption_count)),
                );
                for problem in &layer.problems {
                    page.line(&format!("  {problem}"));
                }
            }
        }
        let is_sound = self.layers.iter().all(|layer| layer.corruption_count == 0);
        let state = if is_sound { "no errors" } else { "damaged" };
        page.line(&format!(
            "{}: {} checked, {state}",
            self.container,
            units::counted(self.layers.len() as u64, "layer", "layers")
        ));
        if leaked > 0 {
            page.line(&format!(
                "{} leaked clusters waste space; holdfast image check --repair frees them",
                units::count(leaked)
            ));
        }
        if self.top_skipped {
            page.line("the layer that is written was not checked: unmount the container first");
        }
    }
}
