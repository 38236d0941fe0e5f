//! Conversion of switches that several verbs have into types of the engine.

use holdfast_engine::{Continuation, Execution, Unsigned};

/// A command line switch.
pub trait Switch {
    /// The meaning of `--same-machine`.
    fn continuation(self) -> Continuation;

    /// The meaning of `--dry-run`.
    fn execution(self) -> Execution;

    /// The meaning of `--unsigned`.
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
