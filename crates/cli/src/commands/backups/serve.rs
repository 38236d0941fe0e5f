//! `holdfast serve`: serves disks of snapshots and images to other programs and hosts.

mod all;
mod document;
mod iscsi;
mod manage;
mod nbd;
mod run;
mod sources;
mod vhost_user;

use crate::args::{Example, SharedOptions, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    #[command(subcommand)]
    action: ServeVerb,
}

verbs! {
    enum ServeVerb {
        /// Serve the disks of snapshots and images over NBD, until Ctrl-C
        "nbd" => Nbd(nbd::NbdArgs),
        /// Serve the disks of snapshots and images over iSCSI, until Ctrl-C
        "iscsi" => Iscsi(iscsi::IscsiArgs),
        /// Serve disks to virtual machines of this host over vhost-user, until Ctrl-C
        "vhost-user" => VhostUser(vhost_user::VhostUserArgs),
        /// Serve the disks of snapshots and images over NBD and iSCSI, until Ctrl-C
        "all" => All(all::AllArgs),
        /// List running servers, their exports and clients
        "list" => List(manage::ListServersArgs),
        /// Add exports to a running server
        "add" => Add(manage::AddExportsArgs),
        /// Remove exports from a running server
        "remove" => Remove(manage::RemoveExportsArgs),
        /// Stop a running server
        "stop" => Stop(manage::StopServerArgs),
    }
}

impl Verb for ServeArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Open the newest snapshot of a machine as block devices",
        line: "holdfast serve nbd -r /backup/vms web1 --socket /run/web1.sock",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];
    const BELOW: &'static [VerbEntry] = ServeVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.action.run(context)
    }
}
