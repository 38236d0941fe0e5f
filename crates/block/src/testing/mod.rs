//! Devices for tests that fail, crash, record and check. They need the feature `testing`.

pub mod conformance;
pub(crate) mod crash;
pub(crate) mod fault;
pub(crate) mod trace;
