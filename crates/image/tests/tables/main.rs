//! Block formats, compared with QEMU: each side reads what the other one writes.

#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]

#[path = "../peer/mod.rs"]
mod peer;

mod chains;
mod cut;
mod deltas;
mod flat;
mod identities;
mod matrix;
mod repairing;
mod resizing;
mod streams;
mod vmdks;
