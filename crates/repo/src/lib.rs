//! The deduplicating, encrypted, self-checking repository.
