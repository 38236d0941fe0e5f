//! A fault at one command, and its notification.

use std::sync::mpsc::Sender;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// QEMU refuses the command.
    Refused,
    /// QEMU does it when the next command comes, or the client has gone. Its answer comes too late.
    Late,
    /// QEMU does nothing from there on until the client has gone.
    Hung,
    /// The connection ends, and QEMU has not done it.
    LostBefore,
    /// The connection ends, and QEMU has done it.
    LostAfter,
    /// QEMU has done it, and the client ends: it gets no answer, and its connections are closed, also those to exports.
    ///
    /// Its side of the monitor's connection stays open, so that a thread that stands for the client waits there for good and does nothing
    /// that a process could not do that was killed.
    Killed,
}

impl FaultKind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Refused,
        Self::Late,
        Self::Hung,
        Self::LostBefore,
        Self::LostAfter,
        Self::Killed,
    ];
}

/// A fault at one command.
#[derive(Debug)]
pub struct Fault {
    /// What goes wrong.
    pub kind: FaultKind,
    /// The number of the command, counted from 1 since the fault was armed.
    pub at: usize,
    /// Notified when the fault has happened.
    pub happened: Option<Sender<()>>,
}

/// What came since faults were armed last.
#[derive(Debug, Default)]
pub(crate) struct FaultPlan {
    pub(crate) armed: Option<Fault>,
    pub(crate) commands: Vec<String>,
}

impl FaultPlan {
    /// Counts a command; gives what goes wrong at it.
    pub(crate) fn next(&mut self, command: &str) -> Option<FaultKind> {
        self.commands.push(command.to_owned());
        let number = self.commands.len();
        let fault = self.armed.take_if(|fault| fault.at == number)?;
        Some(fault.kind).inspect(|_| {
            if let Some(happened) = fault.happened {
                // The receiver may have ended.
                happened.send(()).ok();
            }
        })
    }
}
