//! Exports a machine in its present state: the data of its point in time is exported directly, without a copy in between.

use std::cell::RefCell;
use std::sync::Arc;

use holdfast_repo::SourceData;

use super::content::{ContentDisk, MachineContent, left_behind};
use super::planned::{ExportPlan, PlannedExportDisk};
use super::reads::DiskReads;
use super::virtualbox::VirtualBoxStreams;
use super::{ExportContext, ExportDestination, ExportOutput, ExportReport};
use crate::capture::qemu::{MachineReadRequest, MachineReading};
use crate::capture::sink::{History, PointInTime, SnapshotSink};
use crate::capture::{capture, plan_capture_into};
use crate::job::error::ExchangeError;
use crate::job::{Bottleneck, Job, MachineName, Progress, Result, Unit};
use crate::notes::{STREAM_DOMAIN, STREAM_NVRAM};
use crate::repository::name_conflict::Claimant;

/// Reads a machine, and exports it.
pub(super) fn export(
    request: MachineReadRequest<'_>,
    of: ExportContext<'_>,
    target: ExportDestination,
) -> Result<(ExportReport, MachineReading)> {
    let job = of.job;
    let quiet = Counted(job.progress);
    let sink = Exporter {
        machine: request.capture.name.to_string(),
        job,
        wish: RefCell::new(Some((of, target))),
        exported: RefCell::new(None),
    };
    let job = Job {
        progress: &quiet,
        ..job
    };
    let reading = capture(request, &sink, job)?;
    // The report of an export does not contain them.
    for (target, why) in &reading.left_out {
        job.progress
            .note(&format!("disk {target} of {} is left out: {why}", sink.machine));
    }
    let (report, made) = sink.exported.into_inner().expect("what was read was exported");
    made.finish()?;
    Ok((report, reading))
}

/// Plans the export: the machine is examined, and neither locked nor read.
pub(super) fn plan(request: MachineReadRequest<'_>, name: Option<String>, job: Job<'_>) -> Result<ExportPlan> {
    let machine = request.capture.name.to_string();
    let sink = Exporter {
        machine: machine.clone(),
        job,
        wish: RefCell::new(None),
        exported: RefCell::new(None),
    };
    let reading = plan_capture_into(&sink, request, job)?;
    let disks = reading.disks.iter().filter_map(|disk| {
        Some(PlannedExportDisk {
            name: disk.name.clone(),
            size_bytes: disk.size_bytes?,
        })
    });
    let disks: Vec<PlannedExportDisk> = disks.collect();
    if disks.is_empty() {
        return Err(ExchangeError::NoDisk { machine }.into());
    }
    Ok(ExportPlan {
        snapshot: None,
        name: name.unwrap_or_else(|| machine.clone()),
        machine,
        disks,
        dropped: Vec::new(),
        memory_bytes: None,
        reading: Some(reading),
    })
}

/// Receives the content of the machine and exports it.
struct Exporter<'a> {
    machine: String,
    job: Job<'a>,
    wish: RefCell<Option<(ExportContext<'a>, ExportDestination)>>,
    exported: RefCell<Option<(ExportReport, ExportOutput)>>,
}

impl SnapshotSink for Exporter<'_> {
    fn phase(&self, machine: &MachineName) -> String {
        format!("exporting {machine}")
    }

    fn begin(&self, machine: &MachineName, _claimant: Claimant<'_>) -> Result<()> {
        self.job.progress.phase(&self.phase(machine), Unit::Bytes);
        Ok(())
    }

    fn history(&self) -> Option<History<'_>> {
        None
    }

    fn store(&self, point: PointInTime<'_>) -> Result<()> {
        let (of, target) = self.wish.take().expect("it is stored once");
        let mut content = MachineContent {
            machine: self.machine.clone(),
            disks: Vec::new(),
            reads: DiskReads::Once,
            text: None,
            variables: None,
            why_unknown: "the machine is known by its monitor only",
            dropped: left_behind(point.sources.iter().map(|source| &source.name[..])),
            of_virtualbox: VirtualBoxStreams::default(),
            of_xen: None,
            suspended: None,
        };
        for source in point.sources {
            match source.data {
                SourceData::Disk(device) | SourceData::Changes { device, .. } => content.disks.push(ContentDisk {
                    name: source.name,
                    device: Arc::new(device),
                }),
                SourceData::Stream(stream) if source.name == STREAM_NVRAM => {
                    let mut variables = Vec::new();
                    stream.read_to_end(&mut variables).expect("it is in memory");
                    content.variables = Some(variables);
                }
                SourceData::Stream(stream) if source.name == STREAM_DOMAIN => {
                    let mut text = Vec::new();
                    stream.read_to_end(&mut text).expect("it is in memory");
                    content.text = Some(String::from_utf8_lossy(&text).into_owned());
                }
                SourceData::Stream(_) | SourceData::Stored(_) => {}
            }
        }
        if content.disks.is_empty() {
            return Err(ExchangeError::NoDisk {
                machine: self.machine.clone(),
            }
            .into());
        }
        self.exported.replace(Some(of.write(content, target)?));
        Ok(())
    }

    fn withdraw(&self, _reason: &str) -> Result<()> {
        self.exported.take();
        Ok(())
    }

    fn snapshot(&self) -> Option<String> {
        None
    }
}

/// The writer reports the progress of an export; progress of the reader would count the bytes twice.
struct Counted<'a>(&'a dyn Progress);

impl Progress for Counted<'_> {
    fn phase(&self, _name: &str, _unit: Unit) {}
    fn total(&self, _total: u64) {}
    fn advance(&self, _amount: u64) {}

    fn note(&self, message: &str) {
        self.0.note(message);
    }

    fn warning(&self, message: &str) {
        self.0.warning(message);
    }

    fn bottleneck(&self, bottleneck: Bottleneck) {
        self.0.bottleneck(bottleneck);
    }
}
