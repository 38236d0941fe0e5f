//! Differencing images. QEMU refuses them, so they are read layer by layer here, by the rules of the formats.

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _};
use holdfast_image::{
    Backing, BlockOptions, CreateOptions, Error, Format, ImageKind, OpenOptions, create, open, open_mut,
};

use crate::peer::{Lab, Random, assert_clean, assert_reads_as, work};

const MIB: u64 = 1 << 20;

fn child_of(parent: &std::path::Path, format: Format, size_bytes: u64) -> CreateOptions {
    CreateOptions {
        blocks: BlockOptions {
            kind: ImageKind::Differencing,
            parent: Some(parent.to_owned()),
            ..BlockOptions::default()
        },
        ..CreateOptions::new(format, size_bytes)
    }
}

#[test]
fn children_read_from_their_parents() {
    for (format, extension) in [
        (Format::Vdi, "vdi"),
        (Format::Vhd, "vhd"),
        (Format::Vhdx, "vhdx"),
        (Format::Vmdk, "vmdk"),
    ] {
        let lab = Lab::new();
        let size = 6 * MIB + 512;
        let path = |name: &str| lab.path(&format!("{name}.{extension}"));
        let mut disk = vec![0; usize::try_from(size).unwrap()];
        create(&path("base"), &CreateOptions::new(format, size)).unwrap();
        work(&path("base"), &mut disk, &mut Random(1), 30);
        let base_disk = disk.clone();
        create(&path("middle"), &child_of(&path("base"), format, size)).unwrap();
        assert_reads_as(
            &open(&path("middle"), &OpenOptions::default()).unwrap(),
            &disk,
            "an empty child",
        );
        work(&path("middle"), &mut disk, &mut Random(2), 30);
        create(&path("top"), &child_of(&path("middle"), format, size)).unwrap();
        work(&path("top"), &mut disk, &mut Random(3), 30);
        let opened = open(&path("top"), &OpenOptions::default()).unwrap();
        assert_reads_as(&opened, &disk, "the top");
        assert_eq!(opened.layers().len(), 3);
        for name in ["base", "middle", "top"] {
            assert_clean(&path(name));
        }
        assert_reads_as(
            &open(&path("base"), &OpenOptions::default()).unwrap(),
            &base_disk,
            "the base",
        );

        // A write to a parent breaks its children, which detect it if the format allows.
        if format == Format::Vhd {
            continue;
        }
        let parent = open_mut(&path("middle"), &OpenOptions::default()).unwrap();
        parent.write_at(&[1], 0).unwrap();
        parent.flush().unwrap();
        drop(parent);
        let changed = open(&path("top"), &OpenOptions::default());
        assert!(
            matches!(changed, Err(Error::ParentChanged { .. })),
            "{:?}",
            changed.err()
        );
        let alone = OpenOptions {
            backing: Backing::Ignore,
            ..OpenOptions::default()
        };
        assert_eq!(open(&path("top"), &alone).unwrap().size_bytes(), size);
    }
}

#[test]
fn moved_parent_must_be_allowed() {
    for (format, extension) in [(Format::Vhd, "vhd"), (Format::Vhdx, "vhdx"), (Format::Vmdk, "vmdk")] {
        let lab = Lab::new();
        let (base, top) = (
            lab.path(&format!("base.{extension}")),
            lab.path(&format!("top.{extension}")),
        );
        create(&base, &CreateOptions::new(format, MIB)).unwrap();
        create(&top, &child_of(&base, format, MIB)).unwrap();
        std::fs::create_dir(lab.path("moved")).unwrap();
        let moved = lab.path(&format!("moved/base.{extension}"));
        std::fs::rename(&base, &moved).unwrap();
        let missing = open(&top, &OpenOptions::default());
        assert!(
            matches!(missing, Err(Error::ParentNotFound { .. })),
            "{format}: {:?}",
            missing.err()
        );
        let options = OpenOptions {
            allow: vec![moved],
            ..OpenOptions::default()
        };
        assert_eq!(open(&top, &options).unwrap().layers().len(), 2, "{format}");

        // A parent that moved from another folder to that of its child.
        let far = lab.path(&format!("far.{extension}"));
        let child = child_of(&lab.path(&format!("moved/base.{extension}")), format, MIB);
        create(&far, &child).unwrap();
        std::fs::create_dir(lab.path("both")).unwrap();
        for (from, to) in [(&lab.path(&format!("moved/base.{extension}")), "base"), (&far, "far")] {
            std::fs::rename(from, lab.path(&format!("both/{to}.{extension}"))).unwrap();
        }
        let far = lab.path(&format!("both/far.{extension}"));
        assert_eq!(
            open(&far, &OpenOptions::default()).unwrap().layers().len(),
            2,
            "{format}"
        );
    }
}

/// The search for the parent opens and closes other images of the folder; the lock of the image stays.
#[test]
fn parent_search_keeps_the_lock() {
    for (format, extension) in [
        (Format::Vdi, "vdi"),
        (Format::Vhd, "vhd"),
        (Format::Vhdx, "vhdx"),
        (Format::Vmdk, "vmdk"),
    ] {
        let lab = Lab::new();
        // The child sorts first among the files of the folder.
        let (base, top) = (lab.path(&format!("z.{extension}")), lab.path(&format!("a.{extension}")));
        create(&base, &CreateOptions::new(format, MIB)).unwrap();
        create(&top, &child_of(&base, format, MIB)).unwrap();
        let options = OpenOptions {
            allow: vec![top.clone(), lab.path("")],
            ..OpenOptions::default()
        };
        let held = open_mut(&top, &options).unwrap();
        let refused = crate::peer::qemu_img_fails(&["resize", "-f", "raw", crate::peer::path_text(&top), "8M"]);
        assert!(refused.contains("lock"), "{format}: {refused}");
        drop(held);
    }
}

#[test]
fn parent_search_follows_virtualbox_folders() {
    let lab = Lab::new();
    let size = 2 * MIB;
    let machine = lab.path("web1");
    std::fs::create_dir_all(machine.join("Snapshots")).unwrap();
    let (base, top) = (machine.join("web1.vdi"), machine.join("Snapshots/child.vdi"));
    create(&base, &CreateOptions::new(Format::Vdi, size)).unwrap();
    create(&top, &child_of(&base, Format::Vdi, size)).unwrap();
    // The parent folder is not that of the image: the user must allow it.
    let refused = open(&top, &OpenOptions::default());
    assert!(
        matches!(refused, Err(Error::ParentNotFound { .. })),
        "{:?}",
        refused.err()
    );
    for allowed in [&base, &machine] {
        let options = OpenOptions {
            allow: vec![allowed.clone()],
            ..OpenOptions::default()
        };
        assert_eq!(open(&top, &options).unwrap().layers().len(), 2);
    }
}
