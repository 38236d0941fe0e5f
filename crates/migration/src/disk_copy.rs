//! The copy of one disk of the machine.

use std::sync::Arc;
use std::sync::mpsc::Sender as Outbox;

use holdfast_engine::Job;
use holdfast_live_copy::{
    ConvergenceOptions, CopyDirector, CopyPurpose, DiskId, ExistingTarget, FreezeTrigger, Freezer, InterruptedCopy,
    LiveCopyReport, LiveCopyRequest, ReceiveRequest, TrackedSource, Unconverged, copy_live, session_of,
};

use crate::disks::{DiskObserver, MoveEvent, MoveOutcome, StoppedByHypervisor};
use crate::migration_tools::MigrationTools;
use crate::move_progress::DiskProgress;
use crate::plan::MigrationPlan;

/// One of the disks.
pub(crate) struct DiskRun<'a> {
    pub(crate) disk: usize,
    pub(crate) outcome: &'a MoveOutcome,
    pub(crate) freezer: &'a StoppedByHypervisor,
    pub(crate) director: &'a CopyDirector,
}

pub(crate) fn copy_disk(
    plan: &MigrationPlan,
    tools: &MigrationTools<'_>,
    run: &DiskRun<'_>,
    events: &Outbox<MoveEvent>,
    job: Job<'_>,
) -> holdfast_live_copy::Result<LiveCopyReport> {
    let planned = &plan.disks[run.disk];
    let freezer: &dyn Freezer = run.freezer;
    let source = TrackedSource::open(tools.tracked, run.disk, freezer)?;
    let receive = ReceiveRequest {
        target: planned.path.clone(),
        size_bytes: planned.size_bytes,
        expected_bytes: 0,
        existing: ExistingTarget::Refuse,
        interrupted: InterruptedCopy::Continue,
        seed: planned.seed.clone(),
    };
    let layout = receive.layout().map_err(|error| holdfast_live_copy::Error::Source {
        reason: error.to_string(),
    })?;
    let progress = DiskProgress::new(job.progress, planned.size_bytes);
    let job = Job {
        progress: &progress,
        ..job
    };
    let path = planned.path.as_os_str().as_encoded_bytes();
    let place = tools.connector.place();
    let request = LiveCopyRequest {
        source: &source,
        layout,
        connector: Arc::clone(&tools.connector),
        receive,
        session: session_of(&[plan.uuid.as_bytes(), planned.target.as_bytes(), place.as_bytes(), path]),
        disk: DiskId([0; 16]),
        convergence: ConvergenceOptions {
            frozen_max: tools.frozen_max,
            // The rest of the memory, and the start there.
            other_frozen: tools.frozen_max / 2,
            throttle: tools.throttle,
            unconverged: Unconverged::GiveUp,
        },
        purpose: CopyPurpose::Handover,
        trigger: FreezeTrigger::OnRequest,
        director: Some(run.director),
        attempt_count_max: tools.attempt_count_max + 1,
        retry_time: tools.retry_time,
        clock: Arc::clone(&tools.clock),
        randomness: tools.randomness,
        program: tools.program.clone(),
        observer: &DiskObserver {
            disk: run.disk,
            events: events.clone(),
            outcome: run.outcome,
            shown: tools.observer,
        },
    };
    copy_live(&request, job)
}
