use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Duration;

use tempfile::TempDir;

use super::*;
use crate::store::testing::conformance;

fn name(kind: ObjectKind, text: &str) -> ObjectName {
    ObjectName::new(kind, text).unwrap()
}

fn store() -> (TempDir, DirectoryStore) {
    let folder = TempDir::new().unwrap();
    let store = DirectoryStore::create(&folder.path().join("repository")).unwrap();
    (folder, store)
}

#[test]
fn a_directory_passes_the_conformance_suite() {
    let mut folders = Vec::new();
    conformance::check(&mut || {
        let (folder, store) = store();
        folders.push(folder);
        Arc::new(store)
    });
}

#[test]
fn opening_does_not_create_a_missing_store() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("repository");
    assert!(matches!(DirectoryStore::open(&path), Err(StoreError::NoStore { .. })));
    let deep = path.join("deeper");
    assert!(
        matches!(DirectoryStore::create(&deep), Err(StoreError::NoStore { store }) if store.ends_with("repository"))
    );
    DirectoryStore::create(&path).unwrap();
    DirectoryStore::create(&path).unwrap();
    let store = DirectoryStore::open(&path).unwrap();
    assert_eq!(store.describe(), format!("directory {}", path.display()));
    assert!(store.free_bytes().unwrap() > 0);
}

#[test]
fn objects_have_the_documented_paths_and_private_modes() {
    let (folder, store) = store();
    let root = folder.path().join("repository");
    store.put(&ObjectName::config(), b"config").unwrap();
    store.put(&name(ObjectKind::Pack, "3fa9"), b"pack").unwrap();
    store.put(&name(ObjectKind::Snapshot, "1"), b"snapshot").unwrap();
    let mode = |path: &str| std::fs::metadata(root.join(path)).unwrap().permissions().mode() & 0o7777;
    for path in ["config", "packs/3f/3fa9", "snapshots/1"] {
        assert_eq!(mode(path) & !0o600, 0, "{path}");
    }
    for path in ["", "packs", "packs/3f", "snapshots", "tmp"] {
        assert_eq!(mode(path) & !0o700, 0, "{path}");
    }
    assert_eq!(std::fs::read_dir(root.join("tmp")).unwrap().count(), 0);
}

#[test]
fn foreign_files_are_reported_and_not_listed_as_objects() {
    let (folder, store) = store();
    let root = folder.path().join("repository");
    conformance::fill(&store);
    store.put(&name(ObjectKind::Index, "good"), b"").unwrap();
    let outside = folder.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    File::create(outside.join("secret")).unwrap();
    for path in [
        "notes.txt",
        "index/UPPER",
        "packs/00aa",
        "packs/00/01ff",
        "index/.hidden",
    ] {
        File::create(root.join(path)).unwrap();
    }
    for path in ["packs/zz", "index/folder", "lost+found", "other"] {
        std::fs::create_dir(root.join(path)).unwrap();
    }
    symlink(outside.join("secret"), root.join("index/link")).unwrap();
    symlink(&outside, root.join("snapshots")).unwrap();
    symlink(&outside, root.join("packs/ee")).unwrap();

    let mut foreign_files = Vec::new();
    store
        .foreign_files(&mut |path| {
            foreign_files.push(path);
            Ok(())
        })
        .unwrap();
    foreign_files.sort();
    assert_eq!(
        foreign_files,
        [
            "index/.hidden",
            "index/UPPER",
            "index/folder",
            "index/link",
            "notes.txt",
            "other",
            "packs/00/01ff",
            "packs/00aa",
            "packs/ee",
            "packs/zz",
            "snapshots"
        ]
    );
    // A listing never omits objects that it cannot access.
    assert!(store.list(ObjectKind::Snapshot, &mut |_, _| Ok(())).is_err());
    std::fs::remove_file(root.join("snapshots")).unwrap();
    let mut objects = Vec::new();
    for kind in ObjectKind::ALL {
        store
            .list(kind, &mut |name, _| {
                objects.push(name.to_string());
                Ok(())
            })
            .unwrap();
    }
    assert_eq!(objects.len(), 6, "{objects:?}");
}

