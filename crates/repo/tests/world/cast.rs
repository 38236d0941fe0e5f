//! Who takes part in a round, and what becomes of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use holdfast_block::MemoryDevice;
use holdfast_repo::store::{Fault, FaultPlan, FaultSpan};
use holdfast_repo::{Liveness, Parent, ProcessIdentity, Processes, SnapshotId, Source, SourceData, Surroundings};

use super::{RUN_COUNT, SLOT_COUNT, SeededBytes, World};

pub(crate) const MACHINES: [&str; 2] = ["alpha", "beta"];

/// What an actor does.
#[derive(Clone)]
pub(crate) enum Role {
    Backup {
        machine: usize,
        bytes: Vec<u8>,
        parent: Parent,
        form: Form,
    },
    Forget(SnapshotId),
    Protect(SnapshotId),
    /// Below how many percent alive packs are rewritten.
    Gc(u8),
    Read(SnapshotId, Way),
    /// Lists snapshots and measures the repository.
    List,
}

/// What a disk is given as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Disk,
    Stream,
}

/// How a snapshot is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Block by block, through the device.
    Device,
    /// By a restore.
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
            Self::Gc(percent) => write!(f, "gc that rewrites below {percent} %"),
            Self::Read(snapshot, way) => write!(f, "read {snapshot} by {way:?}"),
            Self::List => f.write_str("list"),
        }
    }
}

/// What becomes of an actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Lives,
    /// It dies at so many operations.
    Crashes(u64),
    /// After so many operations it does nothing until all others have ended, and is taken for dead meanwhile.
    Sleeps(u64, Liveness),
}

impl Fate {
    pub(super) fn plan(self) -> Option<FaultPlan> {
        match self {
            Self::Crashes(operation) => Some(FaultPlan {
                operation,
                fault: Fault::Crash,
                span: FaultSpan::Forever,
            }),
            Self::Lives | Self::Sleeps(..) => None,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Actor {
    pub(crate) role: Role,
    pub(crate) fate: Fate,
    pub(crate) process: u32,
}

/// All processes, and what others see of them. Whoever never was is dead.
#[derive(Default)]
pub(crate) struct Town(Mutex<BTreeMap<u32, Liveness>>);

impl Town {
    pub(crate) fn set(&self, process: u32, liveness: Liveness) {
        self.0.lock().unwrap().insert(process, liveness);
    }
}

/// A process of the town.
pub(crate) struct Process {
    pub(crate) town: Arc<Town>,
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
        let known = self.town.0.lock().unwrap().get(&process.process).copied();
        known.unwrap_or(Liveness::Dead)
    }
}

/// The surroundings of a process. Time goes on when somebody looks.
pub(crate) fn surroundings(town: &Arc<Town>, time: &Arc<AtomicI64>, number: u32, seed: u64) -> Surroundings {
    let time = Arc::clone(time);
    Surroundings {
        randomness: Arc::new(SeededBytes::new(seed)),
        processes: Arc::new(Process {
            town: Arc::clone(town),
            number,
        }),
        now_ms: Arc::new(move || time.fetch_add(1, Ordering::Relaxed)),
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
    /// Draws an actor.
    pub(super) fn cast(&mut self) -> Actor {
        let process = self.process();
        self.town.set(process, Liveness::Alive);
        let role = match self.random.below(100) {
            0..40 => self.backup(),
            40..70 => Role::Gc([0, 30, 60, 100][self.index(4)]),
            70..84 => self.snapshot().map_or(Role::List, Role::Forget),
            84..88 => self.snapshot().map_or(Role::List, Role::Protect),
            88..97 => {
                let way = [Way::Device, Way::Restore][self.index(2)];
                self.snapshot().map_or(Role::List, |snapshot| Role::Read(snapshot, way))
            }
            _ => Role::List,
        };
        let fate = match (&role, self.random.below(100)) {
            (Role::Read(..) | Role::List, _) | (_, 0..75) => Fate::Lives,
            (Role::Backup { .. }, 75..87) => {
                let seen = [Liveness::Dead, Liveness::Unknown][self.index(2)];
                Fate::Sleeps(4 + self.random.below(40), seen)
            }
            _ => Fate::Crashes(4 + self.random.below(90)),
        };
        Actor { role, fate, process }
    }

    fn index(&mut self, count: u64) -> usize {
        holdfast_block::to_usize(self.random.below(count))
    }

    /// A snapshot that is there before the round; mostly not a protected one, or nothing would be forgotten any more.
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
