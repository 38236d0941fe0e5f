//! `holdfast container snapshot`.

use std::time::Duration;

use holdfast_engine::{Consistency, SnapshotRequest, TakenMemory, TakenSnapshot, take_memory_snapshot, take_snapshot};
use serde::Serialize;

use super::freeze_args::{FreezeArgs, warn_of_freeze};
use super::runtime_args::RuntimeProgramArgs;
use super::{ContainerArg, now_s};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `container snapshot`.
#[derive(Debug, clap::Args)]
pub(super) struct ContainerSnapshotArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// A name for the snapshot
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// A comment
    #[arg(long, value_name = "TEXT", default_value = "")]
    comment: String,
    #[command(flatten)]
    freeze: FreezeArgs,
    /// Store the memory of this container of runc too, whose root file system is on the disk; it is paused meanwhile
    #[arg(long, value_name = "ID", conflicts_with = "no_freeze")]
    runc: Option<String>,
    #[command(flatten)]
    programs: RuntimeProgramArgs,
}

impl Verb for ContainerSnapshotArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Take a snapshot before an upgrade",
            line: "holdfast container snapshot /srv/web1 before-upgrade",
        },
        Example {
            wish: "With the memory of a container that runc runs from its disk",
            line: "holdfast container snapshot /srv/web1 before-upgrade --runc web1",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let request = SnapshotRequest {
            name: self.name.clone(),
            comment: self.comment.clone(),
            created_s: now_s(),
            properties: std::collections::BTreeMap::new(),
            consistency: match self.runc {
                Some(_) => Consistency::Frozen,
                None => self.freeze.consistency(),
            },
        };
        let container = place.folder.display().to_string();
        if let Some(id) = &self.runc {
            let tools = self.programs.tools(context);
            let runtime = self.programs.request(id, self.programs.root()?, &tools)?;
            let taken = context.work(1, |job| take_memory_snapshot(&place, &request, &runtime, job))?;
            warn_of_freeze(&taken.snapshot, context);
            let mut report = SnapshotTaken::new(&taken.snapshot, container);
            report.memory = Some(MemoryDocument::new(id, &taken));
            return context.report(&report);
        }
        let taken = context.work(1, |job| take_snapshot(&place, &request, job))?;
        warn_of_freeze(&taken, context);
        context.report(&SnapshotTaken::new(&taken, container))
    }
}

/// Report of `container snapshot`.
#[derive(Debug, Serialize)]
struct SnapshotTaken {
    container: String,
    id: String,
    name: String,
    consistency: &'static str,
    paused_ms: f64,
    memory: Option<MemoryDocument>,
}

/// The memory of a snapshot.
#[derive(Debug, Serialize)]
struct MemoryDocument {
    runc: String,
    bytes: u64,
    /// How long the processes were paused in all.
    paused_ms: f64,
    /// How long CRIU took.
    dump_ms: f64,
    /// How long it took to make the memory durable.
    sync_ms: f64,
}

impl MemoryDocument {
    fn new(id: &str, taken: &TakenMemory) -> Self {
        Self {
            runc: id.to_owned(),
            bytes: taken.memory_bytes,
            paused_ms: milliseconds(taken.paused),
            dump_ms: milliseconds(taken.memory),
            sync_ms: milliseconds(taken.sync),
        }
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

impl SnapshotTaken {
    fn new(taken: &TakenSnapshot, container: String) -> Self {
        Self {
            container,
            id: taken.id.clone(),
            name: taken.name.clone(),
            consistency: taken.state.word(),
            paused_ms: milliseconds(Duration::from_micros(taken.paused_us)),
            memory: None,
        }
    }
}

impl Report for SnapshotTaken {
    fn command(&self) -> &'static str {
        "container snapshot"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let how = match self.consistency {
            "unmounted" => "the container is not mounted".to_owned(),
            "frozen" => format!("its file system was frozen for {:.1} ms", self.paused_ms),
            _ => format!("as after a power failure; writes waited for {:.1} ms", self.paused_ms),
        };
        page.line(&format!("{} of {}: {how}", self.name, self.container));
        if let Some(memory) = &self.memory {
            page.line(&format!(
                "with {} of memory of {}: it was paused for {:.0} ms, of that {:.0} ms for its memory and {:.0} ms to make it durable",
                units::bytes(memory.bytes),
                memory.runc,
                memory.paused_ms,
                memory.dump_ms,
                memory.sync_ms
            ));
        }
    }
}
