//! A tree with what is hard to read: many names, holes, fragments, preallocated space, links of all lengths.

use std::fs::{File, Permissions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use holdfast_block::SeededRandom;
use rustix::fs::{FallocateFlags, fallocate};

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    SeededRandom::new(seed).fill(&mut bytes);
    bytes
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    File::create(path).unwrap().write_all(bytes).unwrap();
}

/// Files that every file system can hold.
pub(crate) fn plain(folder: &Path) {
    for number in 0..60usize {
        let name = format!("many/{}/file name {number} ä.txt", number % 7);
        write(&folder.join(name), &noise(number * 331, number as u64));
    }
    for number in 0..600 {
        let name = format!("large/{number:05}-an-entry-with-a-rather-long-name");
        write(&folder.join(name), number.to_string().as_bytes());
    }
    write(&folder.join("noise.bin"), &noise(3 << 20, 77));
    let lines: Vec<String> = (0..60_000)
        .map(|number| format!("{} some line that compresses well\n", number / 10))
        .collect();
    write(&folder.join("text.log"), lines.concat().as_bytes());
    write(&folder.join("empty"), b"");
    std::fs::create_dir(folder.join("nothing")).unwrap();
    fragments(folder);
}

/// Four files whose pieces alternate on the disk.
fn fragments(folder: &Path) {
    let mut files: Vec<File> = (0..4)
        .map(|number| File::create(folder.join(format!("fragments{number}"))).unwrap())
        .collect();
    for round in 0..100u64 {
        for (number, file) in (0u64..).zip(&mut files) {
            file.write_all(&noise(4096, round * 4 + number)).unwrap();
            if round % 33 == 0 {
                file.sync_all().unwrap();
            }
        }
    }
}

/// Files with holes.
pub(crate) fn sparse(folder: &Path) {
    let mut file = File::create(folder.join("sparse.img")).unwrap();
    file.seek(SeekFrom::Start(10 << 20)).unwrap();
    file.write_all(&noise(5000, 3)).unwrap();
    file.seek(SeekFrom::Start(30 << 20)).unwrap();
    file.write_all(b"tail").unwrap();
    File::create(folder.join("only-a-hole"))
        .unwrap()
        .set_len(5_000_001)
        .unwrap();
    // Thousands of extents: a tree of several levels.
    let mut comb = File::create(folder.join("comb.bin")).unwrap();
    for tooth in 0..2000u64 {
        comb.seek(SeekFrom::Start(tooth * 8192)).unwrap();
        comb.write_all(&noise(4096, tooth)).unwrap();
    }
}

/// Space that is allocated before it is written: what is not written reads as zero, whatever is on the disk.
pub(crate) fn preallocated(folder: &Path) {
    // The deleted file leaves bytes in the space that is allocated next.
    write(&folder.join("deleted"), &noise(6 << 20, 9));
    File::open(folder.join("deleted")).unwrap().sync_all().unwrap();
    std::fs::remove_file(folder.join("deleted")).unwrap();
    let mut file = File::create(folder.join("preallocated.db")).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, 6 << 20).unwrap();
    for offset in [0, 1 << 20, (1 << 20) + 8192, 5 << 20] {
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.write_all(&noise(4096, offset)).unwrap();
    }
    file.sync_all().unwrap();
}

/// Links, hard links and permissions.
pub(crate) fn unix(folder: &Path) {
    symlink("noise.bin", folder.join("link")).unwrap();
    symlink("x".repeat(59), folder.join("link59")).unwrap();
    symlink("x".repeat(60), folder.join("link60")).unwrap();
    symlink("/many/../".repeat(100), folder.join("long-link")).unwrap();
    symlink("/large", folder.join("absolute")).unwrap();
    symlink("loop", folder.join("loop")).unwrap();
    std::fs::hard_link(folder.join("noise.bin"), folder.join("hard")).unwrap();
    let set = |name: &str, mode| std::fs::set_permissions(folder.join(name), Permissions::from_mode(mode)).unwrap();
    set("empty", 0o4751);
    set("nothing", 0o1700);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        folder.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
}
