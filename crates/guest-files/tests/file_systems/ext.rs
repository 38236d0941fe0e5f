//! ext2, ext3 and ext4.

use holdfast_guest_files::{Error, FileKind, FilePiece, resolve_path};

use crate::compare::{Attributes, assert_same, content, node_at};
use crate::place::{Place, open_image, system, text};
use crate::tree;

const LOST: &[&str] = &["lost+found"];
const IMAGE_BYTES: u64 = 96 << 20;

fn make(kind: &str, options: &[&str]) -> Place {
    let place = Place::new(IMAGE_BYTES);
    let image = place.image();
    system(
        &format!("mkfs.{kind}"),
        &[&["-q", "-F"], options, &[text(&image)]].concat(),
    );
    place
}

/// Fills the file system through the kernel, and compares it with a folder of the host that was filled in the same way.
fn compare_with_kernel(kind: &str, options: &[&str], has_extents: bool) {
    let place = make(kind, options);
    let source = place.folder("source");
    // Without barriers no write waits for the host's disk; ext2 has none.
    let words: &[&str] = if kind == "ext2" { &[] } else { &["-o", "barrier=0"] };
    let Some(mounted) = place.mount(words) else { return };
    for folder in [source.as_path(), mounted.point()] {
        tree::plain(folder);
        tree::sparse(folder);
        tree::unix(folder);
        if has_extents {
            tree::preallocated(folder);
        }
    }
    drop(mounted);
    let mut file_system = place.open();
    let count = assert_same(&mut *file_system, &source, Attributes::None, LOST);
    assert!(count > 680, "{count} files were compared");
    // The kernel's own view has the attributes.
    let Some(mounted) = place.mount(&["-o", "ro"]) else {
        return;
    };
    assert_same(&mut *file_system, mounted.point(), Attributes::Unix, &[]);
}

#[test]
fn ext4_with_large_and_small_blocks() {
    compare_with_kernel("ext4", &["-b", "4096"], true);
    compare_with_kernel("ext4", &["-b", "1024"], true);
}

#[test]
fn ext4_with_other_layouts() {
    compare_with_kernel(
        "ext4",
        &["-b", "1024", "-O", "meta_bg,^resize_inode,^metadata_csum,^64bit"],
        true,
    );
    compare_with_kernel("ext4", &["-O", "bigalloc,sparse_super2,ea_inode", "-I", "512"], true);
    compare_with_kernel(
        "ext4",
        &["-O", "^has_journal,^flex_bg,metadata_csum_seed,large_dir", "-I", "128"],
        true,
    );
}

/// Holes that cover whole indirect blocks are common in ext2 and ext3.
#[test]
fn ext2_and_ext3() {
    compare_with_kernel("ext2", &["-b", "1024"], false);
    compare_with_kernel("ext3", &["-b", "4096"], false);
    compare_with_kernel("ext2", &["-O", "^filetype"], false);
}

/// An image that is copied while it is mounted is as after a power failure. The kernel's replay of the journal is the
/// truth.
#[test]
fn a_journal_is_replayed_as_the_kernel_replays_it() {
    for options in [
        &["-b", "1024"][..],
        &["-b", "4096", "-O", "^metadata_csum"],
        &["-b", "4096"],
    ] {
        for mode in ["barrier=0,data=ordered", "barrier=0,data=journal"] {
            let place = make("ext4", options);
            let Some(mounted) = place.mount(&["-o", mode]) else {
                return;
            };
            tree::plain(mounted.point());
            system("sync", &["-f", text(mounted.point())]);
            tree::unix(mounted.point());
            tree::preallocated(mounted.point());
            std::fs::remove_dir_all(mounted.point().join("large")).unwrap();
            // A block that begins with the magic number of the journal is escaped in it.
            let magic = [&[0xc0, 0x3b, 0x39, 0x98][..], &[7; 5000]].concat();
            std::fs::write(mounted.point().join("magic"), magic).unwrap();
            std::fs::File::open(mounted.point().join("magic"))
                .unwrap()
                .sync_all()
                .unwrap();
            let copy = place.path("copy");
            system("cp", &["--sparse=always", text(&place.image()), text(&copy)]);
            drop(mounted);
            let dump = system("dumpe2fs", &["-h", text(&copy)]);
            assert!(dump.contains("needs_recovery"), "there is nothing to replay: {dump}");
            let mut file_system = open_image(&copy).unwrap();
            std::fs::rename(&copy, place.image()).unwrap();
            let Some(replayed) = place.mount(&[]) else { return };
            let count = assert_same(&mut *file_system, replayed.point(), Attributes::Unix, &[]);
            assert!(count > 70, "{count} files were compared");
        }
    }
}

