//! Descriptors and deltas that are refused.

use std::fs;
use std::os::unix::fs::FileExt as _;

use holdfast_block::BlockDeviceMut as _;
use holdfast_image::{
    CreateOptions, Error, Format, Gate, ImageId, ImageKind, OpenOptions, create, detect, open, open_mut,
};

use super::{MIB, Row, TOP, contents, folder, id};
use crate::peer::{Lab, Random, assert_reads_as, path_text, work};

#[test]
fn plain_root_format_is_not_detected() {
    let lab = Lab::new();
    let rows = [
        (id(1), ImageId::NIL, "Plain", "root.hds"),
        (TOP, id(1), "Compressed", "top.hds"),
    ];
    let path = folder(&lab, 3 * MIB, Some(TOP), &rows);
    let (root, mut disk) = lab.raw("web1.hdd/root.hds", 2 * MIB, 5);
    // The guest wrote the header of another format.
    disk[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    fs::File::options()
        .write(true)
        .open(&root)
        .unwrap()
        .write_all_at(&disk[..8], 0)
        .unwrap();
    create(&path.join("top.hds"), &CreateOptions::new(Format::Parallels, 3 * MIB)).unwrap();
    disk.resize(3 << 20, 0);
    work(&path, &mut disk, &mut Random(6), 40);
    let image = open(&path, &OpenOptions::default()).unwrap();
    assert_reads_as(&image, &disk, "above a plain root");
    let layer = &image.layers()[1];
    let blocks = layer.blocks.as_ref().unwrap();
    assert_eq!(
        (layer.format, blocks.kind, blocks.id),
        (Format::Raw, ImageKind::Fixed, Some(id(1)))
    );

    // Without other deltas it can be read, and written as a raw image.
    let path = folder(&lab, 2 * MIB, None, &[(TOP, ImageId::NIL, "Plain", "root.hds")]);
    assert_eq!(
        contents(&open(&path, &OpenOptions::default()).unwrap()),
        fs::read(&root).unwrap()
    );
    let refused = open_mut(&path, &OpenOptions::default()).err().unwrap();
    assert!(matches!(refused, Error::NotWritable { .. }), "{refused}");
    assert!(refused.to_string().contains("root.hds"), "{refused}");
}

#[test]
fn gate_checks_every_delta() {
    let lab = Lab::new();
    let (secret, _) = lab.raw("secret", MIB, 1);
    let absolute = path_text(&secret).to_owned();
    for name in [
        "../secret",
        &absolute,
        "link",
        "../no-such-file",
        "file:../secret",
        "http://x/y",
        "",
    ] {
        let path = folder(&lab, MIB, None, &[(TOP, ImageId::NIL, "Plain", name)]);
        drop(std::os::unix::fs::symlink("../secret", path.join("link")));
        let refused = open(&path, &OpenOptions::default()).err();
        assert!(matches!(refused, Some(Error::Refused { .. })), "{name}: {refused:?}");
    }
    let path = folder(&lab, MIB, None, &[(TOP, ImageId::NIL, "Plain", "../secret")]);
    let allowed = OpenOptions {
        allow: vec![secret.clone()],
        ..OpenOptions::default()
    };
    assert_eq!(contents(&open(&path, &allowed).unwrap()), fs::read(&secret).unwrap());
    // The user named the folder, not the target of a link in it.
    fs::rename(path.join("DiskDescriptor.xml"), lab.path("descriptor")).unwrap();
    std::os::unix::fs::symlink("../descriptor", path.join("DiskDescriptor.xml")).unwrap();
    for answer in [
        open(&path, &allowed).err(),
        detect(&path).err(),
        open_mut(&path, &allowed).err(),
    ] {
        assert!(matches!(answer, Some(Error::Io { .. })), "{answer:?}");
    }
    fs::remove_file(path.join("DiskDescriptor.xml")).unwrap();
    // The files opened later come after it.
    let rows = [
        (id(1), ImageId::NIL, "Plain", "root.hds"),
        (TOP, id(1), "Compressed", "top.hds"),
        (id(3), id(1), "Compressed", "../secret"),
    ];
    let path = folder(&lab, MIB, None, &rows);
    lab.raw("web1.hdd/root.hds", MIB, 2);
    create(&path.join("top.hds"), &CreateOptions::new(Format::Parallels, MIB)).unwrap();
    let image = open(&path, &OpenOptions::default()).unwrap();
    let refused = image.snapshot(&id(3).to_string()).err();
    assert!(matches!(refused, Some(Error::Refused { .. })), "{refused:?}");
    let denied = OpenOptions {
        gate: Gate::Deny,
        ..OpenOptions::default()
    };
    assert!(matches!(open(&path, &denied), Err(Error::Refused { .. })));
}

#[test]
fn unsupported_images_are_named() {
    let lab = Lab::new();
    let size = MIB;
    let delta = |name: &str| {
        let path = lab.path("web1.hdd").join(name);
        if !path.exists() {
            create(&path, &CreateOptions::new(Format::Parallels, size)).unwrap();
        }
    };
    let two = |file: &'static str, other: &'static str| {
        [
            (id(1), ImageId::NIL, "Compressed", file),
            (TOP, id(1), "Compressed", other),
        ]
    };
    let path = folder(&lab, size, None, &two("root.hds", "gone.hds"));
    delta("root.hds");
    delta("top.hds");
    fs::hard_link(path.join("root.hds"), path.join("same.hds")).unwrap();
    let error = |rows: &[Row<'_>]| {
        folder(&lab, size, None, rows);
        open(&path, &OpenOptions::default()).err().unwrap()
    };
    assert!(matches!(error(&two("root.hds", "gone.hds")), Error::Backing { .. }));
    assert!(matches!(error(&two("root.hds", "root.hds")), Error::ChainLoop { .. }));
    assert!(matches!(error(&two("root.hds", "same.hds")), Error::ChainLoop { .. }));
    assert!(matches!(
        error(&two("root.hds", "DiskDescriptor.xml")),
        Error::ChainLoop { .. }
    ));
    // A descriptor is not a delta.
    let inner = lab.path("web1.hdd/inner.hds");
    fs::copy(path.join("DiskDescriptor.xml"), &inner).unwrap();
    assert!(error(&two("root.hds", "inner.hds")).is_corrupt());

    // The length of a chain is limited; deltas outside of it do not count.
    let names: Vec<String> = (0..130).map(|number| format!("{number}.hds")).collect();
    let rows = |top: usize| -> Vec<Row<'_>> {
        let guid = |number: usize| match number {
            _ if number == top => TOP,
            _ => ImageId([u8::try_from(number).unwrap() + 1; 16]),
        };
        let parent = |number: usize| number.checked_sub(1).map_or(ImageId::NIL, guid);
        let row = |number: usize| (guid(number), parent(number), "Compressed", names[number].as_str());
        (0..130).map(row).collect()
    };
    for name in &names {
        delta(name);
    }
    folder(&lab, size, None, &rows(127));
    let image = open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(image.layers().len(), 128);
    assert!(contents(&image).iter().all(|byte| *byte == 0));
    let longer = image.snapshot(&ImageId([130; 16]).to_string()).err();
    assert!(matches!(longer, Some(Error::ChainTooLong { .. })), "{longer:?}");
    assert!(matches!(error(&rows(128)), Error::ChainTooLong { .. }));

    // A folder without a descriptor.
    fs::create_dir(lab.path("folder")).unwrap();
    assert!(matches!(
        open(&lab.path("folder"), &OpenOptions::default()),
        Err(Error::Io { .. })
    ));
    assert!(matches!(detect(&lab.path("folder")), Err(Error::Io { .. })));
    // Opened with the format raw, it reads as its text.
    let raw = OpenOptions {
        format: Some(Format::Raw),
        ..OpenOptions::default()
    };
    let text = open(&path.join("DiskDescriptor.xml"), &raw).unwrap();
    assert_eq!(text.layers()[0].format, Format::Raw);
}

