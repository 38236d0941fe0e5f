//! NTFS, filled by ntfs-3g.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use holdfast_guest_files::{Error, FileKind, resolve_path};

use crate::compare::{Attributes, assert_same, content, node_at};
use crate::place::{MountedImage, Place, system, text, try_system};
use crate::tree;

fn make(options: &[&str]) -> Place {
    let place = Place::new(96 << 20);
    let image = place.image();
    system(
        "mkntfs",
        &[&["-q", "-Q", "-F", "-L", "GUEST"], options, &[text(&image)]].concat(),
    );
    place
}

fn mount(place: &Place) -> Option<MountedImage> {
    place.mount(&["-t", "ntfs-3g", "-o", "loop,compression"])
}

fn compress(folder: &Path) {
    // The attribute "compressed", which files inherit.
    system(
        "setfattr",
        &["-n", "system.ntfs_attrib_be", "-v", "0x00000800", text(folder)],
    );
}

#[test]
fn files_directories_and_holes() {
    for options in [&[][..], &["-c", "512"], &["-c", "65536"]] {
        let place = make(options);
        let source = place.folder("source");
        let Some(mounted) = mount(&place) else { return };
        for folder in [source.as_path(), mounted.point()] {
            tree::plain(folder);
            tree::sparse(folder);
            // Entries that are removed leave unused blocks in the index.
            for number in 100..500 {
                let name = format!("large/{number:05}-an-entry-with-a-rather-long-name");
                std::fs::remove_file(folder.join(name)).unwrap();
            }
        }
        assert_same(&mut *open_mounted(&place), &source, Attributes::None, &[]);
        drop(mounted);
        let count = assert_same(&mut *place.open(), &source, Attributes::None, &[]);
        assert!(count >= 280, "{count} files were compared");
        assert_eq!(place.open().notes(), Vec::<String>::new());
    }
}

/// ntfs-3g writes at once, but for what its process keeps.
fn open_mounted(place: &Place) -> Box<dyn holdfast_guest_files::FileSystem> {
    system("sync", &["-f", text(&place.path("mounted"))]);
    place.open()
}

#[test]
fn compressed_files() {
    let place = make(&[]);
    let source = place.folder("source");
    let Some(mounted) = mount(&place) else { return };
    let folder = mounted.point().join("packed");
    std::fs::create_dir(&folder).unwrap();
    compress(&folder);
    tree::plain(&folder);
    let packed = source.join("packed");
    std::fs::create_dir(&packed).unwrap();
    tree::plain(&packed);
    let used = system("du", &["-k", text(&folder.join("text.log"))]);
    drop(mounted);
    let used_kib: u64 = used.split_whitespace().next().unwrap().parse().unwrap();
    assert!(used_kib < 1500, "the file is not compressed: {used}");
    let mut file_system = place.open();
    assert_same(&mut *file_system, &source, Attributes::None, &[]);
    let node = node_at(&mut *file_system, "/PACKED/Text.LOG");
    assert!(content(&mut *file_system, node) == std::fs::read(packed.join("text.log")).unwrap());
}

#[test]
fn links_of_ntfs_3g_and_reparse_points() {
    let place = make(&[]);
    let Some(mounted) = mount(&place) else { return };
    std::os::unix::fs::symlink("target/of the link", mounted.point().join("link")).unwrap();
    std::fs::create_dir(mounted.point().join("junction")).unwrap();
    std::fs::write(mounted.point().join("system.dll"), vec![1; 5000]).unwrap();
    // A junction to C:\Users, and a file compressed by WOF.
    let reparse = |tag: u32, data: &[u8]| {
        let length = u16::try_from(data.len()).unwrap();
        let bytes = [&tag.to_le_bytes()[..], &length.to_le_bytes(), &[0, 0], data].concat();
        bytes
            .iter()
            .fold("0x".to_owned(), |text, byte| text + &format!("{byte:02x}"))
    };
    let utf16 = |text: &str| -> Vec<u8> { text.encode_utf16().flat_map(u16::to_le_bytes).collect() };
    let (substitute, print) = (utf16("\\??\\C:\\Users"), utf16("C:\\Users"));
    let [a, b] = [substitute.len(), print.len()].map(|length| u16::try_from(length).unwrap());
    let header = [0, a, a + 2, b].map(u16::to_le_bytes).concat();
    let junction = [&header[..], &substitute, &[0, 0], &print, &[0, 0]].concat();
    let set = |name: &str, value: &str| {
        let path = mounted.point().join(name);
        try_system(
            "setfattr",
            &["-n", "system.ntfs_reparse_data", "-v", value, text(&path)],
        )
        .unwrap();
    };
    set("junction", &reparse(0xa000_0003, &junction));
    set(
        "system.dll",
        &reparse(0x8000_0017, &[1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]),
    );
    drop(mounted);
    let mut file_system = place.open();
    let link = |file_system: &mut dyn holdfast_guest_files::FileSystem, path: &str| {
        let found = resolve_path(file_system, path.as_bytes()).unwrap();
        assert_eq!(found.metadata.kind, FileKind::Link, "{path}");
        String::from_utf8(file_system.read_link(found.node).unwrap()).unwrap()
    };
    assert_eq!(link(&mut *file_system, "/link"), "target/of the link");
    assert_eq!(link(&mut *file_system, "/junction"), "C:/Users");
    let node = node_at(&mut *file_system, "/system.dll");
    let read = file_system.read_file(node, 0, 100);
    assert!(
        matches!(read, Err(Error::Unsupported { ref what, .. }) if what.contains("WOF")),
        "{read:?}"
    );
}

/// So many fragments that the file needs several records.
#[test]
fn a_file_of_several_records() {
    let place = make(&["-c", "512"]);
    let source = place.folder("source");
    let Some(mounted) = mount(&place) else { return };
    for folder in [source.as_path(), mounted.point()] {
        let files: Vec<std::fs::File> = (0..2)
            .map(|number| std::fs::File::create(folder.join(format!("file{number}"))).unwrap())
            .collect();
        // Pieces in the reverse order cannot be joined.
        for round in (0..1500u64).rev() {
            for file in &files {
                file.write_all_at(&[round.to_le_bytes()[0]; 512], round * 1024).unwrap();
            }
        }
    }
    drop(mounted);
    let image = place.image();
    let info = system("ntfsinfo", &["-F", "file0", text(&image)]);
    assert!(info.contains("$ATTRIBUTE_LIST"), "the file has one record: {info}");
    assert_same(&mut *place.open(), &source, Attributes::None, &[]);
}
