//! Block formats, compared with QEMU: each side reads what the other one writes.

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
