//! `holdfast template pull`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::{
    KeepIdentity, Overwrite, PullReport, PullRequest, PullTarget, TemplateGuest, TemplateReference, pull_template,
};
use holdfast_host::LocalTools;
use holdfast_image::{Format, Storage};
use serde::Serialize;

use super::document::{SignedDocument, StatementDocument};
use super::signers::{TrustArgs, signatures};
use crate::args::{Example, JobArgs, Switch as _};
use crate::commands::host_snapshots::clone::{SYSPREP_TIME_OUT, sysprep_program};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::output::{Page, Report};
use crate::process::time;
use crate::units;

/// Arguments of `template pull`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(super) struct PullArgs {
    /// The template, by its tag or by its digest
    #[arg(value_name = "NAME[:TAG]|NAME@DIGEST")]
    template: TemplateReference,
    /// A new image of a template with one disk, by its name (web7.qcow2) or --to; otherwise a new folder, which gets the configuration, too
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// Format of the images (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: by the name; qcow2 in a folder]
    #[arg(long = "to", value_name = "FORMAT", value_parser = crate::args::parse_format)]
    format: Option<Format>,
    /// Compress the images where their format can
    #[arg(long)]
    compress: bool,
    /// Run virt-sysprep: new machine id, SSH host keys and the like, and a host name like the machine or image
    #[arg(long)]
    sysprep: bool,
    /// Replace an existing image, or overwrite a block device
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    machine: PullMachineArgs,
    /// Accept a template without a trusted signature
    #[arg(long)]
    unsigned: bool,
    /// Check the signature and the target, and show what would be written; write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    trust: TrustArgs,
    #[command(flatten)]
    job: JobArgs,
}

/// The identity of the machine in a folder.
#[derive(Debug, clap::Args)]
struct PullMachineArgs {
    /// Name of the machine [default: the name of the folder]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Let the machine keep its name, UUID and network addresses: only where the one that was pushed is gone
    #[arg(long)]
    keep_identity: bool,
}

impl Verb for PullArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Make a disk of a template",
            line: "holdfast template pull -r /srv/templates debian12 /var/lib/libvirt/images/web7.qcow2",
        },
        Example {
            wish: "Make a machine of one, and let libvirt know it with virsh define",
            line: "holdfast template pull -r /srv/templates web:stable /srv/vms/web7",
        },
        Example {
            wish: "Pull an earlier version",
            line: "holdfast template pull -r /srv/templates debian12@9f86d081884c old.vmdk",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `template pull`.
#[derive(Debug, Serialize)]
struct Pulled {
    dry_run: bool,
    #[serde(flatten)]
    statement: StatementDocument,
    #[serde(flatten)]
    signed: SignedDocument,
    format: &'static str,
    images: Vec<PulledImageDocument>,
    /// The configuration of the machine.
    configuration: Option<String>,
    /// The name of the machine.
    machine: Option<String>,
    duration_ms: u64,
    #[serde(skip)]
    local_time: String,
}

#[derive(Debug, Serialize)]
struct PulledImageDocument {
    name: String,
    path: String,
    size_bytes: u64,
}

impl Report for Pulled {
    fn command(&self) -> &'static str {
        "template pull"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let (label, content) = (self.statement.label(), self.statement.short_content());
        if self.dry_run {
            page.line(&format!(
                "would pull {label} of {}, content {content}, to:",
                self.local_time
            ));
        } else {
            page.line(&format!(
                "{label} of {}, content {content}, in {}",
                self.local_time,
                units::duration(Duration::from_millis(self.duration_ms)),
            ));
        }
        page.styled(self.signed.style(), &format!("  {}", self.signed.full()));
        for image in &self.images {
            page.line(&format!(
                "  {}  {}, {} disk",
                image.path,
                self.format,
                units::bytes(image.size_bytes)
            ));
        }
        if let (Some(path), Some(machine)) = (&self.configuration, &self.machine) {
            page.line(&format!(
                "  {path}  the machine {machine}: virsh define makes it known to libvirt"
            ));
        }
    }
}

