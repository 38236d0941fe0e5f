//! `holdfast resume`: resumes interrupted live restores.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::rc::Rc;

use holdfast_block::{error_messages, error_text};
use holdfast_engine::{
    FillOptions, FillRate, InstantError, InstantJob, InstantReport, Job, Location, instant_jobs, release_snapshot,
    resume_instantly, revive_instantly,
};
use holdfast_host::Libvirt;
use holdfast_repo::Repository;
use serde::Serialize;

use crate::args::Example;
use crate::commands::backups::live_server::launch;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::{connect_libvirt, libvirt_address};
use crate::output::{Page, Part, Report, Style};
use crate::units;

/// Arguments of `resume`.
#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    /// The machine [default: all with unfilled disks]
    #[arg(value_name = "MACHINE")]
    machine: Option<String>,
    /// The hypervisor's address: qemu:///system, qemu:///session
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Fill at most this many bytes per second (50M) [default: 64M, doubled each minute]
    #[arg(long, value_name = "SIZE", value_parser = crate::args::parse_rate)]
    bwlimit: Option<NonZeroU64>,
    /// Show which live restores would continue; start and fill nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for ResumeArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "After the host was switched off: start the machines again and fill their disks",
            line: "holdfast resume --password-file /etc/holdfast/password",
        },
        Example {
            wish: "Continue one of them",
            line: "holdfast resume web1-restored",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `resume`.
#[derive(Debug, Serialize)]
struct ResumeDone {
    dry_run: bool,
    /// Machines that a dry run would resume.
    planned: Vec<ResumePlanned>,
    machines: Vec<ResumedMachine>,
    failed: Vec<ResumeFailed>,
}

/// A machine that would be resumed.
#[derive(Debug, Serialize)]
struct ResumePlanned {
    machine: String,
    repository: String,
    snapshot: String,
    disks: Vec<String>,
}

impl From<&InstantJob> for ResumePlanned {
    fn from(instant: &InstantJob) -> Self {
        Self {
            machine: instant.machine.clone(),
            repository: instant.repository.display().to_string(),
            snapshot: instant.snapshot.clone(),
            disks: instant.disks.iter().map(|disk| disk.name.clone()).collect(),
        }
    }
}

/// A machine that could not be resumed.
#[derive(Debug, Serialize)]
struct ResumeFailed {
    machine: String,
    error: String,
}

impl ResumeDone {
    fn fail(&mut self, machine: String, error: &Error, context: &Context) {
        let causes = error_messages(error);
        context.console().error(&causes, error.advice().hint.as_deref());
        self.failed.push(ResumeFailed {
            machine,
            error: causes.join(": "),
        });
    }
}

#[derive(Debug, Serialize)]
struct ResumedMachine {
    machine: String,
    uuid: String,
    size_bytes: u64,
    fill_ms: u64,
}

impl From<InstantReport> for ResumedMachine {
    fn from(report: InstantReport) -> Self {
        Self {
            machine: report.machine,
            uuid: report.uuid,
            size_bytes: report.size_bytes,
            fill_ms: units::millis(report.fill_duration),
        }
    }
}

impl Report for ResumeDone {
    fn command(&self) -> &'static str {
        "resume"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        if self.failed.is_empty() { Exit::Ok } else { Exit::Error }
    }

    fn human(&self, page: &mut Page) {
        for machine in &self.planned {
            page.line(&format!(
                "would resume {}: fill {} from snapshot {} in {}",
                machine.machine,
                machine.disks.join(", "),
                &machine.snapshot[..8],
                machine.repository
            ));
        }
        for machine in &self.machines {
            let fill = std::time::Duration::from_millis(machine.fill_ms);
            page.line(&format!(
                "{}  {} of disks filled in {}; it runs on its own images",
                machine.machine,
                units::bytes(machine.size_bytes),
                units::duration(fill)
            ));
        }
        if !self.failed.is_empty() {
            let names: Vec<&str> = self.failed.iter().map(|failed| &failed.machine[..]).collect();
            page.styled(Style::Bad, &format!("not resumed: {}", names.join(", ")));
        } else if self.machines.is_empty() && self.planned.is_empty() {
            page.line("all machines run on their own images");
        }
    }
}

