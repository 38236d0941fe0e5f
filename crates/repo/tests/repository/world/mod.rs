//! The world of the model: a store, its expected snapshots, and actors that work on it.

#![allow(clippy::print_stdout, reason = "a failure prints its seed")]

mod actor;
mod roles;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize};

use actor::{ActorContext, LONG, Outcome};
use holdfast_block::{BlockDevice, MemoryDevice, SeededRandom};
use holdfast_repo::store::{FaultStore, Interleaver, MemoryStore, ObjectKind, Step, Store};
use holdfast_repo::{Error, Finding, GcRequest, Manifest, Parent, Repository, SnapshotId, TouchedDisk};
use roles::ProcessTable;
use roles::{Actor, ActorFault, Role};

use crate::common::{PASSWORD, SeededBytes, Watch, init_request, request};

/// Number of slots of a disk: each has up to three blocks of content that other disks may have too.
const SLOT_COUNT: usize = 4;
const SLOT_BYTES: usize = 4 * 4096;
const RUN_COUNT: u64 = 9;

/// The content of the slots of a disk; 0 is empty.
pub(crate) type Slots = [u8; SLOT_COUNT];

/// The initial state of every history.
pub(crate) struct Base {
    store: MemoryStore,
    expected: BTreeMap<SnapshotId, Vec<u8>>,
    machines: [Slots; 2],
    runs: Vec<Vec<u8>>,
}

impl Base {
    pub(crate) fn new() -> Self {
        let mut random = SeededRandom::new(77);
        let runs = (0..RUN_COUNT)
            .map(|number| random.bytes(4096 * (1 + holdfast_block::to_usize(number % 3))))
            .collect();
        let store = MemoryStore::new();
        let process_table = Arc::new(ProcessTable::default());
        let time = Arc::new(AtomicI64::new(1_700_000_000_000));
        let environment = roles::environment(&process_table, &time, 1, 1);
        Repository::init(Arc::new(store.clone()), &init_request(), environment).unwrap();
        let mut base = Self {
            store,
            expected: BTreeMap::new(),
            machines: [[1, 2, 3, 4], [1, 2, 5, 0]],
            runs,
        };
        let first = [(0, [1, 2, 3, 0]), (0, [1, 2, 3, 4]), (1, [1, 2, 5, 0])];
        for (number, (machine, slots)) in (2..).zip(first) {
            let repository = open(&base.store, &process_table, &time, number);
            let bytes = base.disk(slots);
            let device = MemoryDevice::from_bytes(&bytes);
            let sources = vec![roles::disk_source(&device)];
            let request = request(roles::MACHINES[machine], number.into(), sources, Parent::Newest, 0);
            let report = repository.backup(request, &Watch::default()).unwrap();
            base.expected.insert(report.snapshot.id, bytes);
        }
        base
    }

    fn disk(&self, slots: Slots) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_COUNT * SLOT_BYTES];
        for (slot, run) in bytes.chunks_mut(SLOT_BYTES).zip(slots) {
            if let Some(run) = usize::from(run).checked_sub(1).map(|run| &self.runs[run]) {
                slot[..run.len()].copy_from_slice(run);
            }
        }
        bytes
    }
}

fn open(store: &MemoryStore, process_table: &Arc<ProcessTable>, time: &Arc<AtomicI64>, process: u32) -> Repository {
    let environment = roles::environment(process_table, time, process, u64::from(process) << 20);
    let opened = Repository::open(Arc::new(store.clone()), PASSWORD, environment).unwrap();
    assert!(opened.warnings.is_empty());
    opened.repository
}

