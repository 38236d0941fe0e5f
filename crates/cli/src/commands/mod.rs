//! The verbs, one file each: arguments, examples, and the way from there to a report.

mod backups;
mod help;
mod host_snapshots;
mod images;
mod repository;
mod service;

pub use service::monitor::tell_check;

use self::backups::{
    backup, copy, diff, forget, list, live_server, machines, prune, restore, resume, serve, show, verify, watchdog,
};
use self::help::{completions, doctor, man, version};
use self::host_snapshots::{clone, cron, host, mount, peer, replicate, rollback, snapshot};
use self::images::{archive, compress, export, image, import, template};
use self::repository::{gc, init, key, repair, scrub, stats};
use self::service::{config, daemon, jobs, monitor, notify, runs};
use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// All verbs.
#[derive(Debug, clap::Subcommand)]
pub enum Verb {
    /// Make a repository
    Init(init::InitArgs),
    /// Back up disks of a machine as one snapshot
    Backup(backup::BackupArgs),
    /// List machines, and what a backup would take of them
    Machines(machines::MachinesArgs),
    /// Make host snapshots: of machines, or of datasets of ZFS, btrfs and LVM
    Snapshot(snapshot::SnapshotArgs),
    /// Take a machine back to a host snapshot
    Rollback(rollback::RollbackArgs),
    /// Make another machine of one as it is or was, or an image, which shares all with it
    Clone(clone::CloneArgs),
    /// Mount a host snapshot, to look into it
    Mount(mount::MountArgs),
    /// Unmount a host snapshot
    Unmount(mount::UnmountArgs),
    /// Carry out a policy of host snapshots once: take what is due, remove what has served its time
    Cron(cron::CronArgs),
    /// Do the jobs of a holdfast.toml whenever they are due, until it is stopped
    Daemon(daemon::DaemonArgs),
    /// Do jobs of a holdfast.toml now
    Run(daemon::RunArgs),
    /// List the jobs of a holdfast.toml: when they run next, and how they went
    Jobs(jobs::JobsArgs),
    /// List what ran, and how it ended
    Runs(runs::RunsArgs),
    /// Send a test message to somebody of a holdfast.toml
    Notify(notify::NotifyArgs),
    /// Check whether a policy is met, and how its pools are, for Nagios and Prometheus
    Monitor(monitor::MonitorArgs),
    /// Send host snapshots to another place, and to another host
    Replicate(replicate::ReplicateArgs),
    /// Let another host add its snapshots here, and nothing else: for ssh
    Receive(peer::ReceiveArgs),
    /// Work on the host snapshots that are there
    Host(host::HostArgs),
    /// Find what dead backups and forgotten snapshots left at machines, and mend it
    Doctor(doctor::DoctorArgs),
    /// List snapshots
    List(list::ListArgs),
    /// Show everything that is known of a snapshot
    Show(show::ShowArgs),
    /// Restore disks of a snapshot, or a whole machine
    Restore(restore::RestoreArgs),
    /// Go on with restores --live that were interrupted
    Resume(resume::ResumeArgs),
    /// Work on disk image files, without a repository
    Image(image::ImageArgs),
    /// Take in a machine from an archive of another hypervisor
    Import(import::ImportArgs),
    /// Make an archive for another hypervisor of a machine
    Export(export::ExportArgs),
    /// Look into machine archives and packed streams, without a repository
    Archive(archive::ArchiveArgs),
    /// Pack a stream on all cores, with an index behind it
    Compress(compress::CompressArgs),
    /// Tell what changed between two snapshots
    Diff(diff::DiffArgs),
    /// Prove that snapshots can be read, and are what was stored
    Verify(verify::VerifyArgs),
    /// Share prepared images and machines with colleagues, by name and tag, signed
    Template(template::TemplateArgs),
    /// Copy snapshots to another repository, and tell what is where
    Copy(copy::CopyArgs),
    /// Remove the snapshots that no rule keeps
    Prune(prune::PruneArgs),
    /// Remove single snapshots
    Forget(forget::ForgetArgs),
    /// Keep snapshots from being removed
    Protect(forget::ProtectArgs),
    /// Let protected snapshots be removed again
    Unprotect(forget::UnprotectArgs),
    /// Give back the space of what no snapshot needs
    Gc(gc::GcArgs),
    /// Read the repository at rest, to find damage before it is needed
    Scrub(scrub::ScrubArgs),
    /// Open snapshots as block devices for other programs
    Serve(serve::ServeArgs),
    /// Mend what can be mended, and name what is lost
    Repair(repair::RepairArgs),
    /// Show the repository in figures
    Stats(stats::StatsArgs),
    /// Check a configuration, and show what it means
    Config(config::ConfigArgs),
    /// Manage the keys of a repository
    Key(key::KeyArgs),
    /// Show the version of the program and what it was built for
    Version(version::VersionArgs),
    /// Print a script that completes holdfast's command line in a shell
    Completions(completions::CompletionsArgs),
    /// Write the manual pages into a folder
    #[command(hide = true)]
    Man(man::ManArgs),
    /// Serve the disks of a machine while they are filled
    #[command(hide = true)]
    LiveServer(live_server::LiveServerArgs),
    /// Answer the holdfast of another host
    #[command(hide = true)]
    Peer(peer::PeerArgs),
    /// Watch over a machine while it is backed up
    #[command(hide = true)]
    Watchdog(watchdog::WatchdogArgs),
}

