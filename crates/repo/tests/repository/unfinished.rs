//! gc frees the space of objects that dead writers had not completed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::MemoryDevice;
use holdfast_repo::store::{DirectoryStore, ObjectKind, ObjectName, Store};
use holdfast_repo::{GcRequest, Parent, Repository, Source, SourceData};
use tempfile::TempDir;

use crate::common::{Watch, environment, init_request, request};

const GC: GcRequest = GcRequest {
    repack_below_percent: 0,
    thread_count: 0,
};
const HOUR: Duration = Duration::from_secs(3600);

/// Begins an object whose writer then dies; its file was last written `age` ago.
fn begin(root: &Path, age: Duration) -> PathBuf {
    let store = DirectoryStore::open(root).unwrap();
    let files = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(root.join("tmp")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let before = files();
    let mut writer = store
        .create(&ObjectName::new(ObjectKind::Pack, "00aa").unwrap())
        .unwrap();
    writer.append(&[1; 3000]).unwrap();
    let path = files().into_iter().find(|path| !before.contains(path)).unwrap();
    let copy = std::fs::read(&path).unwrap();
    drop(writer);
    let mut file = File::create(&path).unwrap();
    std::io::Write::write_all(&mut file, &copy).unwrap();
    let now = file.metadata().unwrap().modified().unwrap();
    file.set_modified(now - age).unwrap();
    path
}

#[test]
fn gc_removes_old_unfinished_objects() {
    let folder = TempDir::new().unwrap();
    let root = folder.path().join("repository");
    let store = DirectoryStore::create(&root).unwrap();
    let repository = Repository::init(Arc::new(store), &init_request(), environment(61)).unwrap();
    let device = MemoryDevice::from_bytes(&[1; 8192]);
    let source = Source {
        name: "vda".into(),
        data: SourceData::Disk(&device),
        notes: std::collections::BTreeMap::new(),
    };
    repository
        .backup(request("m", 1, vec![source], Parent::Newest, 1), &Watch::default())
        .unwrap();
    let [young, old] = [20, 30].map(|hours| begin(&root, hours * HOUR));
    let report = repository.gc(GC).unwrap();
    assert_eq!((report.unfinished_bytes, report.deleted_pack_count), (3000, 0));
    assert!(young.exists() && !old.exists());

    // While a writer is running, files that are some days old may belong to it.
    let writer = begin_writer(&repository, &root);
    let [days, weeks] = [6 * 24, 15 * 24].map(|hours| begin(&root, hours * HOUR));
    let report = repository.gc(GC).unwrap();
    assert_eq!(report.unfinished_bytes, 3000);
    assert!(young.exists() && days.exists() && !weeks.exists());
    std::fs::remove_file(writer).unwrap();
    assert_eq!(repository.gc(GC).unwrap().unfinished_bytes, 3000);
    assert!(young.exists() && !days.exists());
}

/// Leaves the announcement of a writer that stays alive during the test: a backup whose device copies it.
fn begin_writer(repository: &Repository, root: &Path) -> PathBuf {
    struct Keep<'a>(&'a Path, Option<(PathBuf, Vec<u8>)>);
    impl std::io::Read for Keep<'_> {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            let entry = std::fs::read_dir(self.0)?.next().unwrap()?;
            self.1 = Some((entry.path(), std::fs::read(entry.path())?));
            Ok(0)
        }
    }
    let folder = root.join("writers");
    let mut keep = Keep(&folder, None);
    let source = Source {
        name: "memory".into(),
        data: SourceData::Stream(&mut keep),
        notes: std::collections::BTreeMap::new(),
    };
    repository
        .backup(request("n", 1, vec![source], Parent::Newest, 0), &Watch::default())
        .unwrap();
    let (path, bytes) = keep.1.unwrap();
    std::io::Write::write_all(&mut File::create(&path).unwrap(), &bytes).unwrap();
    path
}