#[test]
fn holes_are_reported_and_ranges_can_begin_anywhere() {
    let place = make("ext4", &["-b", "4096"]);
    let source = place.folder("source");
    tree::sparse(&source);
    system("mkfs.ext4", &["-q", "-F", "-d", text(&source), text(&place.image())]);
    let mut file_system = place.open();
    let node = node_at(&mut *file_system, "/sparse.img");
    assert_eq!(
        file_system.read_file(node, 5, 4096).unwrap(),
        FilePiece::Hole((10 << 20) - 5)
    );
    assert_eq!(file_system.read_file(node, (30 << 20) + 4, 10).unwrap(), FilePiece::End);
    assert_eq!(
        file_system.read_file(node, (30 << 20) + 1, 2).unwrap(),
        FilePiece::Data(b"ai".to_vec())
    );
    let hole = node_at(&mut *file_system, "/only-a-hole");
    assert_eq!(file_system.read_file(hole, 0, 1).unwrap(), FilePiece::Hole(5_000_001));
    assert!(file_system.read_directory(hole, &mut |_| Ok(())).is_err());
}

#[test]
fn paths_lead_through_links_of_the_guest_and_never_out_of_it() {
    let place = make("ext4", &[]);
    let source = place.folder("source");
    tree::plain(&source);
    tree::unix(&source);
    std::os::unix::fs::symlink("../../../../large", source.join("many/up")).unwrap();
    system("mkfs.ext4", &["-q", "-F", "-d", text(&source), text(&place.image())]);
    let mut file_system = place.open();
    let name = "00012-an-entry-with-a-rather-long-name";
    for path in [
        format!("/absolute/{name}"),
        format!("/many/up/{name}"),
        format!("/long-link/../large/{name}"),
        format!("/../..//./large/{name}"),
    ] {
        let node = node_at(&mut *file_system, &path);
        assert_eq!(content(&mut *file_system, node), b"12", "{path}");
    }
    let kind = |path: &str| resolve_path(&mut *place.open(), path.as_bytes()).map(|found| found.metadata.kind);
    assert!(matches!(kind("/link"), Ok(FileKind::Link)));
    assert!(matches!(kind("/absolute/"), Ok(FileKind::Directory)));
    assert!(matches!(kind("/loop/"), Err(Error::LinkLoop)));
    assert!(matches!(kind("/empty/x"), Err(Error::NotADirectory)));
    assert!(matches!(kind("/missing"), Err(Error::NotFound)));
}

#[test]
fn inline_data_is_refused_for_the_files_that_have_it() {
    let place = Place::new(IMAGE_BYTES);
    let source = place.folder("source");
    std::fs::write(source.join("small"), b"inline").unwrap();
    std::fs::write(source.join("large"), vec![7; 100_000]).unwrap();
    let options = ["-q", "-F", "-O", "inline_data", "-I", "256", "-d", text(&source)];
    system("mkfs.ext4", &[&options[..], &[text(&place.image())]].concat());
    let mut file_system = place.open();
    let node = node_at(&mut *file_system, "/small");
    let read = file_system.read_file(node, 0, 100);
    assert!(
        matches!(read, Err(Error::Unsupported { ref what, .. }) if what.contains("inline")),
        "{read:?}"
    );
    let node = node_at(&mut *file_system, "/large");
    assert!(content(&mut *file_system, node) == vec![7; 100_000]);
}

#[test]
fn damaged_metadata_is_found_by_its_checksum() {
    let place = make("ext4", &["-b", "4096"]);
    let source = place.folder("source");
    tree::plain(&source);
    system(
        "mkfs.ext4",
        &["-q", "-F", "-b", "4096", "-d", text(&source), text(&place.image())],
    );
    let image = text(&place.image()).to_owned();
    // "Inode 12 is part of block group 0\n\tlocated at block 34, offset 0x0100"
    let found = system("debugfs", &["-R", "imap /noise.bin", &image]);
    let (_, found) = found.split_once("located at block ").unwrap();
    let (block, offset) = found.trim().split_once(", offset 0x").unwrap();
    let at = block.parse::<usize>().unwrap() * 4096 + usize::from_str_radix(offset, 16).unwrap();
    let mut bytes = std::fs::read(&image).unwrap();
    // Another size, with the old checksum.
    bytes[at + 4] ^= 1;
    std::fs::write(&image, bytes).unwrap();
    let found = resolve_path(&mut *place.open(), b"/noise.bin");
    assert!(
        matches!(found, Err(Error::Damaged { ref detail, .. }) if detail.contains("checksum")),
        "{found:?}"
    );
}
