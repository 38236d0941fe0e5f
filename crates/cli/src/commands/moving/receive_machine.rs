//! `holdfast receive-machine`: the side of the other host of `holdfast migrate`, which ssh starts.

use std::sync::Arc;

use holdfast_migration::{FarTools, MovingHypervisor, RECEIVE_MACHINE_COMMAND, serve_far};

use super::far::{program, require_protocol};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::Hypervisors;
use crate::process::time;

/// Arguments of `receive-machine`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReceiveMachineArgs {
    /// The version of the protocol
    #[arg(value_name = "PROTOCOL")]
    protocol: String,
    /// The hypervisor's address: qemu:///system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
}

impl Verb for ReceiveMachineArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "holdfast migrate starts it on the other host by itself",
        line: "holdfast receive-machine 1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        require_protocol(&self.protocol, RECEIVE_MACHINE_COMMAND)?;
        let hypervisors = Hypervisors::new(self.connect.as_deref(), context);
        let tools = far_tools(hypervisors.libvirt()?, context);
        serve_far(std::io::stdin(), std::io::stdout(), &tools).map_err(|source| Error::File {
            action: "answer requests on",
            path: "standard input".into(),
            source,
        })?;
        Ok(Exit::Ok)
    }
}

/// What this host needs to receive machines.
pub(super) fn far_tools<'a>(hypervisor: &'a dyn MovingHypervisor, context: &Context) -> FarTools<'a> {
    FarTools {
        hypervisor,
        program: program(),
        clock: Arc::clone(context.clock()),
        now_ms: &|| time::now().as_millisecond(),
        image_folder: None,
        report: &drop,
    }
}
