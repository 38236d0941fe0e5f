//! Claims for exclusive work: a second process is refused, and a dead process blocks no other one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_repo::store::{MemoryStore, ObjectKind, Store};
use holdfast_repo::{Environment, Error, Liveness, ProcessIdentity, Processes, Repository, SystemProcesses};

use crate::common::{Rig, environment, init_request};

/// Processes that are alive until the test declares all of them dead.
#[derive(Default)]
struct KillableProcesses {
    are_dead: AtomicBool,
}

impl Processes for KillableProcesses {
    fn this(&self) -> ProcessIdentity {
        SystemProcesses.this()
    }

    fn liveness(&self, _: &ProcessIdentity) -> Liveness {
        if self.are_dead.load(Ordering::Relaxed) {
            Liveness::Dead
        } else {
            Liveness::Alive
        }
    }
}

fn writer_count(store: &MemoryStore) -> usize {
    let mut count = 0;
    let counted = store.list(ObjectKind::Writer, &mut |_, _| {
        count += 1;
        Ok(())
    });
    counted.unwrap();
    count
}

#[test]
fn a_claim_excludes_a_second_one_of_the_same_name() {
    let rig = Rig::new(1);
    let claim = rig.repository.claim("a push", "template a:latest").unwrap();
    assert!(claim.holds().unwrap());
    let refused = rig.repository.claim("a push", "template a:latest").map(drop);
    assert!(
        matches!(&refused, Err(Error::Locked { what: "a push", who }) if who.contains("process")),
        "{refused:?}"
    );
    drop(rig.repository.claim("a push", "template a:other").unwrap());
    assert!(claim.holds().unwrap());
    drop(claim);
    assert_eq!(writer_count(&rig.store), 0);
    drop(rig.repository.claim("a push", "template a:latest").unwrap());
}

/// Of several concurrent claims exactly one succeeds, in every round.
#[test]
fn exactly_one_of_several_concurrent_claims_succeeds() {
    let rig = Rig::new(2);
    for round in 0..20 {
        let held: Vec<bool> = std::thread::scope(|scope| {
            let barrier = Arc::new(std::sync::Barrier::new(4));
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let (barrier, repository) = (Arc::clone(&barrier), &rig.repository);
                    scope.spawn(move || {
                        barrier.wait();
                        let claim = repository.claim("a push", "template a:latest");
                        barrier.wait();
                        claim.is_ok()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(held.iter().filter(|held| **held).count(), 1, "{round}");
    }
}

#[test]
fn a_claim_of_a_dead_process_does_not_block_another() {
    let store = MemoryStore::new();
    let processes = Arc::new(KillableProcesses::default());
    let environment = Environment {
        processes: Arc::clone(&processes) as Arc<dyn Processes>,
        ..environment(3)
    };
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), environment).unwrap();
    let first = repository.claim("a push", "template a:latest").unwrap();
    processes.are_dead.store(true, Ordering::Relaxed);
    let second = repository.claim("a push", "template a:latest").unwrap();
    assert!(!first.holds().unwrap());
    assert!(second.holds().unwrap());
    // An expired claim does not remove the claim that replaced it.
    drop(first);
    assert!(second.holds().unwrap());
    drop(second);
    assert_eq!(writer_count(&store), 0);
}
