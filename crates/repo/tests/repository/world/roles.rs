//! The processes of a round, and the faults that happen to them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use holdfast_block::MemoryDevice;
use holdfast_repo::store::{Fault, FaultPlan, FaultSpan, ObjectKind};
use holdfast_repo::{
    Environment, Error, Liveness, Parent, ProcessIdentity, Processes, SnapshotId, Source, SourceData, VerifyDepth,
};

use super::{RUN_COUNT, SLOT_COUNT, SeededBytes, World};

pub(crate) const MACHINES: [&str; 2] = ["alpha", "beta"];

/// The task of an actor.
#[derive(Clone, PartialEq)]
pub(crate) enum Role {
    Backup {
        machine: usize,
        bytes: Vec<u8>,
        parent: Parent,
        form: Form,
    },
    Forget(SnapshotId),
    Protect(SnapshotId),
    /// Packs that are used less than this many percent are rewritten; gc is run this many times.
    Gc(u8, u32),
    Read(SnapshotId, ReadMethod),
    /// Lists snapshots and measures the repository.
    List,
    Check(Check),
    /// Repairs the repository, which has no damage here, only leftovers.
    Repair,
}

/// How the repository, which has no damage, is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    Verify(VerifyDepth),
    Scrub,
}

/// The type of the source of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Disk,
    Stream,
}

/// How a snapshot is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadMethod {
    Device,
    Restore,
}

impl std::fmt::Debug for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Backup {
                machine, parent, form, ..
            } => {
                write!(f, "backup of {} as {form:?}, parent {parent:?}", MACHINES[*machine])
            }
            Self::Forget(snapshot) => write!(f, "forget {snapshot}"),
            Self::Protect(snapshot) => write!(f, "protect {snapshot}"),
            Self::Gc(percent, times) => write!(f, "gc that rewrites below {percent} %, {times} times"),
            Self::Read(snapshot, method) => write!(f, "read {snapshot} by {method:?}"),
            Self::List => f.write_str("list"),
            Self::Check(check) => write!(f, "check, {check:?}"),
            Self::Repair => f.write_str("repair"),
        }
    }
}

/// What happens to an actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ActorFault {
    Survives,
    /// Crashes at the n-th operation.
    Crashes(u64),
    /// Crashes before a certain step.
    CrashesAt(Moment),
    /// After n operations it sleeps until all others have ended, and is considered dead meanwhile.
    Sleeps(u64, Liveness),
    /// Sleeps before a certain step.
    SleepsAt(Moment, Liveness),
    /// Yields n times before a certain step, so that the others can do much meanwhile.
    Stalls(Moment, u32),
}

/// A step of an actor: its n-th operation of this kind on objects of this kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) act: Act,
    pub(crate) kind: ObjectKind,
    pub(crate) number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Put,
    List,
    Delete,
}

/// Steps of a backup at which it may be interrupted.
const MOMENTS_OF_BACKUP: [(Act, ObjectKind); 6] = [
    (Act::List, ObjectKind::Condemned),
    (Act::List, ObjectKind::Pack),
    (Act::List, ObjectKind::Index),
    (Act::Put, ObjectKind::Pack),
    (Act::Put, ObjectKind::Snapshot),
    (Act::Delete, ObjectKind::Writer),
];

/// Steps of gc at which it may be interrupted.
const MOMENTS_OF_GC: [(Act, ObjectKind); 8] = [
    (Act::List, ObjectKind::Pack),
    (Act::List, ObjectKind::Condemned),
    (Act::Put, ObjectKind::Condemned),
    (Act::Delete, ObjectKind::Condemned),
    (Act::List, ObjectKind::Writer),
    (Act::List, ObjectKind::Snapshot),
    (Act::Put, ObjectKind::Relocation),
    (Act::Delete, ObjectKind::Pack),
];

impl ActorFault {
    pub(super) fn plan(self) -> Option<FaultPlan> {
        match self {
            Self::Crashes(operation) => Some(FaultPlan {
                operation,
                fault: Fault::Crash,
                span: FaultSpan::Forever,
            }),
            _ => None,
        }
    }

