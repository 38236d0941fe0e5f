//! Races that once caused damage, each replayed completely.

mod checks;
mod forgets;
mod gc;
mod writers;

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::MemoryDevice;
use holdfast_repo::store::Store;
use holdfast_repo::{
    BackupReport, GcRequest, Liveness, Parent, ProcessIdentity, Processes, Repository, Source, SourceData,
};

use crate::common::{Disk, PASSWORD, Rig, SeededBytes, environment, request, source};

const REWRITE_ALL: GcRequest = GcRequest {
    repack_below_percent: 100,
    thread_count: 0,
};

/// Another process on the repository, which sees all other processes in the given state.
struct Other(Option<Liveness>);

impl Processes for Other {
    fn this(&self) -> ProcessIdentity {
        ProcessIdentity {
            host: "other".into(),
            boot: "other".into(),
            namespace: "other".into(),
            process: 1,
            started: 1,
        }
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        match self.0 {
            Some(others) if *process != self.this() => others,
            _ => Liveness::Alive,
        }
    }
}

fn another(rig: &Rig, seed: u64, others: Liveness) -> Repository {
    let mut environment = environment(seed);
    environment.processes = Arc::new(Other(Some(others)));
    environment.randomness = Arc::new(SeededBytes::new(seed));
    let store: Arc<dyn Store> = Arc::new(rig.store.clone());
    Repository::open(store, PASSWORD, environment).unwrap().repository
}

/// A stream during which another process does something.
struct HookedStream<'a> {
    bytes: &'a [u8],
    act: Option<Box<dyn FnOnce() + 'a>>,
}

impl Read for HookedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(act) = self.act.take() {
            act();
        }
        self.bytes.read(buffer)
    }
}

/// Backs up a disk, and a stream in the middle of which `act` is called.
fn back_up_while(rig: &Rig, disk: &Disk, act: impl FnOnce()) -> holdfast_repo::Result<BackupReport> {
    let device = MemoryDevice::from_bytes(&disk.bytes);
    let mut stream = HookedStream {
        bytes: &disk.bytes,
        act: Some(Box::new(act)),
    };
    let sources = vec![
        source("vda", SourceData::Disk(&device)),
        source("memory", SourceData::Stream(&mut stream)),
    ];
    rig.repository
        .backup(request("m", 1, sources, Parent::Newest, 0), &rig.progress)
}

const MONTH_AND_MORE: Duration = Duration::from_secs(31 * 24 * 3600);
const WEEK_AND_MORE: Duration = Duration::from_secs(8 * 24 * 3600);

fn request_of_another(sources: Vec<Source<'_>>) -> holdfast_repo::BackupRequest<'_> {
    request("other", 7, sources, Parent::None, 0)
}