/// One history.
pub(crate) struct World<'a> {
    base: &'a Base,
    seed: u64,
    random: SeededRandom,
    store: MemoryStore,
    process_table: Arc<ProcessTable>,
    time: Arc<AtomicI64>,
    next_process: u32,
    machines: [Slots; 2],
    /// The expected content of every snapshot.
    expected: BTreeMap<SnapshotId, Vec<u8>>,
    /// Snapshots with an attempted removal: they may be gone, and otherwise must be readable.
    doubtful: BTreeSet<SnapshotId>,
    protected: BTreeSet<SnapshotId>,
    /// The content of snapshots that are no longer listed although no forget succeeded. Gc may list one again if a
    /// protection was put before the record of its removal.
    undecided: BTreeMap<SnapshotId, Vec<u8>>,
    /// Snapshots with an attempted protection.
    contested: BTreeSet<SnapshotId>,
    /// Snapshots that were forgotten with success.
    forgotten: BTreeSet<SnapshotId>,
    /// Everything that was ever committed.
    committed: BTreeSet<SnapshotId>,
    /// The content of every backup, committed or not, by its process.
    attempts: BTreeMap<u32, Vec<u8>>,
    /// The findings of checks in this round.
    found: Vec<Finding>,
    /// The steps so far, for the analysis of a failure.
    log: Vec<String>,
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("HOLDFAST_SEED={} fails:\n{}", self.seed, self.log.join("\n"));
        }
    }
}

impl<'a> World<'a> {
    pub(crate) fn new(base: &'a Base, seed: u64) -> Self {
        Self {
            base,
            seed,
            random: SeededRandom::new(!seed),
            store: base.store.duplicate(),
            process_table: Arc::new(ProcessTable::default()),
            time: Arc::new(AtomicI64::new(1_700_000_100_000)),
            next_process: 100,
            machines: base.machines,
            expected: base.expected.clone(),
            doubtful: BTreeSet::new(),
            protected: BTreeSet::new(),
            undecided: BTreeMap::new(),
            contested: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            committed: base.expected.keys().copied().collect(),
            attempts: BTreeMap::new(),
            found: Vec::new(),
            log: Vec::new(),
        }
    }

    fn process(&mut self) -> u32 {
        self.next_process += 1;
        self.next_process
    }

    /// Runs some actors concurrently, and checks the repository afterwards; returns their steps.
    pub(crate) fn round(&mut self) -> Vec<Step> {
        let mut actors = match self.random.below(4) {
            0 => self.contended_actors().unwrap_or_default(),
            _ => Vec::new(),
        };
        if actors.is_empty() || self.random.one_in(4) {
            let count = 2 + self.random.below(8) / 3;
            actors.extend((0..count).map(|_| self.random_actor()));
        }
        self.log.push("round:".to_owned());
        self.log.extend(actors.iter().map(|actor| format!("  {actor:?}")));
        for actor in &actors {
            if let Role::Backup { bytes, .. } = &actor.role {
                self.attempts.insert(actor.process, bytes.clone());
            }
        }
        let are_strangers = self.random.one_in(3);
        self.process_table.set_strangers(are_strangers);
        self.log.push(format!("  strangers to each other: {are_strangers}"));
        let interleaver = Interleaver::new(self.random.next_u64());
        let running = Arc::new(AtomicUsize::new(actors.len()));
        let contexts: Vec<ActorContext> = actors
            .iter()
            .map(|actor| {
                let plan = actor.planned_fault.plan();
                let fault = FaultStore::new(Arc::new(self.store.clone()), plan, self.random.next_u64());
                ActorContext {
                    store: Arc::new(interleaver.actor(Arc::new(fault))),
                    process_table: Arc::clone(&self.process_table),
                    memory: self.store.clone(),
                    time: Arc::clone(&self.time),
                    running: Arc::clone(&running),
                    seed: self.random.next_u64(),
                }
            })
            .collect();
        let mut outcomes: Vec<Option<Outcome>> = actors.iter().map(|_| None).collect();
        let acts = actors
            .iter()
            .zip(contexts)
            .zip(&mut outcomes)
            .map(|((actor, context), outcome)| {
                Box::new(move || *outcome = Some(actor.run(context))) as Box<dyn FnOnce() + Send>
            })
            .collect();
        let panics = interleaver.run(acts);
        let steps = interleaver.steps();
        let number = |step: &Step| {
            step.operation
                .as_ref()
                .map(|operation| format!("  {}: {operation}", step.actor))
        };
        self.log.extend(steps.iter().filter_map(number));
        assert!(panics.iter().all(Result::is_ok), "an actor panicked");
        for (actor, outcome) in actors.iter().zip(outcomes) {
            let outcome = outcome.expect("an actor that did not panic has an outcome");
            self.log
                .push(format!("  process {}: {}", actor.process, outcome.summary()));
            self.check_outcome(actor, outcome, are_strangers);
        }
        self.process_table.set_strangers(false);
        self.check(&actors);
        self.doubtful.clear();
        steps
    }

