//! Tests of the rules with known and random calendars and histories, and comparisons with systemd and sanoid.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod calendar;
mod golden;
mod properties;
mod random;
mod replication;
mod sanoid;
mod simulate;
mod systemd;
