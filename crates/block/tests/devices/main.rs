//! Files and block devices as devices, overlays, and the formats that both store.

#![allow(clippy::unwrap_used, reason = "a test may panic, also outside its test functions")]

mod file;
mod fixtures;
mod loop_device;
mod overlay;
