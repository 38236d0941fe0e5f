//! What switches of several verbs mean to the engine.

use holdfast_engine::{Continuation, Execution};

/// A switch that was given or not.
pub trait Switch {
    /// What `--same-machine` means.
    fn continuation(self) -> Continuation;

    /// What `--dry-run` means.
    fn execution(self) -> Execution;
}

impl Switch for bool {
    fn continuation(self) -> Continuation {
        if self {
            Continuation::Stated
        } else {
            Continuation::SameIdentity
        }
    }

    fn execution(self) -> Execution {
        if self { Execution::DryRun } else { Execution::Execute }
    }
}
