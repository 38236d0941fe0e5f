//! The pools of XenServer and XCP-ng to examine.

use holdfast_block::error_text;
use holdfast_engine::{ExaminedPool, Interrupt};
use holdfast_host::xapi::XenAddress;

use super::{DoctorArgs, Unreachable};
use crate::context::Context;
use crate::context::holdfast_file;
use crate::errors::Error;
use crate::machines::pools::{self, PoolWay};

/// Pools, and those that cannot be examined, each with the reason.
#[derive(Default)]
pub(super) struct Pools {
    pub(super) subjects: Vec<ExaminedPool>,
    pub(super) unreachable: Unreachable,
}

/// The selected pools; if nothing is named at all, the pools of holdfast.toml that have a password there.
///
/// # Errors
/// A pool option is given but no pool, or a named pool cannot be reached.
pub(super) fn of_pools(args: &DoctorArgs, words: &[XenAddress], context: &Context) -> Result<Pools, Error> {
    if words.is_empty() && !args.examines_everything() {
        args.pools.refuse("what is named here")?;
        if !args.forget_repository.is_empty() {
            return Err(Error::usage(
                "--forget-repository is about pools of XenServer, and none is named",
                "name the pool, too: xen://HOST",
            ));
        }
    }
    let mut found = Pools::default();
    let interrupt = context.interrupt()?;
    for address in words {
        let way = args.pools.way(address, context)?;
        let (title, address) = (way.address.pool(), way.address.clone());
        let known = found.subjects.iter().position(|known| known.pool.title() == title);
        let place = known.unwrap_or(found.subjects.len());
        if known.is_none() {
            found.subjects.push(ExaminedPool {
                pool: pools::log_in(way.login, context, &interrupt)?,
                machines: Vec::new(),
                is_whole: false,
            });
        }
        let subject = &mut found.subjects[place];
        subject.is_whole |= address.item.is_none();
        for machine in pools::machines(&subject.pool, &address, &[])? {
            if !subject.machines.contains(&machine) {
                subject.machines.push(machine);
            }
        }
    }
    if args.examines_everything() {
        found.add_configured(args, context, &interrupt)?;
    }
    Ok(found)
}

impl Pools {
    /// Adds the pools of holdfast.toml, if it can be read; `config check` reports its errors.
    ///
    /// # Errors
    /// The command was interrupted.
    fn add_configured(&mut self, args: &DoctorArgs, context: &Context, interrupt: &Interrupt) -> Result<(), Error> {
        let text = std::fs::read_to_string(holdfast_file::path(context)).unwrap_or_default();
        let Ok(config) = holdfast_file::parse(&text, context.command_line()) else {
            return Ok(());
        };
        for configured in config.pools {
            let named = format!("xen://{}", configured.name);
            if holdfast_file::password_of_pool(&configured).is_none() {
                let message = format!(
                    "{named} is not examined: holdfast.toml has no password for it; name it in the command to be asked for one"
                );
                context.console().warning(&message);
                continue;
            }
            let way = named.parse().map_err(|error| pools::job_error(error).into());
            let way = way.and_then(|address| args.pools.way_of(configured, &address, context));
            match way.and_then(|way| whole(way, context, interrupt)) {
                Ok(subject) => self.subjects.push(subject),
                Err(error @ Error::Interrupted(_)) => return Err(error),
                Err(error) => self.unreachable.push((named, error_text(&error))),
            }
        }
        Ok(())
    }
}

/// A pool with all of its machines.
fn whole(way: PoolWay, context: &Context, interrupt: &Interrupt) -> Result<ExaminedPool, Error> {
    let pool = pools::log_in(way.login, context, interrupt)?;
    Ok(ExaminedPool {
        machines: pools::machines(&pool, &way.address, &[])?,
        pool,
        is_whole: true,
    })
}
