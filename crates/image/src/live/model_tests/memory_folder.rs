//! A folder in memory whose changes can be cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use holdfast_block::{Error as BlockError, ExtentKind, ExtentList, Result as BlockResult, SeededRandom, to_usize};

use crate::file::{Access, ImageFile};
use crate::live::folder::{ChainFolder, staged_name};
use crate::{Error, Result};

const SECTOR: usize = 512;

/// How a folder is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// What was not synced is there or not, by sectors.
    Power,
    /// All completed changes are there, and what was not synced may be lost later.
    Kill,
}

#[derive(Debug, Default, Clone)]
struct Content {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// Ranges that were changed since the last sync.
    unsynced: Vec<Range<usize>>,
}

#[derive(Debug, Default)]
struct Disk {
    files: BTreeMap<String, Arc<Mutex<Content>>>,
    /// Files whose names are not durable.
    fresh: BTreeSet<String>,
    /// Staged contents that were put, and what a power cut may bring back.
    put: BTreeMap<String, Arc<Mutex<Content>>>,
    change_count: u64,
}

/// Changes that are still executed.
#[derive(Debug, Default)]
struct Budget {
    left: Option<u64>,
    /// Changes until one fails once.
    until_fault: Option<u64>,
}

/// How far a change is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    Whole,
    /// It fails, and is executed in part.
    Faulty,
    Nothing,
}

#[derive(Debug, Clone, Default)]
pub(super) struct MemoryFolder {
    disk: Arc<Mutex<Disk>>,
    budget: Arc<Mutex<Budget>>,
}

struct MemoryFolderFile {
    content: Arc<Mutex<Content>>,
    budget: Arc<Mutex<Budget>>,
}

impl Disk {
    fn sync_names(&mut self) {
        self.fresh.clear();
        self.put.clear();
    }
}

impl Budget {
    fn spend(&mut self) -> Extent {
        if let Some(left) = &mut self.left {
            if *left == 0 {
                return Extent::Nothing;
            }
            *left -= 1;
        }
        match &mut self.until_fault {
            None => Extent::Whole,
            Some(0) => {
                self.until_fault = None;
                Extent::Faulty
            }
            Some(until) => {
                *until -= 1;
                Extent::Whole
            }
        }
    }
}

impl Extent {
    fn result(self) -> std::io::Result<()> {
        match self {
            Self::Whole => Ok(()),
            Self::Faulty => Err(std::io::ErrorKind::StorageFull.into()),
            Self::Nothing => Err(std::io::Error::other("the power was cut")),
        }
    }
}

impl MemoryFolder {
    /// All changes after the next `count` fail.
    pub(super) fn cut_after(&self, count: u64) {
        self.budget.lock().unwrap().left = Some(count);
    }

    /// One change after the next `count` fails once. A rename or replacement is executed nevertheless, half the time.
    pub(super) fn fail_once_after(&self, count: u64) {
        self.budget.lock().unwrap().until_fault = Some(count);
    }

    pub(super) fn is_fault_pending(&self) -> bool {
        self.budget.lock().unwrap().until_fault.is_some()
    }

    pub(super) fn is_cut(&self) -> bool {
        self.budget.lock().unwrap().left == Some(0)
    }

    /// The folder after a cut.
    pub(super) fn after(&self, cut: Cut, random: &mut SeededRandom) -> Self {
        let disk = self.disk.lock().unwrap();
        let mut files = BTreeMap::new();
        for (name, content) in &disk.files {
            let old = disk.put.get(name).filter(|_| cut == Cut::Power && random.one_in(2));
            let content = old.unwrap_or(content).lock().unwrap();
            if cut == Cut::Power && disk.fresh.contains(name) && random.one_in(2) {
                continue;
            }
            let content = match cut {
                Cut::Kill => content.clone(),
                Cut::Power => Content::durable(content.after_power_cut(random)),
            };
            files.insert(name.clone(), Arc::new(Mutex::new(content)));
        }
        let (fresh, put) = match cut {
            Cut::Kill => (disk.fresh.clone(), disk.put.clone()),
            Cut::Power => Default::default(),
        };
        Self {
            disk: Arc::new(Mutex::new(Disk {
                files,
                fresh,
                put,
                change_count: disk.change_count,
            })),
            budget: Arc::default(),
        }
    }

    /// Changes the names. A fault comes before or after the change, by the number of changes.
    fn change(&self, name: &str, apply: impl FnOnce(&mut Disk)) -> Result<()> {
        let extent = self.budget.lock().unwrap().spend();
        let mut disk = self.disk.lock().unwrap();
        if extent == Extent::Whole || (extent == Extent::Faulty && disk.change_count.is_multiple_of(2)) {
            apply(&mut disk);
        }
        disk.change_count += 1;
        let result = extent.result();
        result.map_err(|source| Error::io("change", &self.path(name), source))
    }

    fn file(&self, content: &Arc<Mutex<Content>>) -> Arc<dyn ImageFile> {
        Arc::new(MemoryFolderFile {
            content: Arc::clone(content),
            budget: Arc::clone(&self.budget),
        })
    }
}

impl Content {
    fn durable(bytes: Vec<u8>) -> Self {
        Self {
            live: bytes.clone(),
            durable: bytes,
            unsynced: Vec::new(),
        }
    }

