//! Verbs that copy and move what is in use.

mod far;
mod freeze_commands;
mod live_copy;
mod receive_disk;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum MovingVerb {
        /// Copy a disk while it is used, here or to another host
        "live-copy" => LiveCopy(live_copy::LiveCopyArgs),
    }
    internal {
        /// Receive a disk from the holdfast of another host
        "receive-disk" => ReceiveDisk(receive_disk::ReceiveDiskArgs),
        /// Freeze and thaw by commands, for live-copy
        "freeze-commands" => FreezeCommands(freeze_commands::FreezeCommandsArgs),
    }
}
