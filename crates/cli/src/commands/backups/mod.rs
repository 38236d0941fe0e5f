//! Verbs that make backups, and those that read, keep and remove them.

pub(crate) mod backup;
mod copy;
mod diff;
mod forget;
mod list;
mod live_server;
mod machines;
mod prune;
pub(crate) mod restore;
mod resume;
mod serve;
mod show;
mod verify;
mod watchdog;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum BackupVerb {
        /// List machines, and what a backup would take of them
        "machines" => Machines(machines::MachinesArgs),
        /// Back up disks of a machine as one snapshot
        "backup" => Backup(backup::BackupArgs),
        /// List snapshots
        "list" => List(list::ListArgs),
        /// Show everything that is known of a snapshot
        "show" => Show(show::ShowArgs),
        /// Tell what changed between two snapshots
        "diff" => Diff(diff::DiffArgs),
        /// Restore disks of a snapshot, or a whole machine
        "restore" => Restore(restore::RestoreArgs),
        /// Go on with restores --live that were interrupted
        "resume" => Resume(resume::ResumeArgs),
        /// Prove that snapshots can be read, and are what was stored
        "verify" => Verify(verify::VerifyArgs),
        /// Open snapshots as block devices for other programs
        "serve" => Serve(serve::ServeArgs),
        /// Copy snapshots to another repository, and tell what is where
        "copy" => Copy(copy::CopyArgs),
        /// Remove the snapshots that no rule keeps
        "prune" => Prune(prune::PruneArgs),
        /// Remove single snapshots
        "forget" => Forget(forget::ForgetArgs),
        /// Keep snapshots from being removed
        "protect" => Protect(forget::ProtectArgs),
        /// Let protected snapshots be removed again
        "unprotect" => Unprotect(forget::UnprotectArgs),
    }
    internal {
        /// Serve the disks of a machine while they are filled
        "live-server" => LiveServer(live_server::LiveServerArgs),
        /// Watch over a machine while it is backed up
        "watchdog" => Watchdog(watchdog::WatchdogArgs),
    }
}
