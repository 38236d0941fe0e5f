//! A fault at one command, with a notification.

use std::sync::mpsc::Sender;

/// The kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// QEMU refuses the command.
    Refused,
    /// QEMU executes the command when the next one arrives, or the client has disconnected. Its answer is late.
    Late,
    /// QEMU does not answer any more until the client has disconnected.
    Hung,
    /// The connection is lost, and QEMU has not executed the command.
    LostBefore,
    /// The connection is lost, and QEMU has executed the command.
    LostAfter,
    /// QEMU has executed the command, and the client is killed: it gets no answer, and its connections are closed,
    /// including those to exports.
    ///
    /// The model's end of the monitor's connection stays open, so that the thread that represents the client waits
    /// there forever. Like a killed process, it does nothing more.
    Killed,
}

impl FaultKind {
    /// All kinds.
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
    /// The kind of the fault.
    pub kind: FaultKind,
    /// The number of the command, counted from 1 since the fault was armed.
    pub at: usize,
    /// Notified when the fault has occurred.
    pub happened: Option<Sender<()>>,
}

/// The armed fault, and the commands since it was armed.
#[derive(Debug, Default)]
pub(crate) struct FaultPlan {
    pub(crate) armed: Option<Fault>,
    pub(crate) commands: Vec<String>,
}

impl FaultPlan {
    /// Counts a command; returns the fault that occurs at it, if any.
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