#[test]
fn links_inside_are_not_followed() {
    let (folder, store) = store();
    let root = folder.path().join("repository");
    let outside = folder.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    symlink(&outside, root.join("index")).unwrap();
    assert!(store.put(&name(ObjectKind::Index, "a"), b"a").is_err());
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);

    let target = outside.join("target");
    File::create(&target).unwrap();
    store.put(&name(ObjectKind::Key, "a"), b"a").unwrap();
    symlink(&target, root.join("keys/b")).unwrap();
    let link = name(ObjectKind::Key, "b");
    assert!(store.get(&link, 10).is_err());
    assert!(store.length(&link).is_err());
    assert_eq!(store.put(&link, b"b").unwrap(), Put::AlreadyExists);
    assert_eq!(std::fs::metadata(&target).unwrap().len(), 0);

    let linked_root = folder.path().join("linked");
    symlink(&root, &linked_root).unwrap();
    let linked = DirectoryStore::open(&linked_root).unwrap();
    assert_eq!(linked.get(&name(ObjectKind::Key, "a"), 10).unwrap(), b"a");
}

#[test]
fn a_pipe_in_place_of_an_object_is_an_error_without_blocking() {
    let (folder, store) = store();
    store.put(&name(ObjectKind::Index, "a"), b"a").unwrap();
    let path = folder.path().join("repository/index/pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(store.get(&name(ObjectKind::Index, "pipe"), 10).is_err());
}

/// Two stores simulate two processes: one deletes and recreates an object that the other has open.
#[test]
fn an_open_handle_does_not_outlive_the_object() {
    let (folder, store) = store();
    let other = DirectoryStore::open(&folder.path().join("repository")).unwrap();
    let pack = name(ObjectKind::Pack, "00ff");
    let mut buffer = [0; 3];
    store.put(&pack, b"old").unwrap();
    other.get_range(&pack, 0, &mut buffer).unwrap();
    store.delete(&pack).unwrap();
    assert!(other.get_range(&pack, 0, &mut buffer).unwrap_err().is_not_found());
    store.put(&pack, b"new").unwrap();
    other.get_range(&pack, 0, &mut buffer).unwrap();
    assert_eq!(&buffer, b"new");
}

#[test]
fn old_temporary_files_are_removed_and_their_writers_fail() {
    let (folder, store) = store();
    let mut writer = store.create(&name(ObjectKind::Index, "a")).unwrap();
    writer.append(&[0; 5000]).unwrap();
    let tmp = folder.path().join("repository/tmp");
    let path = std::fs::read_dir(&tmp).unwrap().next().unwrap().unwrap().path();
    let written = std::fs::metadata(&path).unwrap().modified().unwrap();
    assert_eq!(store.clean_temporary(written - Duration::from_secs(10)).unwrap(), 0);
    assert!(path.exists());
    assert_eq!(store.clean_temporary(written + Duration::from_secs(10)).unwrap(), 5000);
    assert!(!path.exists());
    assert!(matches!(writer.commit(), Err(StoreError::Io { .. })));
    assert!(store.length(&name(ObjectKind::Index, "a")).unwrap_err().is_not_found());
}

/// The age is measured by the clock of the file system; the clock of the host may differ.
#[test]
fn only_old_leftovers_of_crashed_writers_are_removed() {
    let (folder, store) = store();
    let mut writers: Vec<_> = ["old", "young"]
        .iter()
        .map(|text| store.create(&name(ObjectKind::Index, text)).unwrap())
        .collect();
    writers[0].append(&[0; 5000]).unwrap();
    let tmp = folder.path().join("repository/tmp");
    let old = std::fs::read_dir(&tmp)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| std::fs::metadata(path).unwrap().len() == 5000)
        .unwrap();
    let hour = Duration::from_secs(3600);
    let file = File::options().write(true).open(&old).unwrap();
    let written = file.metadata().unwrap().modified().unwrap();
    file.set_modified(written - 2 * hour).unwrap();
    assert_eq!(store.clean(3 * hour).unwrap(), 0);
    assert_eq!(store.clean(hour).unwrap(), 5000);
    assert!(!old.exists());
    let mut writers = writers.into_iter();
    assert!(writers.next().unwrap().commit().is_err());
    assert_eq!(writers.next().unwrap().commit().unwrap(), Put::Created);
}

