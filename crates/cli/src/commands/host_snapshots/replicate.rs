//! `holdfast replicate`: replicates host snapshots to another dataset or host.

mod done;
mod far;

use std::num::NonZeroU64;

use holdfast_host::provider::ReplicaScope;
use holdfast_policy::SnapshotChoice;
use holdfast_replicate::{CompressionChoice, RawChoice, ReplicateRequest, ReplicationPlace, replicate};

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::Glob;
use crate::machines::runs;
use crate::units;
use done::{ReplicateDone, ReplicatedShown};
pub(crate) use far::local_side;
use far::{Far, Word};

/// Arguments of `replicate`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplicateArgs {
    /// The ZFS dataset or btrfs subvolume to send, on this or another host: tank/vm, root@web:tank/vm, /srv/vms
    #[arg(value_name = "[[USER@]HOST:]SOURCE")]
    source: String,
    /// The dataset to receive into; created if it does not exist
    #[arg(value_name = "[[USER@]HOST:]TARGET")]
    target: String,
    #[command(flatten)]
    chosen: ChosenArgs,
    /// Show how far the target is behind; send nothing
    #[arg(long, conflicts_with = "dry_run")]
    status: bool,
    /// Show what would be sent; send nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    link: LinkArgs,
}

/// What of it is sent.
#[derive(Debug, clap::Args)]
struct ChosenArgs {
    /// Replicate the descendants of the dataset, too
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Send only snapshots whose names match: 'autosnap_*_daily'; may be repeated
    #[arg(long, value_name = "GLOB")]
    snapshots: Vec<String>,
    /// Send only the newest snapshot, without those in between
    #[arg(long)]
    newest: bool,
}

/// How it goes over the link.
#[derive(Debug, clap::Args)]
struct LinkArgs {
    /// Limit the bytes per second on the link: 50M
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    bwlimit: Option<NonZeroU64>,
    /// When to compress on the way to another host: if the link is slower than the compression, always, or never
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Compress::Auto)]
    compress: Compress,
    /// Send encrypted data as it is stored, so that the target never gets the key (the default if the source is encrypted)
    #[arg(long, conflicts_with = "no_raw")]
    raw: bool,
    /// Send encrypted data decrypted
    #[arg(long)]
    no_raw: bool,
    /// An option for ssh, as in its -o: Port=2222; may be repeated
    #[arg(long, value_name = "OPTION")]
    ssh_option: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Compress {
    Auto,
    On,
    Off,
}

impl Verb for ReplicateArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Send a dataset and all below it to another host; the next run sends what is new",
            line: "holdfast replicate --recursive tank/vm root@backup:tank/backup/web/vm",
        },
        Example {
            wish: "Fetch it from there",
            line: "holdfast replicate root@web:tank/vm tank/backup/web/vm",
        },
        Example {
            wish: "Compare both sides, and see how far the target is behind",
            line: "holdfast replicate --status --recursive tank/vm root@backup:tank/backup/web/vm",
        },
        Example {
            wish: "Send a subvolume of btrfs",
            line: "holdfast replicate /srv/vms backup:/backup/web/vms",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

fn parse_rate(text: &str) -> Result<NonZeroU64, String> {
    let rate = units::parse_bytes(text).map_err(|error| error.to_string())?;
    NonZeroU64::new(rate).ok_or_else(|| "nothing would ever be sent".to_owned())
}

fn run(args: &ReplicateArgs, context: &Context) -> Result<Exit, Error> {
    let globs = args.chosen.snapshots.iter().map(|glob| {
        Glob::parse(glob)
            .map_err(|reason| Error::usage(format!("{glob:?}: {reason}"), "* stands for any letters, ? for one"))
    });
    let globs: Vec<Glob> = globs.collect::<Result<_, Error>>()?;
    let (source, target) = (Word::parse(&args.source)?, Word::parse(&args.target)?);
    if source.host.is_some() && target.host.is_some() {
        return Err(Error::usage(
            "neither the source nor the target is on this host",
            "run it on one of the two",
        ));
    }
    let far = Far::new(&args.link.ssh_option, context);
    let (source, target) = far.both(&source, &target)?;
    if source.side.host() == target.side.host() && source.dataset == target.dataset {
        return Err(Error::usage("the source is the target", "name two datasets"));
    }
    let request = ReplicateRequest {
        source: ReplicationPlace {
            side: &*source.side,
            dataset: &source.dataset,
        },
        target: ReplicationPlace {
            side: &*target.side,
            dataset: &target.dataset,
        },
        scope: if args.chosen.recursive {
            ReplicaScope::Tree
        } else {
            ReplicaScope::Dataset
        },
        is_wanted: &|name| globs.is_empty() || globs.iter().any(|glob| glob.matches(name)),
        choice: if args.chosen.newest {
            SnapshotChoice::Newest
        } else {
            SnapshotChoice::Each
        },
        raw: match (args.link.raw, args.link.no_raw) {
            (true, _) => RawChoice::Raw,
            (_, true) => RawChoice::Plain,
            _ => RawChoice::Auto,
        },
        compression: match args.link.compress {
            Compress::Auto => CompressionChoice::Auto,
            Compress::On => CompressionChoice::On,
            Compress::Off => CompressionChoice::Off,
        },
        limit: args.link.bwlimit,
        execution: crate::args::Switch::execution(args.dry_run || args.status),
        // It distinguishes targets on this host from targets of the same name elsewhere.
        here: crate::process::kernel::host_name(),
        locks: runs::locks_folder(context),
        clock: context.clock().clone(),
    };
    let report = context.work(1, |job| replicate(&request, job))?;
    let shown = match (args.status, args.dry_run) {
        (true, _) => ReplicatedShown::Status,
        (_, true) => ReplicatedShown::Plan,
        _ => ReplicatedShown::Done,
    };
    context.report(&ReplicateDone::new(report, shown))
}
