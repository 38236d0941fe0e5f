//! `holdfast resume`: restores `--live` that were interrupted go on.

use holdfast_engine::{InstantReport, instant_jobs, release_snapshot, resume_instantly};
use serde::Serialize;

use super::live_server::launch;
use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::{connect_libvirt, libvirt_address};
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `resume`.
#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    /// The machine; all whose disks are not filled yet where not given
    #[arg(value_name = "MACHINE")]
    machine: Option<String>,
    /// The hypervisor's address: qemu:///system, qemu:///session
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
}

/// What a person may want of it.
pub(super) const EXAMPLES: &[Example] = &[
    Example {
        wish: "After the host was switched off: start the machines again and fill their disks",
        line: "holdfast resume --password-file /etc/holdfast/password",
    },
    Example {
        wish: "Go on with one of them",
        line: "holdfast resume web1-restored",
    },
];

/// What `resume` answers.
#[derive(Debug, Serialize)]
struct Done {
    machines: Vec<MachineDone>,
}

#[derive(Debug, Serialize)]
struct MachineDone {
    machine: String,
    uuid: String,
    size_bytes: u64,
    fill_ms: u64,
}

impl From<InstantReport> for MachineDone {
    fn from(report: InstantReport) -> Self {
        Self {
            machine: report.machine,
            uuid: report.uuid,
            size_bytes: report.size_bytes,
            fill_ms: units::millis(report.fill_duration),
        }
    }
}

impl Report for Done {
    fn command(&self) -> &'static str {
        "resume"
    }

    fn human(&self, page: &mut Page) {
        for machine in &self.machines {
            let fill = std::time::Duration::from_millis(machine.fill_ms);
            page.line(&format!(
                "{}  {} of disks filled in {}; it runs on its own images",
                machine.machine,
                units::bytes(machine.size_bytes),
                units::duration(fill)
            ));
        }
        if self.machines.is_empty() {
            page.line("all machines run on their own images");
        }
    }
}

/// Goes on.
pub(super) fn run(args: &ResumeArgs, context: &Context) -> Result<Exit, Error> {
    let uri = libvirt_address(args.connect.as_deref(), context);
    let hypervisor = connect_libvirt(&uri, context)?;
    let jobs = instant_jobs(&hypervisor, args.machine.as_deref())?;
    let mut machines = Vec::new();
    for instant in &jobs {
        let location = holdfast_engine::Location::parse(instant.repository.as_os_str())?;
        let password = context.unlocking_password(&location)?;
        let launch = |instant: &_| launch(instant, password.as_ref());
        let report = context.work(1, |job| {
            let report = resume_instantly(&hypervisor, instant, &launch, job)?;
            match context.open_with(&location, password.as_ref()) {
                Ok(repository) => release_snapshot(&repository, instant, job),
                Err(error) => job.progress.warning(&format!("the snapshot stays protected: {error}")),
            }
            Ok(report)
        })?;
        machines.push(report.into());
    }
    context.report(&Done { machines })
}
