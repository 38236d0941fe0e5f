//! Devices on real files and block devices, overlays, and the formats that they store.

#![allow(clippy::unwrap_used, reason = "a test may panic, also outside its test functions")]

mod file;
mod fixtures;
mod loop_device;
mod overlay;