#[test]
fn more_packs_than_handles_are_all_read() {
    let (_folder, store) = store();
    let packs: Vec<_> = (0..100).map(|n| name(ObjectKind::Pack, &format!("{n:04}"))).collect();
    for (n, pack) in (0u8..).zip(&packs) {
        store.put(pack, &[n]).unwrap();
    }
    for _ in 0..3 {
        for (n, pack) in (0u8..).zip(&packs) {
            let mut byte = [255];
            store.get_range(pack, 0, &mut byte).unwrap();
            assert_eq!(byte, [n]);
        }
    }
}

/// A folder, link or pipe under the name of an object causes no failure: packs are reported as missing, and markers
/// report the type of the file.
#[test]
fn folders_links_and_pipes_are_distinguished_from_objects() {
    let folder = TempDir::new().unwrap();
    let store = DirectoryStore::open(folder.path()).unwrap();
    for (kind, number) in [
        (ObjectKind::Pack, "aa"),
        (ObjectKind::Index, "bb"),
        (ObjectKind::Snapshot, "cc"),
    ] {
        let name = ObjectName::new(kind, &number.repeat(16)).unwrap();
        store.put(&name, b"bytes").unwrap();
        let path = match kind {
            ObjectKind::Pack => folder.path().join("packs").join(number).join(number.repeat(16)),
            _ => folder.path().join(name.to_string()),
        };
        for what in ["folder", "link", "pipe"] {
            std::fs::rename(&path, folder.path().join("tmp/aside")).unwrap();
            match what {
                "folder" => std::fs::create_dir(&path).unwrap(),
                "link" => symlink(folder.path().join("tmp/aside"), &path).unwrap(),
                _ => rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap(),
            }
            let errors = [
                store.length(&name).unwrap_err(),
                store.get(&name, 100).unwrap_err(),
                store.get_range(&name, 0, &mut [0; 2]).unwrap_err(),
            ];
            for error in errors {
                let expected = match kind {
                    ObjectKind::Snapshot => matches!(error, StoreError::NotAnObject { .. }),
                    _ => error.is_not_found(),
                };
                assert!(expected, "{kind:?} {what}: {error}");
            }
            match what {
                "folder" => std::fs::remove_dir(&path).unwrap(),
                _ => std::fs::remove_file(&path).unwrap(),
            }
            std::fs::rename(folder.path().join("tmp/aside"), &path).unwrap();
            assert_eq!(store.get(&name, 100).unwrap(), b"bytes");
        }
    }
}

#[test]
fn a_link_in_place_of_a_folder_is_a_distinct_error() {
    let folder = TempDir::new().unwrap();
    let store = DirectoryStore::open(folder.path()).unwrap();
    let name = ObjectName::new(ObjectKind::Pack, &"aa".repeat(16)).unwrap();
    store.put(&name, b"bytes").unwrap();
    std::fs::rename(folder.path().join("packs"), folder.path().join("elsewhere")).unwrap();
    symlink(folder.path().join("elsewhere"), folder.path().join("packs")).unwrap();
    let store = DirectoryStore::open(folder.path()).unwrap();
    for error in [
        store.length(&name).unwrap_err(),
        store.get(&name, 100).unwrap_err(),
        store.list(ObjectKind::Pack, &mut |_, _| Ok(())).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::NotAFolder { .. }), "{error}");
    }
}
