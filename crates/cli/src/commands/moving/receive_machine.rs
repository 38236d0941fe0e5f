//! `holdfast receive-machine`: the side of the other host of `holdfast migrate`, which ssh starts.

use std::ffi::OsStr;
use std::sync::Arc;

use holdfast_host::BareHost;
use holdfast_migration::{FarTools, MovingHypervisor, RECEIVE_MACHINE_COMMAND, serve_far};

use super::far::{program, require_protocol};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::{connect_libvirt, libvirt_address, monitor_path};
use crate::process::time;

/// Arguments of `receive-machine`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReceiveMachineArgs {
    /// The version of the protocol
    #[arg(value_name = "PROTOCOL")]
    protocol: String,
    /// The hypervisor's address: qemu:///system, or qmp:PATH for a QEMU that will have its monitor there
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
        let hypervisor = far_hypervisor(self.connect.as_deref(), context)?;
        let tools = far_tools(&*hypervisor, context);
        serve_far(std::io::stdin(), std::io::stdout(), &tools).map_err(|source| Error::File {
            action: "answer requests on",
            path: "standard input".into(),
            source,
        })?;
        Ok(Exit::Ok)
    }
}

/// The hypervisor to which machines come.
pub(super) fn far_hypervisor(connect: Option<&str>, context: &Context) -> Result<Box<dyn MovingHypervisor>, Error> {
    if let Some(path) = connect.and_then(|address| monitor_path(OsStr::new(address))) {
        return Ok(Box::new(BareHost::new(path, Arc::clone(context.clock()))));
    }
    let libvirt = connect_libvirt(&libvirt_address(connect, context), context)?;
    Ok(Box::new(libvirt))
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
