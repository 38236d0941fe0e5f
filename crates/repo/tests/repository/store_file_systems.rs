//! The guarantees of the directory store on common file systems.
//!
//! Each file system is created in a file and mounted. That needs root and the programs; without them a test prints that
//! it is skipped, and passes.
//!
//! A power cut is simulated by a copy of the file: the copy has what the file system has written so far, and lacks what
//! is in memory until a sync.
#![expect(
    clippy::disallowed_methods,
    reason = "file systems are made and mounted by their own programs"
)]
#![expect(clippy::print_stdout, reason = "it prints what it skips")]

use std::fs::{File, create_dir};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use holdfast_repo::store::{DirectoryStore, ObjectKind, ObjectName, Put, Store, conformance};
use tempfile::TempDir;

/// A mounted file system, unmounted when dropped.
struct Mount {
    image: PathBuf,
    point: PathBuf,
    folder: Arc<TempDir>,
}

impl Mount {
    /// Creates a file system with `program` and mounts it; returns the reason if that is not possible.
    fn new(program: &str, arguments: &[&str], size_bytes: u64) -> Result<Self, String> {
        let folder = Arc::new(TempDir::new().map_err(|error| error.to_string())?);
        let image = folder.path().join("image");
        File::create(&image)
            .and_then(|file| file.set_len(size_bytes))
            .map_err(|error| error.to_string())?;
        run(Command::new(program).args(arguments).arg(&image))?;
        Self::of_image(folder, image)
    }

    fn of_image(folder: Arc<TempDir>, image: PathBuf) -> Result<Self, String> {
        let point = image.with_extension("mounted");
        create_dir(&point).map_err(|error| error.to_string())?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point))?;
        Ok(Self { image, point, folder })
    }

    fn remount(&self, option: &str) -> Result<(), String> {
        run(Command::new("mount").args(["-o", option]).arg(&self.point))
    }

    /// The file system after a power cut; `busy` has used it until then.
    fn cut_power<T>(self, busy: T) -> Result<Self, String> {
        let copy = self.folder.path().join("copy");
        run(Command::new("cp").arg("--sparse=always").arg(&self.image).arg(&copy))?;
        drop(busy);
        // Two file systems with the same identity cannot be mounted at the same time.
        let folder = Arc::clone(&self.folder);
        drop(self);
        Self::of_image(folder, copy)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(reason) = run(Command::new("umount").arg(&self.point)) {
            println!("{reason}");
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    Err(format!("{}: {}", command.get_program().display(), reason.trim()))
}

fn is_root() -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|own| own.uid() == 0)
}

fn mount(program: &str, arguments: &[&str], size_bytes: u64) -> Option<Mount> {
    let mount = if is_root() {
        Mount::new(program, arguments, size_bytes)
    } else {
        Err("mounting takes root".to_owned())
    };
    mount.inspect_err(|reason| println!("skipped {program}: {reason}")).ok()
}

fn check_on(program: &str, arguments: &[&str], size_bytes: u64) {
    let Some(mount) = mount(program, arguments, size_bytes) else {
        return;
    };
    let mut number = 0;
    let mut make = || {
        number += 1;
        DirectoryStore::create(&mount.point.join(number.to_string())).unwrap()
    };
    conformance::check(&mut || Arc::new(make()));

    let store = make();
    conformance::fill(&store);
    drop(store);
    mount.remount("remount,ro").unwrap();
    let store = DirectoryStore::open(&mount.point.join(number.to_string())).unwrap();
    conformance::check_read_only(&store);
    drop(store);
    check_power_cut(program, arguments, size_bytes);
}

/// Everything that the store reported before the power cut is true afterwards.
fn check_power_cut(program: &str, arguments: &[&str], size_bytes: u64) {
    let Some(mount) = mount(program, arguments, size_bytes) else {
        return;
    };
    let name = |kind, text: &str| ObjectName::new(kind, text).unwrap();
    let contents = |number: usize| vec![u8::try_from(number).unwrap(); 1 + number * 5000];
    let packs: Vec<_> = (0..40)
        .map(|n| name(ObjectKind::Pack, &format!("{:02x}00", n % 16 * 16 + n / 16)))
        .collect();
    let store = DirectoryStore::create(&mount.point.join("repository")).unwrap();
    store.put(&ObjectName::config(), b"config").unwrap();
    let deleted = name(ObjectKind::Snapshot, "deleted");
    store.put(&deleted, b"deleted").unwrap();
    for (number, pack) in packs.iter().enumerate() {
        if number % 2 == 0 {
            assert_eq!(store.put(pack, &contents(number)).unwrap(), Put::Created);
        } else {
            let mut writer = store.create(pack).unwrap();
            contents(number)
                .chunks(3000)
                .for_each(|piece| writer.append(piece).unwrap());
            assert_eq!(writer.commit().unwrap(), Put::Created);
        }
    }
    let last = name(ObjectKind::Snapshot, "last");
    store.put(&last, b"last").unwrap();
    store.delete(&deleted).unwrap();
    let abandoned = name(ObjectKind::Snapshot, "abandoned");
    let mut writer = store.create(&abandoned).unwrap();
    writer.append(&contents(20)).unwrap();
    let mount = mount.cut_power((store, writer)).unwrap();

    let store = DirectoryStore::open(&mount.point.join("repository")).unwrap();
    for (number, pack) in packs.iter().enumerate() {
        assert!(
            store.get(pack, 1 << 20).unwrap() == contents(number),
            "{pack} on {program}"
        );
    }
    assert_eq!(store.get(&ObjectName::config(), 10).unwrap(), b"config");
    assert_eq!(store.get(&last, 10).unwrap(), b"last");
    assert!(store.length(&deleted).unwrap_err().is_not_found());
    assert!(store.length(&abandoned).unwrap_err().is_not_found());
    let mut count = 0;
    store
        .list(ObjectKind::Pack, &mut |_, _| {
            count += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(count, packs.len());
    store.put(&abandoned, b"again").unwrap();
}

#[test]
fn ext4() {
    check_on("mkfs.ext4", &["-q"], 512 << 20);
}

#[test]
fn xfs() {
    check_on("mkfs.xfs", &["-q"], 512 << 20);
}

#[test]
fn btrfs() {
    check_on("mkfs.btrfs", &["-q"], 512 << 20);
}

/// FAT has no hard links: objects get their names by a rename that does not replace.
#[test]
fn fat_has_no_hard_links() {
    check_on("mkfs.vfat", &[], 256 << 20);
}
