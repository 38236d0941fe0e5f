//! `holdfast backup` of machines of pools of XenServer and XCP-ng.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use clap::ValueEnum as _;
use holdfast_engine::{
    Domain, Interrupt, SnapshotOptions, XenBackupRequest, XenTransfer, back_up_xen, plan_xen_backup,
};
use holdfast_host::xapi::{Pool, XenAddress, XenMachine};
use holdfast_policy::config::ConfiguredPool;
use holdfast_repo::Repository;

use super::BackupArgs;
use super::planned::Turn;
use crate::args::PoolArgs;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::machines::pools;

/// Options of `backup` that are about machines of pools.
#[derive(Debug, clap::Args)]
pub(super) struct PoolBackupArgs {
    #[command(flatten)]
    login: PoolArgs,
    /// How to read the disks of pool machines [default: the best method that the pool offers]
    #[arg(
        long = "pool-read",
        value_enum,
        value_name = "HOW",
        help_heading = "Options for pools of XenServer and XCP-ng"
    )]
    read: Option<ReadHow>,
    /// Leave nothing in the pool; the next backup reads everything
    #[arg(
        long = "pool-keep-nothing",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        help_heading = "Options for pools of XenServer and XCP-ng"
    )]
    keep_nothing: Option<bool>,
    /// Connections per disk of a pool [default: 2]
    #[arg(
        long = "pool-connections",
        value_name = "N",
        help_heading = "Options for pools of XenServer and XCP-ng"
    )]
    connections: Option<NonZeroUsize>,
}

/// The default number of connections to one disk.
const CONNECTION_COUNT: usize = 2;

/// How disks of pools are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ReadHow {
    /// Over NBD, with changed block tracking; needs a pool network for NBD
    Nbd,
    /// As VHDs; the pool keeps a snapshot and sends only changes
    Vhd,
    /// All bytes
    Raw,
}

impl From<ReadHow> for XenTransfer {
    fn from(how: ReadHow) -> Self {
        match how {
            ReadHow::Nbd => Self::Nbd,
            ReadHow::Vhd => Self::Vhd,
            ReadHow::Raw => Self::Raw,
        }
    }
}

impl PoolBackupArgs {
    /// The options that were given, for error messages.
    pub(super) fn given(&self) -> Option<&'static str> {
        let own = [
            (self.read.is_some(), "--pool-read"),
            (self.keep_nothing.is_some(), "--pool-keep-nothing"),
            (self.connections.is_some(), "--pool-connections"),
        ];
        let own = own.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        self.login.given().or(own)
    }
}

/// Values of the options, otherwise of holdfast.toml.
impl PoolBackupArgs {
    fn way_of(&self, configured: Option<&ConfiguredPool>) -> Option<XenTransfer> {
        let named = || ReadHow::from_str(configured?.read.as_deref()?, false).ok();
        self.read.or_else(named).map(XenTransfer::from)
    }

    fn keeps_nothing(&self, configured: Option<&ConfiguredPool>) -> bool {
        self.keep_nothing
            .or_else(|| configured?.keeps_nothing)
            .unwrap_or_default()
    }

    fn connection_count(&self, configured: Option<&ConfiguredPool>) -> usize {
        let given = self.connections.map(NonZeroUsize::get);
        given.or_else(|| configured?.connections).unwrap_or(CONNECTION_COUNT)
    }
}

/// A selected machine.
pub(super) struct OfPool {
    pool: Arc<Pool>,
    machine: XenMachine,
    /// The pool's section of holdfast.toml.
    configured: Option<ConfiguredPool>,
    /// Whether another selected machine has the same name, so that the repository could not distinguish them.
    has_namesake: bool,
}

impl OfPool {
    /// Its name in messages.
    pub(super) fn said(&self) -> String {
        format!("{}/{}", self.pool.title(), self.machine.summary.name)
    }
}

/// The machines selected by words about pools.
#[derive(Default)]
pub(super) struct ChoiceOfPools {
    /// Machines to back up.
    pub(super) chosen: Vec<OfPool>,
    /// Words that selected nothing, and why: an unreachable pool does not stop the backup of other machines.
    pub(super) failed: Vec<(String, Error)>,
}

/// A pool with an open session.
#[derive(Clone)]
struct Known {
    pool: Arc<Pool>,
    address: XenAddress,
    configured: Option<ConfiguredPool>,
}

