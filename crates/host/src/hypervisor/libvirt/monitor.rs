//! QEMU's monitor through libvirt, which has it open.

use serde_json::Value;
use virt::error::ErrorNumber;

use super::{LibvirtMachine, files, is_code};
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result, answer_of, line_of, logged};

impl Monitor for LibvirtMachine {
    fn execute(&self, command: &QmpCommand) -> Result<Value> {
        logged(command, || self.ask(command))
    }

    fn wake(&self) -> Result<()> {
        self.reconnect().map_err(|error| MonitorError::Transport {
            command: "connect".to_owned(),
            source: error,
        })
    }
}

impl LibvirtMachine {
    fn ask(&self, command: &QmpCommand) -> Result<Value> {
        let line = line_of(command);
        let text = if command.files.is_empty() {
            self.domain().qemu_monitor_command(&line, 0)
        } else {
            files::monitor_command(&self.domain(), &line, &command.files)
        };
        let text = text.map_err(|error| match error.code() {
            // The machine was shut off.
            _ if is_code(&error, ErrorNumber::OperationInvalid) => MonitorError::Gone {
                during: format!("{}: {}", command.name, error.message()),
                source: None,
            },
            _ => MonitorError::Transport {
                command: command.name.to_owned(),
                source: Box::new(error),
            },
        })?;
        answer_of(command.name, text.as_bytes())
    }
}
