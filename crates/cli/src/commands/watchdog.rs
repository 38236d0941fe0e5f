//! `holdfast watchdog`: the process that a backup starts beside itself, before it stops a machine.

use std::io::Write as _;

use holdfast_engine::watch_over;
use holdfast_host::{Hypervisor as _, Libvirt};

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `watchdog`.
#[derive(Debug, clap::Args)]
pub struct WatchdogArgs {
    /// The hypervisor's address
    #[arg(long, value_name = "URI")]
    connect: String,
    /// The machine
    #[arg(long, value_name = "NAME")]
    machine: String,
    /// The number of the run
    #[arg(long, value_name = "N")]
    run: u32,
}

/// What a person may want of it.
pub(super) const EXAMPLES: &[Example] = &[Example {
    wish: "Backups start it by themselves",
    line: "holdfast watchdog --connect qemu:///system --machine web1 --run 7",
}];

/// Watches.
pub(super) fn run(args: &WatchdogArgs, context: &Context) -> Result<Exit, Error> {
    // Whoever interrupts the backup from a terminal, or kills its group, does not mean us.
    rustix::process::setsid().ok();
    let hypervisor = Libvirt::connect(&args.connect).map_err(holdfast_engine::Error::from)?;
    let machine = hypervisor
        .machine(&args.machine)
        .map_err(holdfast_engine::Error::from)?;
    let lines = std::io::BufReader::new(std::io::stdin());
    let ready = |word: &str| {
        let mut stdout = std::io::stdout().lock();
        // The backup is dead already if it does not hear it: its lines end, too.
        writeln!(stdout, "{word}").and_then(|()| stdout.flush()).ok();
    };
    let mended = watch_over(&*machine, args.run, lines, &**context.clock(), ready);
    for what in &mended {
        context
            .console()
            .warning(&format!("the watchdog of {} {what}", args.machine));
    }
    Ok(Exit::Ok.with_warning_count(mended.len()))
}
