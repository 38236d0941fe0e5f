//! Changes identities: checksums and children stay valid, and the disk does not change.

use std::path::{Path, PathBuf};

use holdfast_image::{
    BlockOptions, CreateOptions, DiskDescriptor, Error, Format, ImageId, ImageKind, NewIdentity, OpenOptions,
    UnnamedChildren, children_in_folder, create, open, set_identity,
};

use crate::peer::{Lab, Random, assert_clean, assert_reads_as, overwrite, qemu_img, work};

const MIB: u64 = 1 << 20;
const WITH_CHILDREN: [(Format, &str); 4] = [
    (Format::Vdi, "vdi"),
    (Format::Vhd, "vhd"),
    (Format::Vhdx, "vhdx"),
    (Format::Vmdk, "vmdk"),
];

fn id(digit: u8) -> ImageId {
    format!("{digit:08x}-0d5e-4f0f-9d2e-5b1c6a7d8e9f").parse().unwrap()
}

fn new(id: ImageId, children: &[&Path]) -> NewIdentity {
    NewIdentity {
        id,
        children: children.iter().map(|path| PathBuf::from(*path)).collect(),
        unnamed_children: UnnamedChildren::Refuse,
        name: None,
    }
}

fn id_of(path: &Path) -> Option<ImageId> {
    let opened = open(path, &OpenOptions::default()).unwrap();
    opened.layers()[0].blocks.as_ref().unwrap().id
}

fn create_child(path: &Path, parent: &Path, format: Format, size_bytes: u64) {
    let options = CreateOptions {
        blocks: BlockOptions {
            kind: ImageKind::Differencing,
            parent: Some(parent.to_owned()),
            ..BlockOptions::default()
        },
        ..CreateOptions::new(format, size_bytes)
    };
    create(path, &options).unwrap();
}

#[test]
fn new_identity_keeps_the_disk_in_every_format() {
    let options = OpenOptions::default();
    for (format, extension) in WITH_CHILDREN {
        for kind in [ImageKind::Dynamic, ImageKind::Fixed] {
            if format == Format::Vmdk && kind == ImageKind::Fixed {
                continue;
            }
            let lab = Lab::new();
            let path = lab.path(&format!("disk.{extension}"));
            let mut disk = vec![0; 5 << 20];
            let mut create_options = CreateOptions::new(format, 5 * MIB);
            create_options.blocks.kind = kind;
            create_options.blocks.id = Some(id(1));
            create(&path, &create_options).unwrap();
            work(&path, &mut disk, &mut Random(7), 20);
            assert_eq!(id_of(&path), Some(id(1)), "{format} after its creation");

            let change = set_identity(&path, &options, &new(id(2), &[])).unwrap();
            assert_eq!((change.before, change.after), (Some(id(1)), Some(id(2))), "{format}");
            assert_eq!(id_of(&path), Some(id(2)), "{format}");
            assert_clean(&path);
            assert_reads_as(&open(&path, &options).unwrap(), &disk, "with another identity");
            // QEMU still finds it consistent, with the same disk.
            let raw = lab.path("disk.raw");
            overwrite(&raw, &disk);
            let names = [path.to_str().unwrap(), raw.to_str().unwrap()];
            qemu_img(&["compare", "-f", format.qemu_name(), "-F", "raw", names[0], names[1]]);
            // The image can still be written.
            work(&path, &mut disk, &mut Random(8), 5);
            assert_reads_as(&open(&path, &options).unwrap(), &disk, "written to afterwards");
            assert_eq!(id_of(&path), Some(id(2)), "{format} after a write");
        }
    }
}

#[test]
fn identity_change_updates_all_children_or_none() {
    let options = OpenOptions::default();
    for (format, extension) in WITH_CHILDREN {
        let lab = Lab::new();
        let path = |name: &str| lab.path(&format!("{name}.{extension}"));
        let (base, one, two) = (path("base"), path("one"), path("two"));
        let mut disk = vec![0; 4 << 20];
        create(&base, &CreateOptions::new(format, 4 * MIB)).unwrap();
        work(&base, &mut disk, &mut Random(3), 20);
        let (mut disk_one, mut disk_two) = (disk.clone(), disk.clone());
        create_child(&one, &base, format, 4 * MIB);
        create_child(&two, &base, format, 4 * MIB);
        work(&one, &mut disk_one, &mut Random(4), 10);
        work(&two, &mut disk_two, &mut Random(5), 10);
        let before = id_of(&base);
        let assert_whole = |when: &str| {
            assert_reads_as(&open(&one, &options).unwrap(), &disk_one, when);
            assert_reads_as(&open(&two, &options).unwrap(), &disk_two, when);
        };

        assert_eq!(children_in_folder(&base, &options).unwrap(), [one.clone(), two.clone()]);
        // The children of a VHDX identify it by its last modification, which stays: there is nothing to refuse.
        if format != Format::Vhdx {
            let refused = set_identity(&base, &options, &new(id(2), &[&one]));
            match refused {
                Err(Error::HasChildren { children, .. }) => assert_eq!(children, [two.display().to_string()]),
                other => panic!("{format}: {other:?}"),
            }
            assert_eq!(id_of(&base), before, "{format}: refused, and nothing changed");
            assert_whole("after a refusal");
        }

        let new_identity = NewIdentity {
            unnamed_children: UnnamedChildren::Change,
            ..new(id(2), &[&one])
        };
        set_identity(&base, &options, &new_identity).unwrap();
        assert_eq!(id_of(&base), Some(id(2)), "{format}");
        assert_whole("with their parent's new identity");
        for image in [&base, &one, &two] {
            assert_clean(image);
        }
        // After an interruption, the call can be repeated: the first child stores the new identity of its parent
        // already.
        if format != Format::Vhdx {
            set_identity(&base, &options, &new(before.unwrap(), &[&one, &two])).unwrap();
            set_identity(
                &base,
                &options,
                &NewIdentity {
                    unnamed_children: UnnamedChildren::Change,
                    ..new(id(9), &[])
                },
            )
            .unwrap();
            set_identity(&base, &options, &new(id(9), &[&one, &two])).unwrap();
            assert_whole("done twice");
        }
        // A child gets a new identity, and stays a child.
        set_identity(&one, &options, &new(id(3), &[])).unwrap();
        assert_whole("a child with another identity");
        // An image that is not a child is not changed.
        let stranger = path("stranger");
        create(&stranger, &CreateOptions::new(format, 4 * MIB)).unwrap();
        let new_identity = NewIdentity {
            unnamed_children: UnnamedChildren::Change,
            ..new(id(4), &[&stranger])
        };
        let refused = set_identity(&base, &options, &new_identity);
        assert!(matches!(refused, Err(Error::NotAChild { .. })), "{format}: {refused:?}");
        assert_whole("after a stranger");
    }
}

