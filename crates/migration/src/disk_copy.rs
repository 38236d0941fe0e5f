//! The copy of one disk of the machine.

use std::sync::Arc;
use std::sync::mpsc::Sender as Outbox;

use holdfast_engine::Job;
use holdfast_live_copy::{
    ConvergenceOptions, CopyDirector, CopyPurpose, DiskId, ExistingTarget, FreezeTrigger, InterruptedCopy,
    LiveCopyReport, LiveCopyRequest, LiveSource, ReceiveRequest, copy_live, session_of,
};

use crate::disks::{DiskObserver, MoveEvent, MoveOutcome};
use crate::migration_tools::MigrationTools;
use crate::move_progress::DiskProgress;
use crate::plan::MigrationPlan;

/// One of the disks.
pub(crate) struct DiskRun<'a> {
    pub(crate) disk: usize,
    pub(crate) source: &'a dyn LiveSource,
    pub(crate) convergence: ConvergenceOptions,
    /// Number of attempts to freeze.
    pub(crate) attempt_count_max: u32,
    pub(crate) outcome: &'a MoveOutcome,
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
    let receive = ReceiveRequest {
        target: planned.path.clone(),
        size_bytes: planned.size_bytes,
        expected_bytes: 0,
        existing: ExistingTarget::Refuse,
        interrupted: InterruptedCopy::Continue,
        seed: planned.seed.clone(),
        format: None,
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
        source: run.source,
        layout,
        connector: Arc::clone(&tools.connector),
        receive,
        session: session_of(&[plan.uuid.as_bytes(), planned.target.as_bytes(), place.as_bytes(), path]),
        disk: DiskId([0; 16]),
        convergence: run.convergence,
        purpose: CopyPurpose::Handover,
        trigger: FreezeTrigger::OnRequest,
        director: Some(run.director),
        compression: tools.compression,
        rate: Arc::clone(&tools.rate),
        attempt_count_max: run.attempt_count_max,
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
