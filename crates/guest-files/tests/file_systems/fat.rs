//! FAT12, FAT16 and FAT32, filled by mtools.

use std::path::Path;

use crate::compare::{Attributes, assert_same, content, node_at};
use crate::place::{Place, system, text};
use crate::tree;

fn fill(folder: &Path, is_small: bool) {
    if is_small {
        std::fs::create_dir_all(folder.join("some folder/below")).unwrap();
        for number in 0..40usize {
            let name = format!("some folder/below/a long name, number {number} ö.txt");
            std::fs::write(folder.join(name), vec![number.to_le_bytes()[0]; number * 700]).unwrap();
        }
        std::fs::write(folder.join("README.TXT"), b"short").unwrap();
        std::fs::write(folder.join("lower.txt"), b"lower").unwrap();
    } else {
        tree::plain(folder);
    }
}

fn compare_with_mtools(width: &str, image_bytes: u64) {
    let place = Place::new(image_bytes);
    let source = place.folder("source");
    fill(&source, width == "12");
    let image = place.image();
    system("mkfs.fat", &["-F", width, "-n", "GUEST", text(&image)]);
    let entries: Vec<_> = std::fs::read_dir(&source)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let mut words = vec!["-s", "-m", "-i", text(&image)];
    words.extend(entries.iter().map(|path| text(path)));
    words.push("::");
    // mtools stores local time, which is UTC here, and takes names in the encoding of the locale.
    system("env", &[&["TZ=UTC", "LC_ALL=C.UTF-8", "mcopy"], &words[..]].concat());
    let mut file_system = place.open();
    let count = assert_same(&mut *file_system, &source, Attributes::None, &[]);
    assert!(count >= 40, "{count} files were compared");
}

#[test]
fn fat_of_all_widths() {
    compare_with_mtools("12", 2 << 20);
    compare_with_mtools("16", 32 << 20);
    compare_with_mtools("32", 64 << 20);
}

#[test]
fn names_ignore_case_and_times_are_read() {
    let place = Place::new(2 << 20);
    let source = place.folder("source");
    std::fs::write(source.join("Hello World.txt"), b"hello").unwrap();
    let image = place.image();
    system("mkfs.fat", &["-F", "12", text(&image)]);
    system(
        "touch",
        &["-d", "2024-02-29T12:34:56Z", text(&source.join("Hello World.txt"))],
    );
    let file = source.join("Hello World.txt");
    system("env", &["TZ=UTC", "mcopy", "-m", "-i", text(&image), text(&file), "::"]);
    let mut file_system = place.open();
    let node = node_at(&mut *file_system, "/hello WORLD.TXT");
    assert_eq!(content(&mut *file_system, node), b"hello");
    let modified = file_system.metadata(node).unwrap().modified.unwrap();
    assert_eq!(modified.seconds, 1_709_210_096);
}

/// A chain that ends before its file must not become a shorter file.
#[test]
fn a_chain_that_is_too_short_is_an_error() {
    let place = Place::new(2 << 20);
    let source = place.folder("source");
    std::fs::write(source.join("file"), vec![7; 20_000]).unwrap();
    let image = place.image();
    system("mkfs.fat", &["-F", "12", "-s", "1", text(&image)]);
    system("mcopy", &["-i", text(&image), text(&source.join("file")), "::"]);
    let mut bytes = std::fs::read(&image).unwrap();
    // The entry of cluster 10 becomes the end of the chain, in both copies of the table.
    let table_bytes = usize::from(u16::from_le_bytes([bytes[22], bytes[23]])) * 512;
    for table in [512, 512 + table_bytes] {
        bytes[table + 15] = 0xff;
        bytes[table + 16] |= 0x0f;
    }
    std::fs::write(&image, bytes).unwrap();
    let mut file_system = place.open();
    let node = node_at(&mut *file_system, "/file");
    let mut offset = 0;
    let end = loop {
        match file_system.read_file(node, offset, 4096) {
            Ok(holdfast_guest_files::FilePiece::Data(piece)) => offset += piece.len() as u64,
            other => break other,
        }
    };
    assert!(end.is_err(), "{end:?} at {offset}");
}
