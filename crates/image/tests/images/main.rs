//! Images on real files: each side reads what the other one writes, and damage is refused.

#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]

mod changed_on_disk;
mod checking;
mod conformance;
mod cut_off;
mod peer;
mod plans;
mod reading;
mod tables;
mod writing;