/// The machines that the words select.
///
/// # Errors
/// Options do not apply to pools, or the command was interrupted.
pub(super) fn choose(words: &[XenAddress], args: &BackupArgs, context: &Context) -> Result<ChoiceOfPools, Error> {
    if !words.is_empty() {
        args.machines.refuse_qemu_options("pools of XenServer")?;
    }
    let interrupt = context.interrupt()?;
    let mut pools: BTreeMap<String, Known> = BTreeMap::new();
    let mut choice = ChoiceOfPools::default();
    for address in words {
        match meant(address, &mut pools, args, context, &interrupt) {
            Ok((known, machines)) => choice.add(&known, machines),
            Err(error @ Error::Interrupted(_)) => return Err(error),
            Err(error) => choice.failed.push((address.to_string(), error)),
        }
    }
    let names: Vec<String> = choice
        .chosen
        .iter()
        .map(|one| one.machine.summary.name.clone())
        .collect();
    for one in &mut choice.chosen {
        let of_name = names.iter().filter(|name| **name == one.machine.summary.name);
        one.has_namesake = of_name.count() > 1;
    }
    Ok(choice)
}

/// The machines that one word selects.
fn meant(
    address: &XenAddress,
    pools: &mut BTreeMap<String, Known>,
    args: &BackupArgs,
    context: &Context,
    interrupt: &Interrupt,
) -> Result<(Known, Vec<XenMachine>), Error> {
    let known = if let Some(known) = pools.get(&address.pool()) {
        known.clone()
    } else {
        let way = args.pools.login.way(address, context)?;
        let known = Known {
            pool: pools::log_in(way.login, context, interrupt)?,
            address: way.address,
            configured: way.configured,
        };
        pools.insert(address.pool(), known.clone());
        known
    };
    // The pool is identified by the name that was used for it before.
    let there = XenAddress {
        item: address.item.clone(),
        ..known.address.clone()
    };
    let machines = pools::machines(&known.pool, &there, &args.machines.exclude_machine)?;
    Ok((known, machines))
}

impl ChoiceOfPools {
    /// Number of words and machines with a result to report.
    pub(super) fn count(&self) -> usize {
        self.chosen.len() + self.failed.len()
    }

    fn add(&mut self, known: &Known, machines: Vec<XenMachine>) {
        for machine in machines {
            let is_same = |one: &OfPool| one.machine.summary.uuid == machine.summary.uuid;
            if !self.chosen.iter().any(is_same) {
                self.chosen.push(OfPool {
                    pool: Arc::clone(&known.pool),
                    machine,
                    configured: known.configured.clone(),
                    has_namesake: false,
                });
            }
        }
    }
}

/// Backs up a machine.
pub(super) fn back_up(
    one: &OfPool,
    args: &BackupArgs,
    snapshot: &SnapshotOptions,
    repository: &Repository,
    context: &Context,
) -> Result<Turn, Error> {
    if one.has_namesake {
        let (said, uuid) = (one.said(), &one.machine.summary.uuid);
        return Err(Error::refused(
            Kind::Exists,
            format!(
                "{said} ({uuid}): another machine that is to be backed up has this name, and they would be listed as one"
            ),
            format!("back each of them up by its UUID, under a name of yours: {uuid} with --machine NAME"),
        ));
    }
    let by_uuid = format!("{}/{}", one.pool.title(), one.machine.summary.uuid);
    let way = ["--connect".into(), one.said().into()];
    let name = args.listed(&one.machine.summary.name, &by_uuid)?;
    let request = XenBackupRequest {
        pool: Arc::clone(&one.pool),
        machine: one.machine.summary.uuid.clone(),
        capture: args.capture_options(name, &one.pool.title(), &way, context)?,
        way: args.pools.way_of(one.configured.as_ref()),
        keeps_base: !args.pools.keeps_nothing(one.configured.as_ref()),
        with_memory: args.machines.with_memory.is_some(),
        domain: Domain {
            domain_type: "kvm".to_owned(),
            network: "default".to_owned(),
        },
        bytes_per_second: args.machines.reading.limits.limits().bytes_per_second,
        connection_count_max: args.pools.connection_count(one.configured.as_ref()),
    };
    context.work(args.job.thread_count(), |job| {
        if args.dry_run {
            let plan = plan_xen_backup(repository, request, snapshot.clone(), job)?;
            return Ok(Turn::Planned(plan.into()));
        }
        let report = back_up_xen(repository, request, snapshot.clone(), job)?;
        Ok(Turn::BackedUp(Box::new(report.into())))
    })
}
