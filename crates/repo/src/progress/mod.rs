//! What a job says of itself while it runs: how far it is, and where its time goes.

pub(crate) mod job;
pub(crate) mod stage;