    fn after_power_cut(&self, random: &mut SeededRandom) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        // The length is durable or not as well.
        if self.live.len() > bytes.len() && random.one_in(2) {
            bytes.resize(self.live.len(), 0);
        }
        for range in &self.unsynced {
            for sector in range.start / SECTOR..range.end.div_ceil(SECTOR) {
                let place = sector * SECTOR..((sector + 1) * SECTOR).min(self.live.len()).min(bytes.len());
                if !place.is_empty() && random.one_in(2) {
                    bytes[place.clone()].copy_from_slice(&self.live[place]);
                }
            }
        }
        bytes
    }

    fn put(&mut self, data: &[u8], offset: usize) {
        if self.live.len() < offset + data.len() {
            self.live.resize(offset + data.len(), 0);
        }
        self.live[offset..offset + data.len()].copy_from_slice(data);
        self.unsynced.push(offset..offset + data.len());
    }
}

impl ChainFolder for MemoryFolder {
    fn open(&self, name: &str, _access: Access) -> Result<Arc<dyn ImageFile>> {
        let disk = self.disk.lock().unwrap();
        let content = disk.files.get(name).ok_or_else(|| {
            let source = std::io::Error::from(std::io::ErrorKind::NotFound);
            Error::io("open", &self.path(name), source)
        })?;
        Ok(self.file(content))
    }

    fn pin(&self, name: &str) -> Result<Arc<dyn ImageFile>> {
        self.open(name, Access::Read)
    }

    fn create(&self, name: &str) -> Result<Arc<dyn ImageFile>> {
        let content = Arc::default();
        self.change(name, |disk| {
            let old = disk.files.insert(name.to_owned(), Arc::clone(&content));
            assert!(old.is_none(), "{name} exists");
            disk.fresh.insert(name.to_owned());
        })?;
        Ok(self.file(&content))
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.change(name, |disk| {
            disk.files.remove(name);
            disk.sync_names();
        })
    }

    /// Folders are empty here: a name like others.
    fn remove_folder(&self, name: &str) -> Result<()> {
        self.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.change(from, |disk| {
            let content = disk.files.remove(from).expect("it exists");
            disk.files.insert(to.to_owned(), content);
            disk.sync_names();
        })
    }

    fn sync(&self) -> Result<()> {
        self.change("", Disk::sync_names)
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.change(name, |disk| {
            let content = Content::durable(bytes.to_vec());
            disk.files.insert(name.to_owned(), Arc::new(Mutex::new(content)));
            disk.sync_names();
        })
    }

    fn stage(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let staged = staged_name(name);
        self.change(&staged, |disk| {
            let content = Content::durable(bytes.to_vec());
            disk.files.insert(staged.clone(), Arc::new(Mutex::new(content)));
        })
    }

    fn put_staged(&self, name: &str) -> Result<()> {
        self.change(name, |disk| {
            let content = disk.files.remove(&staged_name(name)).expect("it was staged");
            let old = disk.files.insert(name.to_owned(), content).expect("it exists");
            // The oldest one that is durable.
            disk.put.entry(name.to_owned()).or_insert(old);
        })
    }

    fn load(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let disk = self.disk.lock().unwrap();
        Ok(disk.files.get(name).map(|content| content.lock().unwrap().live.clone()))
    }

    fn names(&self) -> Result<Vec<String>> {
        Ok(self.disk.lock().unwrap().files.keys().cloned().collect())
    }

    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from("/container").join(name)
    }
}

impl MemoryFolderFile {
    /// Changes the content: `apply` gets how far.
    fn change(&self, action: &'static str, apply: impl FnOnce(&mut Content, Extent)) -> BlockResult<()> {
        let extent = self.budget.lock().unwrap().spend();
        if extent != Extent::Nothing {
            apply(&mut self.content.lock().unwrap(), extent);
        }
        extent.result().map_err(|source| BlockError::io(action, 0, source))
    }
}

impl ImageFile for MemoryFolderFile {
    fn length_bytes(&self) -> BlockResult<u64> {
        Ok(self.content.lock().unwrap().live.len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        let content = self.content.lock().unwrap();
        let start = to_usize(offset).min(content.live.len());
        let length = buffer.len().min(content.live.len() - start);
        buffer[..length].copy_from_slice(&content.live[start..start + length]);
        buffer[length..].fill(0);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        self.change("write", |content, extent| {
            let length = match extent {
                Extent::Whole => data.len(),
                _ => data.len() / 2 / SECTOR * SECTOR,
            };
            content.put(&data[..length], to_usize(offset));
        })
    }

    fn set_length(&self, length_bytes: u64) -> BlockResult<()> {
        self.change("resize", |content, extent| {
            if extent == Extent::Whole {
                let length = to_usize(length_bytes);
                content.live.resize(length, 0);
                // A file that shrinks and grows again has zeroes; here a shorter file is durable at once.
                content.durable.truncate(length);
            }
        })
    }

    fn punch(&self, range: Range<u64>) -> BlockResult<()> {
        self.change("punch", |content, extent| {
            if extent == Extent::Whole {
                let end = to_usize(range.end).min(content.live.len());
                let start = to_usize(range.start).min(end);
                content.put(&vec![0; end - start], start);
            }
        })
    }

    fn sync(&self) -> BlockResult<()> {
        self.change("flush", |content, extent| {
            if extent == Extent::Whole {
                content.durable = content.live.clone();
                content.unsynced.clear();
            }
        })
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end - range.start, ExtentKind::Data);
        Ok(list)
    }

    fn allocated_bytes(&self) -> BlockResult<Option<u64>> {
        Ok(None)
    }
}
