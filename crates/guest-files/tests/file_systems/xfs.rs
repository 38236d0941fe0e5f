//! XFS.

use std::path::Path;

use holdfast_guest_files::Error;

use crate::compare::{Attributes, assert_same};
use crate::place::{MountedImage, Place, open_image, system, text};
use crate::tree;

fn make(options: &[&str]) -> Place {
    let place = Place::new(512 << 20);
    system("mkfs.xfs", &[&["-q", "-f"], options, &[text(&place.image())]].concat());
    place
}

fn fill(mounted: &MountedImage) {
    tree::plain(mounted.point());
    tree::sparse(mounted.point());
    tree::preallocated(mounted.point());
    tree::unix(mounted.point());
    // Removed entries leave holes in a directory.
    for number in 100..590 {
        let name = format!("large/{number:05}-an-entry-with-a-rather-long-name");
        std::fs::remove_file(mounted.point().join(name)).unwrap();
    }
}

/// After an unmount the log is clean. The kernel's own view is the truth.
#[test]
fn version_5_with_large_and_small_blocks() {
    for options in [
        &["-b", "size=1024", "-n", "size=4096"][..],
        &[
            "-b",
            "size=4096",
            "-n",
            "size=16384",
            "-i",
            "size=1024",
            "-m",
            "bigtime=0,inobtcount=0",
        ],
    ] {
        let place = make(options);
        let Some(mounted) = place.mount(&[]) else { return };
        fill(&mounted);
        drop(mounted);
        let mut file_system = place.open();
        let Some(mounted) = place.mount(&["-o", "ro"]) else {
            return;
        };
        let count = assert_same(&mut *file_system, mounted.point(), Attributes::Unix, &[]);
        assert!(count > 190, "{count} files were compared");
    }
}

/// A prototype for mkfs: the lines of a folder, and of the folders in it.
fn prototype(folder: &Path, lines: &mut String) {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_str().unwrap();
        let kind = path.symlink_metadata().unwrap().file_type();
        if kind.is_dir() {
            lines.extend([name, " d--755 0 0\n"]);
            prototype(&path, lines);
        } else if kind.is_symlink() {
            let target = std::fs::read_link(&path).unwrap();
            lines.extend([name, " l--777 0 0 ", text(&target), "\n"]);
        } else {
            lines.extend([name, " ---644 0 0 ", text(&path), "\n"]);
        }
    }
    lines.push_str("$\n");
}

/// New kernels do not mount version 4, which mkfs can still fill.
#[test]
fn version_4_with_and_without_kinds_in_directories() {
    for kinds in ["ftype=0", "ftype=1"] {
        let place = Place::new(512 << 20);
        let source = place.folder("source");
        tree::plain(&source);
        // Names in a prototype have no spaces.
        std::fs::remove_dir_all(source.join("many")).unwrap();
        std::os::unix::fs::symlink("noise.bin", source.join("link")).unwrap();
        std::os::unix::fs::symlink("x".repeat(900), source.join("long-link")).unwrap();
        let mut lines = "/none\n0 0\nd--755 0 0\n".to_owned();
        prototype(&source, &mut lines);
        lines.push_str("$\n");
        std::fs::write(place.path("prototype"), lines).unwrap();
        let prototype = place.path("prototype");
        let options = [
            "-q",
            "-f",
            "-m",
            "crc=0",
            "-b",
            "size=1024",
            "-n",
            kinds,
            "-p",
            text(&prototype),
        ];
        system("mkfs.xfs", &[&options[..], &[text(&place.image())]].concat());
        let count = assert_same(&mut *place.open(), &source, Attributes::None, &[]);
        assert!(count > 600, "{count} files were compared");
    }
}

/// The agent of a guest freezes its file systems for a snapshot: the log then holds nothing but the superblock. In a
/// snapshot of a running guest it holds changes, without which the metadata is old.
#[test]
fn a_frozen_file_system_is_read_and_a_running_one_is_refused() {
    let place = make(&[]);
    let Some(mounted) = place.mount(&[]) else { return };
    fill(&mounted);
    std::fs::remove_dir_all(mounted.point().join("many")).unwrap();
    let copy = |name: &str| {
        let copy = place.path(name);
        system("cp", &["--sparse=always", text(&place.image()), text(&copy)]);
        copy
    };
    system("fsfreeze", &["--freeze", text(mounted.point())]);
    let frozen = copy("frozen");
    system("fsfreeze", &["--unfreeze", text(mounted.point())]);
    let mut file_system = open_image(&frozen).unwrap();
    let count = assert_same(&mut *file_system, mounted.point(), Attributes::Unix, &[]);
    assert!(count > 100, "{count} files were compared");
    std::fs::write(mounted.point().join("new"), b"new").unwrap();
    std::fs::File::open(mounted.point().join("new"))
        .unwrap()
        .sync_all()
        .unwrap();
    let opened = open_image(&copy("running"));
    assert!(
        matches!(opened, Err(Error::Unsupported { ref what, .. }) if what.contains("log must be replayed")),
        "{:?}",
        opened.err()
    );
}
