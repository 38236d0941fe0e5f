//! A bounded cache of shared values, least recently used out first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

/// Values by host offset; holds at most `capacity_bytes`, or one value where that is larger.
///
/// The lock is held for a look-up, never for a read from the file: two threads that miss the same value both read it.
#[derive(Debug)]
pub(crate) struct Lru<V> {
    capacity_bytes: u64,
    inner: Mutex<LruState<V>>,
}

#[derive(Debug)]
struct LruState<V> {
    values: HashMap<u64, CachedValue<V>>,
    by_age: BTreeMap<u64, u64>,
    now: u64,
    held_bytes: u64,
}

#[derive(Debug)]
struct CachedValue<V> {
    value: Arc<V>,
    bytes: u64,
    used_at: u64,
}

impl<V> Lru<V> {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            inner: Mutex::new(LruState {
                values: HashMap::new(),
                by_age: BTreeMap::new(),
                now: 0,
                held_bytes: 0,
            }),
        }
    }

    pub(crate) fn get(&self, key: u64) -> Option<Arc<V>> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.now += 1;
        let now = inner.now;
        let slot = inner.values.get_mut(&key)?;
        let before = std::mem::replace(&mut slot.used_at, now);
        let value = Arc::clone(&slot.value);
        inner.by_age.remove(&before);
        inner.by_age.insert(now, key);
        Some(value)
    }

    pub(crate) fn insert(&self, key: u64, value: Arc<V>, bytes: u64) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.remove(key);
        inner.now += 1;
        let now = inner.now;
        inner.values.insert(
            key,
            CachedValue {
                value,
                bytes,
                used_at: now,
            },
        );
        inner.by_age.insert(now, key);
        inner.held_bytes += bytes;
        while inner.held_bytes > self.capacity_bytes && inner.values.len() > 1 {
            let oldest = *inner.by_age.first_key_value().expect("as many ages as values").1;
            inner.remove(oldest);
        }
    }

    pub(crate) fn remove(&self, key: u64) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

impl<V> LruState<V> {
    fn remove(&mut self, key: u64) {
        if let Some(slot) = self.values.remove(&key) {
            self.by_age.remove(&slot.used_at);
            self.held_bytes -= slot.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Lru;

    #[test]
    fn least_recently_used_is_evicted_first() {
        let cache = Lru::new(30);
        for key in 0..3 {
            cache.insert(key, Arc::new(key), 10);
        }
        assert!(cache.get(0).is_some());
        cache.insert(3, Arc::new(3), 10);
        assert!(cache.get(1).is_none(), "the oldest");
        assert_eq!(cache.get(0).as_deref(), Some(&0));
        cache.insert(4, Arc::new(4), 100);
        assert_eq!(cache.get(4).as_deref(), Some(&4), "one value always fits");
        assert!(cache.get(0).is_none());
    }
}