/// QEMU writes no identity into a VMDK; VMware and VirtualBox each have their own notation.
#[test]
fn unknown_descriptor_text_is_kept() {
    let lab = Lab::new();
    let options = OpenOptions::default();
    let disk = vec![0; 3 << 20];
    for subformat in [
        "monolithicSparse",
        "monolithicFlat",
        "twoGbMaxExtentSparse",
        "streamOptimized",
    ] {
        let path = lab.path(&format!("{subformat}.vmdk"));
        let subformat = format!("subformat={subformat}");
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "vmdk",
            "-o",
            &subformat,
            path.to_str().unwrap(),
            "3M",
        ]);
        assert_eq!(id_of(&path), None);
        let change = set_identity(&path, &options, &new(id(5), &[])).unwrap();
        assert_eq!(change.before, None);
        assert_eq!(id_of(&path), Some(id(5)), "{subformat}");
        set_identity(&path, &options, &new(id(6), &[])).unwrap();
        assert_eq!(id_of(&path), Some(id(6)), "{subformat}");
        assert_reads_as(&open(&path, &options).unwrap(), &disk, &subformat);
        qemu_img(&["info", path.to_str().unwrap()]);
    }

    let (path, extent) = (lab.path("vmware.vmdk"), lab.path("vmware-flat.vmdk"));
    overwrite(&extent, &disk);
    let text = "# Disk DescriptorFile\r\nversion=1\r\nCID=0000beef\r\nparentCID=ffffffff\r\ncreateType=\"vmfs\"\r\n\
         RW 6144 FLAT \"vmware-flat.vmdk\" 0\r\nddb.uuid = \"60 00 C2 9e 7d 51 4f 1a-8d 3c 00 01 02 03 04 05\"\r\n\
         ddb.longContentID = \"1\"\r\n";
    overwrite(&path, text.as_bytes());
    assert_eq!(
        id_of(&path).unwrap().to_string(),
        "6000c29e-7d51-4f1a-8d3c-000102030405"
    );
    set_identity(&path, &options, &new(id(7), &[])).unwrap();
    let expected = text.replace(
        "60 00 C2 9e 7d 51 4f 1a-8d 3c 00 01 02 03 04 05",
        "00 00 00 07 0d 5e 4f 0f-9d 2e 5b 1c 6a 7d 8e 9f",
    );
    assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
}

/// Only the descriptor has the identities of deltas.
#[test]
fn parallels_identity_changes_in_the_descriptor() {
    let lab = Lab::new();
    let options = OpenOptions::default();
    let path = lab.path("disk.hdd");
    let mut create_options = CreateOptions::new(Format::Parallels, 4 * MIB);
    create_options.blocks.id = Some(id(1));
    create(&path, &create_options).unwrap();
    let mut disk = vec![0; 4 << 20];
    work(&path, &mut disk, &mut Random(9), 10);
    let change = set_identity(&path, &options, &new(id(2), &[])).unwrap();
    assert_eq!((change.before, change.after), (Some(id(1)), Some(id(2))));
    let descriptor = DiskDescriptor::load(&path).unwrap();
    assert_eq!((descriptor.id(), descriptor.top()), (Some(id(2)), DiskDescriptor::TOP));
    assert_reads_as(&open(&path, &options).unwrap(), &disk, "with another identity");
}

#[test]
fn images_without_identity_are_refused() {
    let lab = Lab::new();
    let options = OpenOptions::default();
    for (format, extension) in [
        (Format::Raw, "raw"),
        (Format::Qcow2, "qcow2"),
        (Format::Parallels, "hds"),
    ] {
        let path = lab.path(&format!("disk.{extension}"));
        create(&path, &CreateOptions::new(format, MIB)).unwrap();
        let content = std::fs::read(&path).unwrap();
        let refused = set_identity(&path, &options, &new(id(1), &[]));
        assert!(
            matches!(refused, Err(Error::NoIdentity { .. })),
            "{format}: {refused:?}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), content, "{format}");
    }
    let path = lab.path("disk.vdi");
    create(&path, &CreateOptions::new(Format::Vdi, MIB)).unwrap();
    let nil = set_identity(&path, &options, &new(ImageId::NIL, &[]));
    assert!(matches!(nil, Err(Error::InvalidOption { .. })), "{nil:?}");
}
