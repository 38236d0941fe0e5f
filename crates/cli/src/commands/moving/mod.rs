//! Verbs that copy and move what is in use.

mod copy_advice;
mod copy_target;
mod far;
mod freeze_commands;
mod live_copy;
mod migrate;
mod receive_container;
mod receive_disk;
mod receive_machine;
mod receive_migration;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum MovingVerb {
        /// Copy a disk while it is used, here or to another host
        "live-copy" => LiveCopy(live_copy::LiveCopyArgs),
        /// Move a machine or a container to another host while it is used
        "migrate" => Migrate(migrate::MigrateArgs),
    }
    internal {
        /// Receive a disk from the holdfast of another host
        "receive-disk" => ReceiveDisk(receive_disk::ReceiveDiskArgs),
        /// Receive a machine from the holdfast of another host
        "receive-machine" => ReceiveMachine(receive_machine::ReceiveMachineArgs),
        /// Receive a container from the holdfast of another host
        "receive-container" => ReceiveContainer(receive_container::ReceiveContainerArgs),
        /// Receive a machine or a container by one connection of many
        "receive-migration" => ReceiveMigration(receive_migration::ReceiveMigrationArgs),
        /// Freeze and thaw by commands, for live-copy
        "freeze-commands" => FreezeCommands(freeze_commands::FreezeCommandsArgs),
    }
}