    /// Asserts that the outcome of an actor is permitted.
    fn check_outcome(&mut self, actor: &Actor, outcome: Outcome, are_strangers: bool) {
        // If the processes are on different hosts and sleeps advance the clock by a month, a living process may be
        // considered dead.
        let is_revoked = matches!(
            outcome,
            Outcome::Backup(Err(Error::Revoked { .. }), _)
                | Outcome::Done(Err(Error::Revoked { .. } | Error::Locked { .. }))
        );
        let survives = actor.planned_fault.survives() && !(are_strangers && is_revoked);
        let process = actor.process;
        match (&actor.role, outcome) {
            (Role::Backup { bytes, .. }, Outcome::Backup(Ok(manifest), warnings)) => {
                self.expected.insert(manifest.id, bytes.clone());
                assert!(
                    !survives || are_strangers || warnings.is_empty(),
                    "process {process} got warnings: {warnings:?}"
                );
            }
            (Role::Backup { .. }, Outcome::Backup(Err(error), _)) => {
                assert!(!survives, "backup {process}: {}", chain(&error));
            }
            (Role::Forget(snapshot), Outcome::Done(result)) => {
                let protected = matches!(result, Err(Error::Protected { .. }));
                let is_missing = matches!(result, Err(Error::NoSnapshot { .. }));
                if !protected {
                    self.doubtful.insert(*snapshot);
                }
                if let Err(error) = &result {
                    assert!(
                        !survives || protected || is_missing,
                        "forget {process}: {}",
                        chain(error)
                    );
                } else {
                    self.forgotten.insert(*snapshot);
                    let listed = self.check_repository().snapshot(*snapshot).is_ok();
                    assert!(!listed, "{snapshot} was forgotten, and is still listed");
                }
            }
            (Role::Protect(snapshot), Outcome::Done(result)) => {
                self.contested.insert(*snapshot);
                let is_missing = matches!(result, Err(Error::NoSnapshot { .. } | Error::Locked { .. }));
                match result {
                    Ok(()) => {
                        self.protected.insert(*snapshot);
                    }
                    Err(error) => assert!(!survives || is_missing, "protect {process}: {}", chain(&error)),
                }
            }
            (Role::Read(snapshot, _), Outcome::Read(result)) => match result {
                Ok(bytes) => assert!(bytes == self.expected[snapshot], "{process} read other data"),
                // Checked after the round, when the forgotten snapshots are known.
                Err(error) => self
                    .log
                    .push(format!("  {process} could not read {snapshot}: {}", chain(&error))),
            },
            (role @ (Role::Gc(..) | Role::Repair), Outcome::Done(Err(error))) => {
                let locked = matches!(error, Error::Locked { .. });
                assert!(!survives || locked, "{role:?} {process}: {}", chain(&error));
            }
            (role @ Role::List, Outcome::Done(Err(error))) | (role @ Role::Check(_), Outcome::Check(Err(error))) => {
                panic!("{role:?} {process}: {}", chain(&error));
            }
            // Checked after the round, when the forgotten snapshots are known.
            (Role::Check(_), Outcome::Check(Ok(findings))) => self.found.extend(findings),
            (Role::Gc(..) | Role::List | Role::Repair, Outcome::Done(Ok(()))) => {}
            (role, _) => unreachable!("{role:?} has another kind of outcome"),
        }
    }

    fn check_repository(&mut self) -> Repository {
        let process = self.process();
        open(&self.store, &self.process_table, &self.time, process)
    }

