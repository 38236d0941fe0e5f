//! The deduplicating, encrypted, self-checking repository.

pub mod key;
pub mod store;
