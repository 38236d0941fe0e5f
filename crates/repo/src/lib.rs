//! The deduplicating, encrypted, self-checking repository.

pub mod store;
