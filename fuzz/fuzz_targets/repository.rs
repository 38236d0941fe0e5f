//! A whole repository with one ruined object: see `crates/repo/tests/common/ruin.rs`.

#![no_main]

#[path = "../../crates/repo/tests/common/mod.rs"]
mod common;

use std::sync::OnceLock;

use common::ruin::Victim;

static VICTIM: OnceLock<Victim> = OnceLock::new();

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    VICTIM.get_or_init(Victim::new).ruin(bytes);
});
