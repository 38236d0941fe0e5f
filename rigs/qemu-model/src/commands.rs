//! The commands of QEMU that Holdfast uses: their effects and their errors.

mod bitmaps;
mod devices;
mod exports;
mod files;
mod jobs;
mod nodes;
mod queries;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, Weak};

use serde_json::{Value, json};

use crate::refusal::{Answer, Refusal};
use crate::serving::NbdServer;
use crate::state::State;

/// Input of a command besides its arguments, and leftovers after it.
pub(crate) struct CommandContext<'a> {
    /// Files that the client has sent and no command has used yet.
    pub(crate) files: &'a mut VecDeque<OwnedFd>,
    pub(crate) shared: &'a Weak<Mutex<State>>,
    /// A server that was stopped. It must be dropped after the state is unlocked.
    pub(crate) stopped: Option<NbdServer>,
}

impl State {
    pub(crate) fn execute(&mut self, name: &str, arguments: &Value, context: &mut CommandContext<'_>) -> Answer<Value> {
        let done = match name {
            "qmp_capabilities" => Ok(()),
            "stop" => {
                self.is_running = false;
                Ok(())
            }
            "cont" => {
                self.is_running = true;
                Ok(())
            }
            "blockdev-add" => self.add_node(arguments),
            "blockdev-del" => self.delete_node(arguments),
            "blockdev-reopen" => self.reopen(arguments),
            "qom-set" => self.set_drive(arguments),
            "transaction" => self.transact(arguments),
            "block-dirty-bitmap-add" => self.add_bitmap(arguments),
            "block-dirty-bitmap-remove" => self.remove_bitmap(arguments),
            "block-dirty-bitmap-merge" => self.merge_bitmap(arguments),
            "block-dirty-bitmap-clear" => self.clear_bitmap(arguments),
            "block-dirty-bitmap-disable" => self.disable_bitmap(arguments),
            "nbd-server-start" => self.start_server(arguments, context),
            "nbd-server-stop" => self.stop_server(context),
            "block-export-add" => self.add_export(arguments),
            "block-export-del" => self.delete_export(arguments),
            "blockdev-backup" => self.begin_backup(arguments),
            "job-cancel" => self.cancel_job(arguments),
            "job-dismiss" => self.dismiss_job(arguments),
            "add-fd" => return self.add_fd(arguments, context),
            "remove-fd" => self.remove_fd(arguments),
            "getfd" => self.get_fd(arguments, context),
            "closefd" => self.close_fd(arguments),
            _ => return self.query(name, arguments),
        };
        done.map(|()| json!({}))
    }

    fn query(&mut self, name: &str, arguments: &Value) -> Answer<Value> {
        match name {
            "qom-get" => self.property(arguments),
            "qom-list" => self.properties(arguments),
            "query-jobs" => Ok(self.describe_jobs()),
            "query-block-jobs" => Ok(self.describe_block_jobs()),
            "query-fdsets" => Ok(self.describe_fd_sets()),
            "query-block-exports" => Ok(self.describe_exports()),
            "query-block" => Ok(self.describe_devices()),
            "query-blockstats" => Ok(self.describe_counters()),
            "query-named-block-nodes" => Ok(self.describe_nodes()),
            "x-debug-query-block-graph" => Ok(self.describe_graph()),
            "query-iothreads" => Ok(self.describe_iothreads()),
            _ => self.describe(name).ok_or_else(|| Refusal::command_not_found(name)),
        }
    }
}
