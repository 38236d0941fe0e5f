//! What switches of several verbs mean to the engine.

use holdfast_engine::{Continuation, Execution};

/// What `--same-machine` means.
pub fn continuation(same_machine: bool) -> Continuation {
    if same_machine {
        Continuation::Stated
    } else {
        Continuation::SameIdentity
    }
}

/// What `--dry-run` means.
pub fn execution(dry_run: bool) -> Execution {
    if dry_run { Execution::DryRun } else { Execution::Execute }
}
