//! The store of machine states that belong to host snapshots.

use std::path::PathBuf;

use holdfast_engine::{Execution, Job, MemoryOptions, Providers, StateStore, sweep_states};

use crate::context::Context;
use crate::machines::guests::MemoryHow;
use crate::process::environment;

/// Option for the place of states.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct StateArgs {
    /// Folder for the configuration, firmware variables, TPM and memory that belong to host snapshots [env: HOLDFAST_STATES]
    #[arg(long, value_name = "FOLDER")]
    states: Option<PathBuf>,
}

impl StateArgs {
    /// The folder; `None` if there is no place for it.
    pub fn folder(&self, context: &Context) -> Option<PathBuf> {
        let named = || context.variable(environment::STATES).map(PathBuf::from);
        let default = || Some(context.journal_folder()?.with_file_name("states"));
        self.states.clone().or_else(named).or_else(default)
    }

    /// Opens the store if it exists.
    pub fn open(&self, context: &Context, job: Job<'_>) -> holdfast_engine::Result<Option<StateStore>> {
        match self.folder(context) {
            Some(folder) => StateStore::open(&folder, &context.environment(), job),
            None => Ok(None),
        }
    }

    /// Opens or creates the store; `None` without a place for it.
    pub fn open_or_create(&self, context: &Context, job: Job<'_>) -> holdfast_engine::Result<Option<StateStore>> {
        let open = |folder: PathBuf| StateStore::open_or_create(&folder, &context.environment(), job);
        self.folder(context).map(open).transpose()
    }

    /// The same for memory; the absence of a place is an error.
    pub fn open_for_memory(&self, context: &Context, job: Job<'_>) -> holdfast_engine::Result<StateStore> {
        let store = self.open_or_create(context, job)?;
        store.ok_or_else(|| holdfast_engine::Error::File {
            action: "find a place for the memory of machines,",
            path: "--states".into(),
            source: std::io::ErrorKind::NotFound.into(),
        })
    }

    /// Opens the store for reading; an empty one if there is none. Nothing is created.
    pub fn open_to_look(&self, context: &Context, job: Job<'_>) -> holdfast_engine::Result<StateStore> {
        StateStore::open_to_look(self.folder(context).as_deref(), &context.environment(), job)
    }

    /// The same if the store is optional: a note says why there is none.
    pub fn open_if_possible(&self, context: &Context, job: Job<'_>) -> Option<StateStore> {
        self.open_or_create(context, job).unwrap_or_else(|error| {
            let message = format!("configurations of machines are not kept with their host snapshots: {error}");
            job.progress.warning(&message);
            None
        })
    }

    /// Removes the record of an incomplete rollback after a machine was completely restored from elsewhere.
    pub fn forget_unfinished(&self, uuid: &str, context: &Context, job: Job<'_>) {
        let forgotten = self.open(context, job).and_then(|store| match store {
            Some(store) => store.forget_unfinished(uuid),
            None => Ok(()),
        });
        if let Err(error) = forgotten {
            job.progress
                .note(&format!("a rollback that did not end is still noted: {error}"));
        }
    }

    /// Removes states that no host snapshot needs any more; errors become warnings.
    pub fn sweep(&self, providers: &Providers, context: &Context, job: Job<'_>) {
        let swept = self.open(context, job).and_then(|store| match store {
            Some(store) => sweep_states(&store, providers, Execution::Execute, job).map(drop),
            None => Ok(()),
        });
        if let Err(error) = swept {
            let message = format!("unused states of machines cannot be removed: {error}");
            job.progress.warning(&message);
        }
    }
}

/// How memory is saved, if it is requested and has a place.
pub fn memory_wish(how: Option<MemoryHow>, store: Option<&StateStore>, context: &Context) -> Option<MemoryOptions> {
    how.zip(store).map(|(how, store)| MemoryOptions {
        way: how.into(),
        runtime: context.runtime_folder(),
        scratch: store.scratch(),
    })
}
