//! Verbs about snapshots of this host's storage.

pub(crate) mod clone;
mod cron;
mod host;
mod peer;
mod point;
mod replicate;
mod rollback;
mod snapshot;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum HostSnapshotVerb {
        /// Take host snapshots of machines or datasets (ZFS, btrfs, LVM)
        "snapshot" => Snapshot(snapshot::SnapshotArgs),
        /// List and manage host snapshots and datasets
        "host" => Host(host::HostArgs),
        /// Roll a machine back to a host snapshot
        "rollback" => Rollback(rollback::RollbackArgs),
        /// Clone a machine or an image; the clone shares its storage
        "clone" => Clone(clone::CloneArgs),
        /// Apply a snapshot policy (sanoid.conf) once: take and prune
        "cron" => Cron(cron::CronArgs),
        /// Replicate host snapshots to another dataset or host
        "replicate" => Replicate(replicate::ReplicateArgs),
        /// Receive replicated snapshots, append-only (for SSH keys)
        "receive" => Receive(peer::ReceiveArgs),
    }
    internal {
        /// Answer the holdfast of another host
        "peer" => Peer(peer::PeerArgs),
    }
}
