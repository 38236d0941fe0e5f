//! `holdfast receive-container`: the side of the other host of `holdfast migrate` of a container, which ssh starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{ContainerPlace, DiskTransport};
use holdfast_migration::{ArrivalTools, RECEIVE_CONTAINER_COMMAND, serve_arrivals};

use super::far::{program, require_protocol};
use crate::args::{Example, SharedOptions};
use crate::commands::images::container::start_mount;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `receive-container`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReceiveContainerArgs {
    /// The version of the protocol
    #[arg(value_name = "PROTOCOL")]
    protocol: String,
}

impl Verb for ReceiveContainerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "holdfast migrate starts it on the other host by itself",
        line: "holdfast receive-container 1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        require_protocol(&self.protocol, RECEIVE_CONTAINER_COMMAND)?;
        let mount = |place: &ContainerPlace, point: &Path, transport| mount_arrived(place, point, transport, context);
        let tools = arrival_tools(context, None, &drop, &mount);
        serve_arrivals(std::io::stdin(), std::io::stdout(), &tools).map_err(|source| Error::File {
            action: "answer requests on",
            path: "standard input".into(),
            source,
        })?;
        Ok(Exit::Ok)
    }
}

/// What this host needs to receive containers into `folder`.
pub(super) fn arrival_tools<'a>(
    context: &Context,
    folder: Option<PathBuf>,
    report: &'a (dyn Fn(serde_json::Value) + Sync),
    mount: &'a (dyn Fn(&ContainerPlace, &Path, DiskTransport) -> Result<(), String> + Sync),
) -> ArrivalTools<'a> {
    ArrivalTools {
        clock: Arc::clone(context.clock()),
        runtime: context.runtime_folder(),
        program: program(),
        folder,
        report,
        mount,
    }
}

/// Mounts a container that has come.
pub(super) fn mount_arrived(
    place: &ContainerPlace,
    point: &Path,
    transport: DiskTransport,
    context: &Context,
) -> Result<(), String> {
    start_mount(place, point, transport, context).map_err(|error| holdfast_block::error_text(&error))
}
