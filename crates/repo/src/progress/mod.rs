//! Progress and timing of a running job.

pub(crate) mod job;
pub(crate) mod stage;
