//! Operations on a running machine that all jobs share.

pub(crate) mod devices;
pub(crate) mod hooks;
pub(crate) mod lock;
pub(crate) mod noted_run;
pub(crate) mod other_runs;
pub(crate) mod overlay_commit;
pub(crate) mod place_note;
pub(crate) mod pull_record;
pub(crate) mod quiesce;
pub(crate) mod run_journal;
pub(crate) mod state;
pub(crate) mod tracked;
pub(crate) mod watchdog;