/// The target: a name with the extension of an image format is an image, any other a folder.
fn target(args: &PullArgs) -> Result<PullTarget, Error> {
    let path = args.target.clone();
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .map(str::to_ascii_lowercase);
    let named = match extension.as_deref() {
        Some("img") => Some(Format::Raw),
        Some(extension) => Format::from_name(extension).filter(|format| Format::SUPPORTED.contains(format)),
        None => None,
    };
    let identity = if args.machine.keep_identity {
        KeepIdentity::Yes
    } else {
        KeepIdentity::No
    };
    if path.as_os_str() == "-" {
        return Err(Error::usage(
            "a template is not written to standard output: it is read back before it counts",
            "name a file or a folder",
        ));
    }
    let is_device = holdfast_engine::is_device(&path);
    let is_image = named.is_some() || is_device || args.force;
    if is_device && args.sysprep {
        return Err(Error::usage(
            format!(
                "--sysprep is for images in files, and {} is a block device",
                path.display()
            ),
            "remove the option, and make the change in the guest",
        ));
    }
    let about_machines = [
        ("--name", args.machine.name.is_some()),
        ("--keep-identity", args.machine.keep_identity),
    ];
    if is_image && let Some((option, _)) = about_machines.iter().find(|(_, is_given)| *is_given) {
        return Err(Error::usage(
            format!("{option} is about a machine, and {} is an image", path.display()),
            "remove the option, or name a folder",
        ));
    }
    if is_image {
        let fallback = if is_device { Format::Raw } else { Format::Qcow2 };
        let overwrite = if args.force {
            Overwrite::Replace
        } else {
            Overwrite::Refuse
        };
        return Ok(PullTarget::Image {
            path,
            format: args.format.or(named).unwrap_or(fallback),
            overwrite,
        });
    }
    let format = args.format.unwrap_or(Format::Qcow2);
    if args.machine.name.is_some() || args.format.is_none() {
        return Ok(PullTarget::Folder {
            path,
            format,
            name: args.machine.name.clone(),
            identity,
        });
    }
    Ok(PullTarget::Fitting { path, format, identity })
}

fn run(args: &PullArgs, context: &Context) -> Result<Exit, Error> {
    let request = PullRequest {
        template: args.template.clone(),
        target: target(args)?,
        unsigned: args.unsigned.acceptance(),
        storage: if args.compress {
            Storage::Compressed { level: None }
        } else {
            Storage::Plain
        },
        created_s: u64::try_from(time::now().as_second()).unwrap_or_default(),
        execution: args.dry_run.execution(),
        guest: if args.sysprep {
            TemplateGuest::Renew(sysprep_program(context))
        } else {
            TemplateGuest::Keep
        },
    };
    let tools = LocalTools::new(Arc::clone(context.clock()), SYSPREP_TIME_OUT);
    let repository = context.open_repository()?;
    let environment = context.environment();
    let signatures = signatures(context);
    let trust = args.trust.trust(&signatures, context);
    let inside = args.target.join("image");
    let places = (!args.dry_run).then_some([args.target.as_path(), &inside]);
    let _noted = runs::note_places(places.into_iter().flatten(), context);
    let report = context.work(args.job.thread_count(), |job| {
        pull_template(&repository, &request, &trust, &environment, &tools, job)
    })?;
    context.report(&Pulled {
        dry_run: args.dry_run,
        ..pulled(&report, context)
    })
}

fn pulled(report: &PullReport, context: &Context) -> Pulled {
    let images = report.disks.iter().map(|disk| PulledImageDocument {
        name: disk.name.clone(),
        path: disk.path.display().to_string(),
        size_bytes: disk.size_bytes,
    });
    let (configuration, machine) = report.configuration.clone().unzip();
    Pulled {
        dry_run: false,
        statement: StatementDocument::new(&report.statement, Some(report.snapshot)),
        signed: SignedDocument::new(&report.signed),
        format: report.format.name(),
        images: images.collect(),
        configuration: configuration.map(|path| path.display().to_string()),
        machine,
        duration_ms: units::millis(report.duration),
        local_time: time::local(report.statement.time, context.zone()),
    }
}
