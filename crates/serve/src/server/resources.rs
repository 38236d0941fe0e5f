//! Resources that all servers of a process share: connections, memory for requests, and workers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::budget::Budget;
use super::limits::Limits;
use super::workers::Workers;

/// The resources of one or several servers. Clones share them, so that the limits apply to all protocols together.
#[derive(Clone)]
pub struct ServerResources {
    pool: Arc<ResourcePool>,
}

struct ResourcePool {
    limits: Limits,
    workers: Workers,
    budget: Arc<Budget>,
    last_connection: AtomicU64,
    counts: Mutex<ConnectionCounts>,
}

/// Number of connections of all servers.
#[derive(Debug, Default)]
pub(super) struct ConnectionCounts {
    pub(super) total: usize,
    by_address: BTreeMap<IpAddr, usize>,
}

impl ServerResources {
    /// Resources within these limits.
    pub fn new(limits: Limits) -> Self {
        Self {
            pool: Arc::new(ResourcePool {
                workers: Workers::new(limits.worker_count_max),
                budget: Arc::new(Budget::new(limits.memory_bytes_max)),
                limits,
                last_connection: AtomicU64::new(0),
                counts: Mutex::default(),
            }),
        }
    }

    /// Number of connections of all servers that share these resources.
    pub fn connection_count(&self) -> usize {
        self.counts().total
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        &self.pool.limits
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.pool.workers
    }

    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.pool.budget
    }

    /// A number that no other connection of these servers has.
    pub(super) fn next_connection(&self) -> u64 {
        self.pool.last_connection.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn counts(&self) -> MutexGuard<'_, ConnectionCounts> {
        self.pool.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ResourcePool {
    fn drop(&mut self) {
        self.workers.close();
    }
}

impl ConnectionCounts {
    /// Number of connections from an address.
    pub(super) fn of(&self, address: IpAddr) -> usize {
        self.by_address.get(&address).copied().unwrap_or(0)
    }

    pub(super) fn add(&mut self, address: Option<IpAddr>) {
        self.total += 1;
        if let Some(address) = address {
            *self.by_address.entry(address).or_default() += 1;
        }
    }

    pub(super) fn remove(&mut self, address: Option<IpAddr>) {
        self.total -= 1;
        if let Some(address) = address
            && let Some(count) = self.by_address.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&address);
            }
        }
    }
}