/// First starts all machines, then fills their disks, one machine after another.
fn run(args: &ResumeArgs, context: &Context) -> Result<Exit, Error> {
    let uri = libvirt_address(args.connect.as_deref(), context);
    let hypervisor = connect_libvirt(&uri, context)?;
    let (jobs, unreadable) = instant_jobs(&hypervisor, args.machine.as_deref())?;
    let mut done = ResumeDone {
        dry_run: args.dry_run,
        planned: Vec::new(),
        machines: Vec::new(),
        failed: Vec::new(),
    };
    for (machine, error) in unreadable {
        done.fail(machine, &error.into(), context);
    }
    if args.dry_run {
        done.planned = jobs.iter().map(ResumePlanned::from).collect();
        return context.report(&done);
    }
    let is_alone = jobs.len() == 1 && done.failed.is_empty();
    let resumption = Resumption {
        hypervisor: &hypervisor,
        rate: FillRate::at_most(args.bwlimit),
        opened: RefCell::default(),
        context,
    };
    let mut revived = Vec::new();
    for instant in &jobs {
        match resumption.revive(instant) {
            Ok(()) => revived.push(instant),
            Err(error) if is_alone || matches!(error, Error::Interrupted(_)) => return Err(error),
            Err(error) => done.fail(instant.machine.clone(), &error, context),
        }
    }
    let count = revived.len();
    for (number, instant) in (1..).zip(revived) {
        if count > 1 {
            context.begin_part(Part { number, count });
        }
        match resumption.fill(instant) {
            Ok(report) => done.machines.push(report.into()),
            Err(error) if is_alone || matches!(error, Error::Interrupted(_)) => return Err(error),
            Err(error) => done.fail(instant.machine.clone(), &error, context),
        }
    }
    context.report(&done)
}

/// What resuming a machine needs.
struct Resumption<'a> {
    hypervisor: &'a Libvirt,
    rate: FillRate,
    /// Repositories opened so far, by location, so that each key is derived once.
    opened: RefCell<BTreeMap<PathBuf, Rc<Repository>>>,
    context: &'a Context,
}

impl Resumption<'_> {
    fn revive(&self, instant: &InstantJob) -> Result<(), Error> {
        self.work(|options, job| revive_instantly(self.hypervisor, instant, options, job))
    }

    fn fill(&self, instant: &InstantJob) -> Result<InstantReport, Error> {
        let report = self.work(|options, job| resume_instantly(self.hypervisor, instant, options, job))?;
        let released = self.repository(instant);
        self.context.work(1, |job| {
            match released {
                Ok(repository) => release_snapshot(&repository, instant, job),
                Err(error) => job.progress.warning(&format!("the snapshot stays protected: {error}")),
            }
            Ok(())
        })?;
        Ok(report)
    }

    /// Runs a step that may have to start a server. Only starting one needs the repository: the disks may be filled
    /// already.
    fn work<T>(&self, step: impl Fn(&FillOptions<'_>, Job<'_>) -> holdfast_engine::Result<T>) -> Result<T, Error> {
        let not_opened = RefCell::new(None);
        let start = |instant: &InstantJob| match self.repository(instant) {
            Ok(repository) => launch(instant, &repository),
            Err(error) => {
                let failed = InstantError::Server {
                    machine: instant.machine.clone(),
                    reason: error_text(&error),
                };
                not_opened.replace(Some(error));
                Err(failed.into())
            }
        };
        let options = FillOptions {
            launch: &start,
            rate: self.rate,
        };
        let done = self.context.work(1, |job| step(&options, job));
        done.map_err(|error| not_opened.take().unwrap_or(error))
    }

    fn repository(&self, instant: &InstantJob) -> Result<Rc<Repository>, Error> {
        let place = &instant.repository;
        if let Some(repository) = self.opened.borrow().get(place) {
            return Ok(Rc::clone(repository));
        }
        let location = self.context.remembered(Location::parse(place.as_os_str())?);
        let password = self.context.unlocking_password(&location)?;
        let repository = Rc::new(self.context.open_with(&location, password.as_ref())?);
        self.opened.borrow_mut().insert(place.clone(), Rc::clone(&repository));
        Ok(repository)
    }
}
