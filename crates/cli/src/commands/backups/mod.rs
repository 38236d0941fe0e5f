//! Verbs that create backups, and verbs that read, keep and remove them.

pub(crate) mod backup;
mod copy;
mod diff;
mod files;
mod forget;
mod list;
mod live_server;
mod machines;
mod mount;
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
        /// List virtual machines, and the disks that a backup would read
        "machines" => Machines(machines::MachinesArgs),
        /// Back up machines or disk images as snapshots
        "backup" => Backup(backup::BackupArgs),
        /// List snapshots
        "list" => List(list::ListArgs),
        /// Show the details of a snapshot
        "show" => Show(show::ShowArgs),
        /// Show what changed between two snapshots
        "diff" => Diff(diff::DiffArgs),
        /// Restore disks or a whole machine from a snapshot
        "restore" => Restore(restore::RestoreArgs),
        /// Continue interrupted live restores (restore --live)
        "resume" => Resume(resume::ResumeArgs),
        /// Read snapshots back and check all their data
        "verify" => Verify(verify::VerifyArgs),
        /// Mount snapshots as folders, read-only
        "mount" => Mount(mount::MountArgs),
        /// Unmount snapshots
        "unmount" => Unmount(mount::UnmountArgs),
        /// Serve the disks of snapshots and images over NBD or iSCSI
        "serve" => Serve(serve::ServeArgs),
        /// List, search and restore files inside the guests' file systems
        "files" => Files(files::FilesArgs),
        /// Copy snapshots to another repository, or compare the two
        "copy" => Copy(copy::CopyArgs),
        /// Remove the snapshots that no retention rule keeps
        "prune" => Prune(prune::PruneArgs),
        /// Remove single snapshots
        "forget" => Forget(forget::ForgetArgs),
        /// Protect snapshots from removal
        "protect" => Protect(forget::ProtectArgs),
        /// Remove the protection of snapshots
        "unprotect" => Unprotect(forget::UnprotectArgs),
    }
    internal {
        /// Serve the disks of a machine while they are filled
        "live-server" => LiveServer(live_server::LiveServerArgs),
        /// Serve the files of mounted snapshots
        "mount-server" => MountServer(mount::MountServerArgs),
        /// Read the file system of a guest, without rights
        "files-reader" => FilesReader(files::reader::FilesReaderArgs),
        /// Become the virtual machine that reads file systems of guests
        "files-machine" => FilesMachine(files::machine::FilesMachineArgs),
        /// Watch over a machine while it is backed up
        "watchdog" => Watchdog(watchdog::WatchdogArgs),
    }
}