#[test]
fn top_with_children_is_not_writable() {
    let lab = Lab::new();
    let rows = [
        (id(1), ImageId::NIL, "Compressed", "root.hds"),
        (id(2), id(1), "Compressed", "top.hds"),
    ];
    let path = folder(&lab, MIB, Some(id(1)), &rows);
    create(&path.join("root.hds"), &CreateOptions::new(Format::Parallels, MIB)).unwrap();
    create(&path.join("top.hds"), &CreateOptions::new(Format::Parallels, MIB)).unwrap();
    let refused = open_mut(&path, &OpenOptions::default()).err();
    assert!(matches!(refused, Some(Error::NotWritable { .. })), "{refused:?}");
    let path = folder(&lab, MIB, Some(id(2)), &rows);
    let held = open_mut(&path, &OpenOptions::default()).unwrap();
    held.write_at(&[1; 100], 700).unwrap();
    held.flush().unwrap();
    // While it is open for writing, other writers are refused.
    let top = path.join("top.hds");
    let refused = crate::peer::qemu_img_fails(&["resize", "-f", "raw", path_text(&top), "8M"]);
    assert!(refused.contains("lock"), "{refused}");
    drop(held);
    assert!(contents(&open(&path, &OpenOptions::default()).unwrap())[700..800] == [1; 100]);
}
