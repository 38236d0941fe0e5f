//! What switches of several verbs mean to the engine.

use holdfast_engine::{Continuation, Execution, Unsigned};

/// A switch that was given or not.
pub trait Switch {
    /// What `--same-machine` means.
    fn continuation(self) -> Continuation;

    /// What `--dry-run` means.
    fn execution(self) -> Execution;

    /// What `--unsigned` means.
    fn acceptance(self) -> Unsigned;
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

    fn acceptance(self) -> Unsigned {
        if self { Unsigned::Accept } else { Unsigned::Refuse }
    }
}