    /// Whether others see the actor as alive until it ends.
    pub(crate) fn survives(self) -> bool {
        matches!(self, Self::Survives | Self::Stalls(..))
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Actor {
    pub(crate) role: Role,
    pub(crate) planned_fault: ActorFault,
    pub(crate) process: u32,
}

/// The liveness of all processes, as others see it. An unknown process is dead.
#[derive(Default)]
pub(crate) struct ProcessTable {
    seen: Mutex<BTreeMap<u32, Liveness>>,
    are_strangers: AtomicBool,
}

impl ProcessTable {
    pub(crate) fn set(&self, process: u32, liveness: Liveness) {
        self.seen.lock().unwrap().insert(process, liveness);
    }

    /// Sets whether each process has a host of its own, so that none can see whether another is alive.
    pub(crate) fn set_strangers(&self, are_strangers: bool) {
        self.are_strangers.store(are_strangers, Ordering::Relaxed);
    }
}

/// The clock of a process, which depends on its number: wrong, too fast, or jumping.
fn clock_of(number: u32, true_ms: i64) -> i64 {
    const DAY_MS: i64 = 24 * 3600 * 1000;
    const START_MS: i64 = 1_700_000_000_000;
    match number % 8 {
        0 => true_ms - 30 * DAY_MS,
        1 => true_ms + 30 * DAY_MS,
        2 => true_ms - 3650 * DAY_MS,
        3 => true_ms + 3650 * DAY_MS,
        // Stopped in 1970.
        4 => 0,
        // Too fast.
        5 => true_ms + (true_ms - START_MS) * 50_000,
        // Jumps back and forth by more than a year.
        6 => true_ms + (true_ms % 7 - 3) * 400 * DAY_MS,
        _ => true_ms,
    }
}

pub(crate) struct Process {
    pub(crate) process_table: Arc<ProcessTable>,
    pub(crate) number: u32,
}

impl Processes for Process {
    fn this(&self) -> ProcessIdentity {
        ProcessIdentity {
            host: "host".to_owned(),
            boot: "boot".to_owned(),
            namespace: "namespace".to_owned(),
            process: self.number,
            started: 0,
        }
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        if process.process != self.number && self.process_table.are_strangers.load(Ordering::Relaxed) {
            return Liveness::Unknown;
        }
        let known = self.process_table.seen.lock().unwrap().get(&process.process).copied();
        known.unwrap_or(Liveness::Dead)
    }
}

/// The environment of a process with its own clock. Each read of the clock advances the time.
pub(crate) fn environment(
    process_table: &Arc<ProcessTable>,
    time: &Arc<AtomicI64>,
    number: u32,
    seed: u64,
) -> Environment {
    let time = Arc::clone(time);
    Environment {
        randomness: Arc::new(SeededBytes::new(seed)),
        processes: Arc::new(Process {
            process_table: Arc::clone(process_table),
            number,
        }),
        now_ms: Arc::new(move || clock_of(number, time.fetch_add(1, Ordering::Relaxed))),
    }
}

pub(crate) fn disk_source(device: &MemoryDevice) -> Source<'_> {
    Source {
        name: "vda".into(),
        data: SourceData::Disk(device),
        notes: BTreeMap::new(),
    }
}

impl World<'_> {
    /// A random actor.
    pub(super) fn random_actor(&mut self) -> Actor {
        let process = self.process();
        self.process_table.set(process, Liveness::Alive);
        let role = match self.random.below(100) {
            0..40 => self.backup(),
            40..66 => Role::Gc([0, 30, 60, 100][self.index(4)], 1),
            66..80 => self.snapshot().map_or(Role::List, Role::Forget),
            80..84 => self.snapshot().map_or(Role::List, Role::Protect),
            84..92 => {
                let method = [ReadMethod::Device, ReadMethod::Restore][self.index(2)];
                self.snapshot()
                    .map_or(Role::List, |snapshot| Role::Read(snapshot, method))
            }
            92..96 => {
                let depth = [VerifyDepth::Structure, VerifyDepth::Full][self.index(2)];
                Role::Check([Check::Scrub, Check::Verify(depth)][self.index(2)])
            }
            96..98 => Role::Repair,
            _ => Role::List,
        };
        let planned_fault = match (&role, self.random.below(100)) {
            (Role::Read(..) | Role::List | Role::Check(_), _) | (_, 0..65) => ActorFault::Survives,
            (Role::Backup { .. }, 65..75) => self.stalls(&MOMENTS_OF_BACKUP),
            (Role::Gc(..), 65..75) => self.stalls(&MOMENTS_OF_GC),
            (_, 75..92) => {
                let seen = self.seen();
                ActorFault::Sleeps(1 + self.random.below(90), seen)
            }
            _ => ActorFault::Crashes(4 + self.random.below(90)),
        };
        Actor {
            role,
            planned_fault,
            process,
        }
    }

    fn stalls(&mut self, moments: &[(Act, ObjectKind)]) -> ActorFault {
        let moment = self.moment(moments);
        ActorFault::Stalls(moment, 1 << (3 + self.random.below(7)))
    }

    fn moment(&mut self, moments: &[(Act, ObjectKind)]) -> Moment {
        let (act, kind) = moments[self.index(moments.len() as u64)];
        Moment {
            act,
            kind,
            number: 1 + self.random.below(3) / 2,
        }
    }

