//! Open files that a client passes to QEMU.

use std::fs::File;
use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use super::CommandContext;
use crate::refusal::{Answer, Refusal, text};
use crate::state::{FdSet, State};

impl State {
    pub(super) fn add_fd(&mut self, arguments: &Value, context: &mut CommandContext<'_>) -> Answer<Value> {
        let file = take_file(context)?;
        let number = self.number();
        let label = arguments.get("opaque").and_then(Value::as_str).unwrap_or_default();
        let set = FdSet {
            label: label.to_owned(),
            file: File::from(file),
            is_removed: false,
            user_count: 0,
        };
        self.fd_sets.insert(number, set);
        Ok(json!({ "fdset-id": number, "fd": number }))
    }

    pub(super) fn remove_fd(&mut self, arguments: &Value) -> Answer<()> {
        let number = arguments.get("fdset-id").and_then(Value::as_u64).unwrap_or_default();
        let set = self.fd_sets.get_mut(&number);
        let set =
            set.ok_or_else(|| Refusal::generic(format!("File descriptor named 'fdset-id:{number}' not found")))?;
        set.is_removed = true;
        self.close_unused_files();
        Ok(())
    }

    pub(super) fn get_fd(&mut self, arguments: &Value, context: &mut CommandContext<'_>) -> Answer<()> {
        let file = take_file(context)?;
        self.files.insert(text(arguments, "fdname")?.to_owned(), file);
        Ok(())
    }

    pub(super) fn close_fd(&mut self, arguments: &Value) -> Answer<()> {
        let name = text(arguments, "fdname")?;
        let closed = self.files.remove(name).map(drop);
        closed.ok_or_else(|| Refusal::generic(format!("File descriptor named '{name}' not found")))
    }

    pub(super) fn describe_fd_sets(&self) -> Value {
        let sets = self
            .fd_sets
            .iter()
            .map(|(number, set)| json!({ "fdset-id": number, "fds": [{ "fd": number, "opaque": set.label }] }));
        sets.collect()
    }
}

fn take_file(context: &mut CommandContext<'_>) -> Answer<OwnedFd> {
    let file = context.files.pop_front();
    file.ok_or_else(|| Refusal::generic("No file descriptor supplied via SCM_RIGHTS"))
}
