//! `holdfast export` to a pool of XenServer or XCP-ng.

use std::sync::Arc;

use holdfast_engine::{ExportFrom, ExportToPool, PoolReturn, export_to_pool, plan_export_to_pool};
use holdfast_host::xapi::{Pool, XenAddress};
use holdfast_repo::{Processes as _, SystemProcesses};

use super::kind::ExportKind;
use super::planned::ExportPlanned;
use super::{ExportArgs, ExportDone, from};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::pools;
use crate::process::time;

/// The first given option that applies to files and folders only.
fn foreign(args: &ExportArgs) -> Option<&'static str> {
    let given = [
        (args.format.is_some(), "--format"),
        (args.packing.packing().is_some(), "--gzip and --zstd"),
        (args.packing.level().is_some(), "--level"),
        (args.disk_format.is_some(), "--disk-format"),
        (args.force, "--force"),
        (args.register, "--register"),
    ];
    given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
}

fn request<'a>(args: &ExportArgs, pool: Arc<Pool>, address: &XenAddress, from: ExportFrom<'a>) -> ExportToPool<'a> {
    ExportToPool {
        pool,
        storage: address.item.clone(),
        comes: match (args.with_memory, args.new_identity) {
            (true, _) => PoolReturn::Resumes,
            (false, false) => PoolReturn::Starts,
            (false, true) => PoolReturn::AsAnother,
        },
        from,
        name: args.name.clone(),
        host: SystemProcesses.this().host,
        time: time::now(),
    }
}

/// Exports to the pool at `address`.
pub(super) fn run(args: &ExportArgs, address: &str, context: &Context) -> Result<Exit, Error> {
    let address: XenAddress = address.parse().map_err(holdfast_engine::Error::from)?;
    if let Some(option) = foreign(args) {
        return Err(Error::usage(
            format!("{option} does not apply to a pool"),
            "remove the option",
        ));
    }
    let way = args.pools.way(&address, context)?;
    let interrupt = context.interrupt()?;
    let pool = pools::log_in(way.login, context, &interrupt)?;
    let address = way.address;
    let threads = args.job.thread_count();
    if args.dry_run {
        let (plan, storage) = from(args, context, |from| {
            context.work(threads, |job| {
                plan_export_to_pool(request(args, pool, &address, from), job)
            })
        })?;
        let target = format!("{}/{storage}", address.pool());
        return context.report(&ExportPlanned::new(plan, target, ExportKind::Xva));
    }
    let report = from(args, context, |from| {
        context.work(threads, |job| {
            export_to_pool(request(args, pool, &address, from), &context.environment(), job)
        })
    })?;
    let target = format!("{}/{}", address.pool(), report.storage);
    context.report(&ExportDone::in_pool(report.export, target, report.uuid))
}