    fn seen(&mut self) -> Liveness {
        [Liveness::Dead, Liveness::Unknown][self.index(2)]
    }

    /// One gc falls asleep just before it deletes packs, another one takes over its list, and at that moment the backup
    /// reads the lists: the packs that the first one deletes when it wakes must be on one of the lists all the time.
    fn replaced_gc(&mut self, backup: Role) -> [(Role, ActorFault); 3] {
        let at = |act, kind, number| Moment { act, kind, number };
        let pauses = |world: &mut Self, from: u64| 1 << (from + world.random.below(3));
        let seen = self.seen();
        let asleep = at(Act::Delete, ObjectKind::Pack, 1);
        let looks = ActorFault::Stalls(at(Act::List, ObjectKind::Condemned, 1), pauses(self, 6));
        let takes_over = ActorFault::Stalls(at(Act::Put, ObjectKind::Condemned, 1), pauses(self, 7));
        [
            (backup, looks),
            (Role::Gc(0, 1), ActorFault::SleepsAt(asleep, seen)),
            (Role::Gc(0, 2), takes_over),
        ]
    }

    /// The actors of a round in which a backup needs exactly the data that gc is about to delete.
    ///
    /// A snapshot has been forgotten, and a backup slowly stores the same content again. Meanwhile gc runs several
    /// times, and some runs crash or fall asleep at a critical step.
    pub(super) fn contended_actors(&mut self) -> Option<Vec<Actor>> {
        let snapshot = self.snapshot().filter(|id| !self.protected.contains(id))?;
        match self.check_repository().forget(snapshot, "contended") {
            // Protected by an actor that could not report its success.
            Err(Error::Protected { .. }) => return None,
            other => other.unwrap(),
        }
        self.log.push(format!("{snapshot} is forgotten"));
        let bytes = self.expected.remove(&snapshot)?;
        let backup = Role::Backup {
            machine: self.index(2),
            bytes,
            parent: [Parent::None, Parent::Newest][self.index(2)],
            form: Form::Disk,
        };
        let backup = (backup, self.stalls(&MOMENTS_OF_BACKUP));
        let percent = [0, 0, 60][self.index(3)];
        let planned_fault = match self.random.below(4) {
            0 => ActorFault::Survives,
            1 => self.stalls(&MOMENTS_OF_GC),
            2 => {
                let seen = self.seen();
                ActorFault::SleepsAt(self.moment(&MOMENTS_OF_GC), seen)
            }
            _ => ActorFault::CrashesAt(self.moment(&MOMENTS_OF_GC)),
        };
        let first = (Role::Gc(percent, 1), planned_fault);
        let planned_fault = match self.random.below(2) {
            0 => ActorFault::Survives,
            _ => self.stalls(&MOMENTS_OF_GC),
        };
        let second = (Role::Gc([0, 60][self.index(2)], 2), planned_fault);
        let roles = if self.random.one_in(3) {
            self.replaced_gc(backup.0)
        } else {
            [backup, first, second]
        };
        let actors = roles.map(|(role, planned_fault)| {
            let process = self.process();
            self.process_table.set(process, Liveness::Alive);
            Actor {
                role,
                planned_fault,
                process,
            }
        });
        Some(actors.into())
    }

    fn index(&mut self, count: u64) -> usize {
        holdfast_block::to_usize(self.random.below(count))
    }

    /// A snapshot from before the round; mostly an unprotected one, because otherwise no snapshot would be forgotten
    /// any more.
    fn snapshot(&mut self) -> Option<SnapshotId> {
        let all: Vec<_> = self.expected.keys().copied().collect();
        let free: Vec<_> = all.iter().copied().filter(|id| !self.protected.contains(id)).collect();
        let from = if free.is_empty() || self.random.one_in(8) {
            all
        } else {
            free
        };
        (!from.is_empty()).then(|| from[self.index(from.len() as u64)])
    }

    fn backup(&mut self) -> Role {
        let machine = self.index(2);
        for _ in 0..=self.random.below(2) {
            let slot = self.index(SLOT_COUNT as u64);
            self.machines[machine][slot] = u8::try_from(self.random.below(RUN_COUNT + 1)).unwrap();
        }
        let parent = match self.random.below(10) {
            0 => Parent::None,
            _ => Parent::Newest,
        };
        let form = if self.random.one_in(6) {
            Form::Stream
        } else {
            Form::Disk
        };
        let mut bytes = self.base.disk(self.machines[machine]);
        if form == Form::Stream {
            bytes.truncate(bytes.len() - 77);
        }
        Role::Backup {
            machine,
            bytes,
            parent,
            form,
        }
    }
}
