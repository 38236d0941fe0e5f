//! Verbs about snapshots that the storage of this host makes.

pub(crate) mod clone;
mod cron;
mod host;
mod mount;
mod peer;
mod point;
mod replicate;
mod rollback;
mod snapshot;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum HostSnapshotVerb {
        /// Make host snapshots: of machines, or of datasets of ZFS, btrfs and LVM
        "snapshot" => Snapshot(snapshot::SnapshotArgs),
        /// Work on the host snapshots that are there
        "host" => Host(host::HostArgs),
        /// Take a machine back to a host snapshot
        "rollback" => Rollback(rollback::RollbackArgs),
        /// Make another machine of one as it is or was, or an image, which shares all with it
        "clone" => Clone(clone::CloneArgs),
        /// Mount a host snapshot, to look into it
        "mount" => Mount(mount::MountArgs),
        /// Unmount a host snapshot
        "unmount" => Unmount(mount::UnmountArgs),
        /// Carry out a policy of host snapshots once: take what is due, remove what has served its time
        "cron" => Cron(cron::CronArgs),
        /// Send host snapshots to another place, and to another host
        "replicate" => Replicate(replicate::ReplicateArgs),
        /// Let another host add its snapshots here, and nothing else: for ssh
        "receive" => Receive(peer::ReceiveArgs),
    }
    internal {
        /// Answer the holdfast of another host
        "peer" => Peer(peer::PeerArgs),
    }
}
