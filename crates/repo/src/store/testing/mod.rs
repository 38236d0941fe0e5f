//! Stores for tests: they fail, crash, and interleave operations by a seed. Behind the feature `testing`.

pub mod conformance;
pub(crate) mod fault;
pub(crate) mod operation;
pub(crate) mod scheduler;
pub(crate) mod seeded;
