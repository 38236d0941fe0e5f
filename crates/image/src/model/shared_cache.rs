//! A bounded cache of shared values, which several threads use.

use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::{LruCache, to_usize};

/// Values by host offset; limited to a number of bytes, or to one value if that is larger.
///
/// The lock is held for a lookup, never during a read from the file: two threads that miss the same value both read
/// it.
#[derive(Debug)]
pub(crate) struct SharedCache<V>(Mutex<LruCache<u64, Arc<V>>>);

impl<V> SharedCache<V> {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        Self(Mutex::new(LruCache::new(to_usize(capacity_bytes))))
    }

    pub(crate) fn get(&self, key: u64) -> Option<Arc<V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key)
    }

    pub(crate) fn insert(&self, key: u64, value: Arc<V>, bytes: u64) {
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cache.insert(key, value, to_usize(bytes));
    }

    pub(crate) fn remove(&self, key: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
    }
}