impl Verb {
    /// Does it, and answers how it went.
    pub fn run(&self, context: &Context) -> Result<Exit, Error> {
        match self {
            Self::Init(args) => init::run(args, context),
            Self::Backup(args) => backup::run(args, context),
            Self::Machines(args) => machines::run(args, context),
            Self::Snapshot(args) => snapshot::run(args, context),
            Self::Rollback(args) => rollback::run(args, context),
            Self::Clone(args) => clone::run(args, context),
            Self::Mount(args) => mount::mount(args, context),
            Self::Unmount(args) => mount::unmount(args, context),
            Self::Cron(args) => cron::run(args, context),
            Self::Daemon(args) => daemon::run_daemon(args, context),
            Self::Run(args) => daemon::run(args, context),
            Self::Jobs(args) => jobs::run(args, context),
            Self::Runs(args) => runs::run(args, context),
            Self::Notify(args) => notify::run(args, context),
            Self::Monitor(args) => monitor::run(args, context),
            Self::Replicate(args) => replicate::run(args, context),
            Self::Receive(args) => peer::run_receive(args, context),
            Self::Host(args) => host::run(args, context),
            Self::Doctor(args) => doctor::run(args, context),
            Self::List(args) => list::run(args, context),
            Self::Show(args) => show::run(args, context),
            Self::Restore(args) => restore::run(args, context),
            Self::Resume(args) => resume::run(args, context),
            Self::Image(args) => image::run(args, context),
            Self::Import(args) => import::run(args, context),
            Self::Export(args) => export::run(args, context),
            Self::Archive(args) => archive::run(args, context),
            Self::Compress(args) => compress::run(args, context),
            Self::Diff(args) => diff::run(args, context),
            Self::Verify(args) => verify::run(args, context),
            Self::Template(args) => template::run(args, context),
            Self::Copy(args) => copy::run(args, context),
            Self::Prune(args) => prune::run(args, context),
            Self::Forget(args) => forget::run_forget(args, context),
            Self::Protect(args) => forget::run_protect(args, context),
            Self::Unprotect(args) => forget::run_unprotect(args, context),
            Self::Gc(args) => gc::run(args, context),
            Self::Scrub(args) => scrub::run(args, context),
            Self::Serve(args) => serve::run(args, context),
            Self::Repair(args) => repair::run(args, context),
            Self::Stats(args) => stats::run(args, context),
            Self::Config(args) => config::run(args, context),
            Self::Key(args) => key::run(args, context),
            Self::Version(args) => version::run(args, context),
            Self::Completions(args) => completions::run(args, context),
            Self::Man(args) => man::run(args, context),
            Self::LiveServer(args) => live_server::run(args, context),
            Self::Peer(args) => peer::run(args, context),
            Self::Watchdog(args) => watchdog::run(args, context),
        }
    }
}

