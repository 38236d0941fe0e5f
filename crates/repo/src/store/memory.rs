//! A store in memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::to_usize;

use super::{ObjectKind, ObjectName, ObjectWriter, Put, Result, Store, StoreError};

/// A store in memory, for tests and simulation. Listings are sorted by name.
///
/// A clone is another handle of the same store.
#[derive(Debug, Clone)]
pub struct MemoryStore {
    contents: Arc<Mutex<MemoryState>>,
}

#[derive(Debug, Clone)]
struct MemoryState {
    objects: BTreeMap<ObjectName, Arc<[u8]>>,
    /// The clock of the store, which is only advanced explicitly.
    time: Duration,
    /// When the objects were put.
    put_times: BTreeMap<ObjectName, Duration>,
    used_bytes: u64,
    capacity_bytes: u64,
}

impl MemoryStore {
    /// An empty store without a size limit.
    pub fn new() -> Self {
        Self::with_capacity(u64::MAX)
    }

    /// An empty store with a total capacity of `capacity_bytes`.
    pub fn with_capacity(capacity_bytes: u64) -> Self {
        Self {
            contents: Arc::new(Mutex::new(MemoryState {
                objects: BTreeMap::new(),
                time: Duration::ZERO,
                put_times: BTreeMap::new(),
                used_bytes: 0,
                capacity_bytes,
            })),
        }
    }

    /// A copy of all present objects.
    pub fn objects(&self) -> BTreeMap<ObjectName, Arc<[u8]>> {
        self.lock().objects.clone()
    }

    /// Another store with the same objects.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        let contents = self.lock().clone();
        Self {
            contents: Arc::new(Mutex::new(contents)),
        }
    }

    /// Advances the clock of the store.
    pub fn advance_clock(&self, by: Duration) {
        self.lock().time += by;
    }

    /// Replaces the bytes of an object, which a real store never does: simulates damage in tests.
    pub fn damage(&self, name: &ObjectName, bytes: &[u8]) {
        let mut contents = self.lock();
        contents.remove(name);
        contents.used_bytes += bytes.len() as u64;
        let time = contents.time;
        contents.put_times.insert(name.clone(), time);
        contents.objects.insert(name.clone(), bytes.into());
    }

    fn lock(&self) -> MutexGuard<'_, MemoryState> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, name: &ObjectName) -> Result<Arc<[u8]>> {
        let found = self.lock().objects.get(name).cloned();
        found.ok_or_else(|| StoreError::NotFound { name: name.clone() })
    }
}

impl MemoryState {
    fn insert(&mut self, name: &ObjectName, bytes: &[u8]) -> Result<Put> {
        if self.objects.contains_key(name) {
            return Ok(Put::AlreadyExists);
        }
        let length = bytes.len() as u64;
        if length > self.capacity_bytes.saturating_sub(self.used_bytes) {
            return Err(StoreError::NoSpace { store: describe() });
        }
        self.used_bytes += length;
        self.put_times.insert(name.clone(), self.time);
        self.objects.insert(name.clone(), bytes.into());
        Ok(Put::Created)
    }

    fn remove(&mut self, name: &ObjectName) {
        self.put_times.remove(name);
        if let Some(bytes) = self.objects.remove(name) {
            self.used_bytes -= bytes.len() as u64;
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

fn describe() -> String {
    "memory".to_owned()
}

impl Store for MemoryStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> Result<Put> {
        self.lock().insert(name, bytes)
    }

    fn create(&self, name: &ObjectName) -> Result<Box<dyn ObjectWriter>> {
        Ok(Box::new(MemoryWriter {
            store: self.clone(),
            name: name.clone(),
            bytes: Vec::new(),
        }))
    }

    fn get(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>> {
        let bytes = self.find(name)?;
        let length = bytes.len() as u64;
        if length > length_max {
            return Err(StoreError::TooLarge {
                name: name.clone(),
                length,
                length_max,
            });
        }
        Ok(bytes.to_vec())
    }

    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let bytes = self.find(name)?;
        let actual = bytes.len() as u64;
        let expected = offset.saturating_add(buffer.len() as u64);
        if expected > actual {
            return Err(StoreError::ShortObject {
                name: name.clone(),
                expected,
                actual,
            });
        }
        buffer.copy_from_slice(&bytes[to_usize(offset)..to_usize(expected)]);
        Ok(())
    }

    fn length(&self, name: &ObjectName) -> Result<u64> {
        Ok(self.find(name)?.len() as u64)
    }

    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> Result<()>) -> Result<()> {
        let found: Vec<_> = self
            .lock()
            .objects
            .iter()
            .filter(|(name, _)| name.kind() == kind)
            .map(|(name, bytes)| (name.clone(), bytes.len() as u64))
            .collect();
        found.into_iter().try_for_each(|(name, length)| visit(name, length))
    }

    fn ages(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> Result<()>) -> Result<()> {
        let found: Vec<_> = {
            let contents = self.lock();
            let of_kind = contents.put_times.iter().filter(|(name, _)| name.kind() == kind);
            let aged = of_kind.map(|(name, time)| (name.clone(), contents.time.saturating_sub(*time)));
            aged.collect()
        };
        found.into_iter().try_for_each(|(name, age)| visit(name, Some(age)))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.lock().remove(name);
        Ok(())
    }

    fn foreign_files(&self, _visit: &mut dyn FnMut(String) -> Result<()>) -> Result<()> {
        Ok(())
    }

    fn clean(&self, _age: Duration) -> Result<u64> {
        // Unfinished objects exist only in their writers.
        Ok(0)
    }

    fn describe(&self) -> String {
        describe()
    }

    fn free_bytes(&self) -> Option<u64> {
        let contents = self.lock();
        Some(contents.capacity_bytes.saturating_sub(contents.used_bytes))
    }
}

struct MemoryWriter {
    store: MemoryStore,
    name: ObjectName,
    bytes: Vec<u8>,
}

impl ObjectWriter for MemoryWriter {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn commit(self: Box<Self>) -> Result<Put> {
        self.store.put(&self.name, &self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::conformance;

    #[test]
    fn memory_is_a_store() {
        conformance::check(&mut || Arc::new(MemoryStore::new()));
    }

    #[test]
    fn a_full_store_accepts_writes_after_a_deletion() {
        let store = MemoryStore::with_capacity(10);
        let [a, b] = ["a", "b"].map(|name| ObjectName::new(ObjectKind::Index, name).unwrap());
        assert_eq!(store.put(&a, &[0; 6]).unwrap(), Put::Created);
        assert!(matches!(store.put(&b, &[0; 5]), Err(StoreError::NoSpace { .. })));
        assert_eq!(store.free_bytes(), Some(4));
        store.delete(&a).unwrap();
        assert_eq!(store.put(&b, &[0; 10]).unwrap(), Put::Created);
        let other = store.duplicate();
        other.delete(&b).unwrap();
        assert_eq!(store.length(&b).unwrap(), 10);
    }
}
