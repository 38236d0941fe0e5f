//! Devices for tests: they fail, crash, record and check. Behind the feature `testing`.

pub mod conformance;
pub(crate) mod crash;
pub(crate) mod fault;
pub(crate) mod trace;