/// Examples of the program as a whole.
pub const EXAMPLES: &[Example] = &[
    Example {
        wish: "Make a repository",
        line: "holdfast init --repository /backup/vms",
    },
    Example {
        wish: "Back up a machine",
        line: "holdfast backup --repository /backup/vms /var/lib/libvirt/images/web1.qcow2",
    },
    Example {
        wish: "Bring it back as it was yesterday at noon",
        line: "holdfast restore --repository /backup/vms web1@2026-11-20T12:00 web1.raw",
    },
    Example {
        wish: "See the options of a verb",
        line: "holdfast backup --help",
    },
];

/// Examples of the verb at `path` (`list`, `image info`); none for what is no verb.
pub fn examples_of(path: &str) -> &'static [Example] {
    match path {
        "init" => init::EXAMPLES,
        "backup" => backup::EXAMPLES,
        "machines" => machines::EXAMPLES,
        "snapshot" => snapshot::EXAMPLES,
        "rollback" => rollback::EXAMPLES,
        "clone" => clone::EXAMPLES,
        "mount" => mount::EXAMPLES,
        "unmount" => mount::EXAMPLES_UNMOUNT,
        "cron" => cron::EXAMPLES,
        "replicate" => replicate::EXAMPLES,
        "receive" => peer::EXAMPLES_RECEIVE,
        "peer" => peer::EXAMPLES,
        "daemon" => daemon::EXAMPLES_DAEMON,
        "run" => daemon::EXAMPLES_RUN,
        "jobs" => jobs::EXAMPLES,
        "runs" => runs::EXAMPLES,
        "notify" => notify::EXAMPLES,
        "doctor" => doctor::EXAMPLES,
        "list" => list::EXAMPLES,
        "show" => show::EXAMPLES,
        "restore" => restore::EXAMPLES,
        "resume" => resume::EXAMPLES,
        "import" => import::EXAMPLES,
        "export" => export::EXAMPLES,
        "compress" => compress::EXAMPLES,
        "diff" => diff::EXAMPLES,
        "verify" => verify::EXAMPLES,
        "copy" => copy::EXAMPLES,
        "prune" => prune::EXAMPLES,
        "forget" => forget::EXAMPLES_FORGET,
        "protect" => forget::EXAMPLES_PROTECT,
        "unprotect" => forget::EXAMPLES_UNPROTECT,
        "gc" => gc::EXAMPLES,
        "scrub" => scrub::EXAMPLES,
        "serve" => serve::EXAMPLES,
        "serve nbd" => serve::EXAMPLES_NBD,
        "repair" => repair::EXAMPLES,
        "stats" => stats::EXAMPLES,
        "config" => config::EXAMPLES,
        "config check" => config::EXAMPLES_CHECK,
        "config show" => config::EXAMPLES_SHOW,
        "key" => key::EXAMPLES,
        "key list" => key::EXAMPLES_LIST,
        "key add" => key::EXAMPLES_ADD,
        "key rotate" => key::EXAMPLES_ROTATE,
        "key remove" => key::EXAMPLES_REMOVE,
        "key paper" => key::EXAMPLES_PAPER,
        "version" => version::EXAMPLES,
        "completions" => completions::EXAMPLES,
        "man" => man::EXAMPLES,
        "live-server" => live_server::EXAMPLES,
        "watchdog" => watchdog::EXAMPLES,
        _ if path.starts_with("monitor") => monitor::examples_of(path),
        _ if path.starts_with("archive") => archive::examples_of(path),
        _ if path.starts_with("template") => template::examples_of(path),
        _ if path.starts_with("host") => host::examples_of(path),
        _ => image::examples_of(path),
    }
}
