//! Logs commands to QEMU and their results.

use serde_json::Value;

use super::{QmpCommand, Result};

/// Runs a command, and logs it before and after.
pub(crate) fn logged(command: &QmpCommand, run: impl FnOnce() -> Result<Value>) -> Result<Value> {
    log::debug!("{} {}", command.name, command.arguments);
    let result = run();
    match &result {
        Ok(answer) => {
            log::debug!("{} is done", command.name);
            log::trace!("{} answers {answer}", command.name);
        }
        Err(error) => log::debug!("{} failed: {error}", command.name),
    }
    result
}
