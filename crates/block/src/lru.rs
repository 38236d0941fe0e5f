//! A cache of bounded bytes, which evicts the least recently used value first.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Values by key, of limited total size.
#[derive(Debug)]
pub struct LruCache<K, V> {
    bytes_max: usize,
    bytes: usize,
    clock: u64,
    entries: HashMap<K, CacheEntry<V>>,
    by_use: BTreeMap<u64, K>,
}

#[derive(Debug)]
struct CacheEntry<V> {
    value: V,
    bytes: usize,
    used: u64,
}

impl<K: Eq + Hash + Copy, V: Clone> LruCache<K, V> {
    /// An empty cache.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            bytes: 0,
            clock: 0,
            entries: HashMap::new(),
            by_use: BTreeMap::new(),
        }
    }

    /// The value of `key`, which becomes the most recently used one.
    pub fn get(&mut self, key: &K) -> Option<V> {
        let entry = self.entries.get_mut(key)?;
        self.clock += 1;
        self.by_use.remove(&entry.used);
        entry.used = self.clock;
        self.by_use.insert(self.clock, *key);
        Some(entry.value.clone())
    }

    /// Evicts values until there is room for a value of `bytes`. Returns the value that was evicted last, so that its
    /// memory can be reused.
    pub fn make_room(&mut self, bytes: usize) -> Option<V> {
        let mut last = None;
        while self.bytes + bytes > self.bytes_max {
            let Some((_, oldest)) = self.by_use.pop_first() else {
                break;
            };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.bytes -= entry.bytes;
                last = Some(entry.value);
            }
        }
        last
    }

    /// Adds a value that counts as `bytes`. The newest value is kept even if it alone exceeds the bound.
    pub fn insert(&mut self, key: K, value: V, bytes: usize) {
        self.remove(&key);
        self.clock += 1;
        self.by_use.insert(self.clock, key);
        self.entries.insert(
            key,
            CacheEntry {
                value,
                bytes,
                used: self.clock,
            },
        );
        self.bytes += bytes;
        while self.bytes > self.bytes_max && self.entries.len() > 1 {
            let Some((_, oldest)) = self.by_use.pop_first() else {
                break;
            };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.bytes -= entry.bytes;
            }
        }
    }

    /// Removes the value of `key`, if there is one.
    pub fn remove(&mut self, key: &K) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= entry.bytes;
            self.by_use.remove(&entry.used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::LruCache;

    #[test]
    fn the_least_recently_used_entry_is_evicted_first() {
        let mut cache = LruCache::new(10);
        for key in 0..3 {
            cache.insert(key, key, 4);
        }
        assert_eq!(cache.get(&0), None);
        assert_eq!(cache.get(&1), Some(1));
        cache.insert(3, 3, 4);
        assert_eq!((cache.get(&1), cache.get(&2), cache.get(&3)), (Some(1), None, Some(3)));
        cache.insert(4, 4, 100);
        assert_eq!((cache.get(&3), cache.get(&4)), (None, Some(4)));
        cache.insert(5, 5, 6);
        assert_eq!((cache.make_room(4), cache.get(&5)), (None, Some(5)));
        cache.insert(6, 6, 2);
        assert_eq!((cache.make_room(9), cache.get(&6)), (Some(6), None));
        assert_eq!(cache.make_room(11), None);
        cache.insert(4, 4, 100);
        cache.remove(&4);
        assert_eq!((cache.bytes, cache.by_use.len()), (0, 0));
    }
}
