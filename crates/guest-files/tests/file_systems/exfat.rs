//! exFAT, filled by exfat-fuse.

use crate::compare::{Attributes, assert_same, node_at};
use crate::place::{Place, system, text};
use crate::tree;

#[test]
fn files_and_directories_with_small_and_large_clusters() {
    for cluster in ["4K", "64K"] {
        let place = Place::new(96 << 20);
        system("mkfs.exfat", &["-c", cluster, "-L", "GUEST", text(&place.image())]);
        let source = place.folder("source");
        // mount does not tell a missing helper from other reasons.
        system("sh", &["-c", "command -v mount.exfat-fuse"]);
        let Some(mounted) = place.mount(&["-t", "exfat-fuse", "-o", "loop"]) else {
            return;
        };
        for folder in [source.as_path(), mounted.point()] {
            tree::plain(folder);
            // Entries that are removed stay in the directory.
            for number in 100..500 {
                let name = format!("large/{number:05}-an-entry-with-a-rather-long-name");
                std::fs::remove_file(folder.join(name)).unwrap();
            }
            let file = std::fs::File::create(folder.join("extended")).unwrap();
            file.set_len(500_000).unwrap();
        }
        drop(mounted);
        let mut file_system = place.open();
        let count = assert_same(&mut *file_system, &source, Attributes::None, &[]);
        assert!(count >= 275, "{count} files were compared");
        let node = node_at(&mut *file_system, "/NOISE.bin");
        let modified = file_system.metadata(node).unwrap().modified.unwrap();
        let age = source.join("noise.bin").metadata().unwrap().modified().unwrap();
        let seconds = age.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!((modified.seconds - seconds.cast_signed()).abs() < 60, "{modified:?}");
    }
}