    /// Asserts that all expected snapshots exist, and have the content that was backed up.
    fn check(&mut self, actors: &[Actor]) {
        let repository = self.check_repository();
        let (manifests, errors) = repository.snapshots().unwrap();
        assert!(errors.is_empty(), "{errors:?}");
        let listed: BTreeMap<SnapshotId, Manifest> = manifests.into_iter().map(|found| (found.id, found)).collect();
        let mut revived = BTreeSet::new();
        for (id, manifest) in &listed {
            if self.expected.contains_key(id) {
                continue;
            }
            if self.contested.contains(id)
                && let Some(bytes) = self.undecided.remove(id)
            {
                self.expected.insert(*id, bytes);
                continue;
            }
            // A writer that crashed may have committed. If it crashed just before its last step, its data is complete
            // too, and repair takes it for a lost snapshot.
            let author = u32::try_from(manifest.time_ms).expect("the number of a process");
            let bytes = self
                .attempts
                .get(&author)
                .unwrap_or_else(|| panic!("no backup made {id}"));
            let has_crashed = actors.iter().any(|actor| {
                actor.process == author
                    && matches!(actor.planned_fault, ActorFault::Crashes(_) | ActorFault::CrashesAt(_))
            });
            let is_repaired = actors.iter().any(|actor| actor.role == Role::Repair);
            assert!(has_crashed || is_repaired, "{id} was made by {author}");
            if !has_crashed {
                revived.insert(*id);
            }
            self.expected.insert(*id, bytes.clone());
        }
        let (protected, doubtful) = (&self.protected, &self.doubtful);
        self.committed
            .extend(self.expected.keys().filter(|id| !revived.contains(*id)));
        self.expected.retain(|id, bytes| {
            let must_be = protected.contains(id) || !doubtful.contains(id);
            let is_listed = listed.contains_key(id);
            assert!(!must_be || is_listed, "{id} is missing");
            if !is_listed && !self.forgotten.contains(id) {
                self.undecided.insert(*id, std::mem::take(bytes));
            }
            is_listed
        });
        for (id, bytes) in &self.expected {
            let read = read_all(&repository, &listed[id]);
            assert!(
                read.as_ref().is_ok_and(|read| read == bytes),
                "{id} has wrong content: {:?}",
                read.err()
            );
        }
        for finding in self.found.drain(..).filter(|finding| finding.kind.is_damage()) {
            let is_forgotten = |touched: &TouchedDisk| self.doubtful.contains(&touched.snapshot);
            let is_of_forgotten = !finding.touches.is_empty() && finding.touches.iter().all(is_forgotten);
            // A lost snapshot cannot be distinguished from one whose writer crashed just before its last step.
            let lost: Option<SnapshotId> = finding.object.strip_prefix("snapshots/").and_then(|id| id.parse().ok());
            let is_excused = is_of_forgotten || lost.is_some_and(|id| !self.committed.contains(&id));
            assert!(is_excused, "concurrent changes count as damage: {finding:?}");
        }
        for line in self.log.iter().rev().take_while(|line| *line != "round:") {
            let unread = actors.iter().find_map(|actor| match &actor.role {
                Role::Read(id, _) if line.contains(&format!("{} could not read {id}", actor.process)) => Some(id),
                _ => None,
            });
            assert!(unread.is_none_or(|id| self.doubtful.contains(id)), "{line}");
        }
    }

    /// When all actors have ended, gc leaves exactly the needed objects.
    pub(crate) fn finish(&mut self) {
        if !self.undecided.is_empty() {
            // A snapshot whose removal has crashed may have a protection that was put before: gc decides after a month.
            self.store.advance_clock(LONG);
        }
        let repository = self.check_repository();
        let request = GcRequest {
            repack_below_percent: 100,
            thread_count: 0,
        };
        let first = repository.gc(request).unwrap();
        self.log.push(format!("{first:?}"));
        assert!(first.waiting_for.is_empty(), "gc waits for dead processes: {first:?}");
        self.check(&[]);
        let second = repository.gc(request).unwrap();
        let found = (second.deleted_pack_count, second.rewritten_bytes);
        assert_eq!(found, (0, 0), "the second gc finds something to do: {second:?}");
        let statistics = repository.statistics().unwrap();
        assert_eq!(statistics.dead_bytes, 0, "{statistics:?}");
        assert_eq!(statistics.snapshot_count, self.expected.len() as u64);
        let mut left = Vec::new();
        self.store
            .list(ObjectKind::Condemned, &mut |name, _| {
                left.push(name);
                Ok(())
            })
            .unwrap();
        assert!(left.is_empty(), "{left:?} are left");
        self.check(&[]);
    }
}

fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn read_all(repository: &Repository, manifest: &Manifest) -> Result<Vec<u8>, holdfast_block::Error> {
    let device = repository.device(&manifest.disks[0]);
    let mut bytes = vec![1; holdfast_block::to_usize(device.size_bytes())];
    device.read_at(&mut bytes, 0)?;
    Ok(bytes)
}
