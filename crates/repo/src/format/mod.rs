//! The binary formats of a repository's objects.

pub(crate) mod chunker;
pub(crate) mod codec;
pub(crate) mod config;
pub(crate) mod fingerprint;
pub(crate) mod index;
pub(crate) mod machine_code;
pub(crate) mod manifest;
pub(crate) mod map;
pub(crate) mod pack;
pub(crate) mod relocation;
