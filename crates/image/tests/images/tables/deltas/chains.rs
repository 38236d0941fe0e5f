//! What chains of deltas read as, and how they are found and created.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use holdfast_block::{BlockDevice, DirtyBitmap};
use holdfast_image::{
    Backing, BlockOptions, CreateOptions, DiskDescriptor, Error, Format, FormatSource, ImageId, ImageKind, MapContent,
    Note, OpenOptions, changed_on_disk, check, create, detect, open,
};

use super::{MIB, TOP, contents, files, folder, grown, id, made_by_qemu, overlay};
use crate::peer::{Lab, Random, assert_clean, assert_reads_as, flatten, path_text, qemu_img, qemu_io_as, work};

#[test]
fn chain_reads_merged_deltas() {
    let lab = Lab::new();
    let path = grown(&lab);
    let (mut root, below) = (Vec::new(), files(&path, &["root.hds", "middle.hds", "branch.hds"]));
    overlay(&mut root, &path.join("root.hds"));
    assert_eq!(root, fs::read(lab.path("disk.raw")).unwrap(), "the model reads a delta");
    let mut middle = root.clone();
    overlay(&mut middle, &path.join("middle.hds"));
    let mut branch = middle.clone();
    overlay(&mut branch, &path.join("branch.hds"));
    let mut disk = middle.clone();
    overlay(&mut disk, &path.join("top.hds"));

    let read = |disk: &[u8]| {
        let mut model = middle.clone();
        overlay(&mut model, &path.join("top.hds"));
        assert!(model == disk, "the content differs from the model");
        for place in [path.clone(), path.join("DiskDescriptor.xml")] {
            assert_eq!(detect(&place).unwrap(), Format::Parallels);
            let image = open(&place, &OpenOptions::default()).unwrap();
            assert_reads_as(&image, disk, "the chain");
            assert_eq!(image.notes(), []);
            for (name, expected) in [(id(1), &root), (id(2), &middle), (id(3), &branch)] {
                for name in [name.to_string(), format!("{{{name}}}").to_uppercase()] {
                    let snapshot = image.snapshot(&name).unwrap();
                    assert_reads_as(&*snapshot, expected, &name);
                }
            }
            assert_reads_as(&*image.snapshot(&TOP.to_string()).unwrap(), disk, "the top by its name");
            for name in ["root.hds", "", &id(9).to_string(), &ImageId::NIL.to_string()] {
                let missing = image.snapshot(name).err();
                assert!(matches!(missing, Some(Error::NotFound { .. })), "{name}: {missing:?}");
            }
        }
    };
    read(&disk);
    for seed in 0..4 {
        work(&path, &mut disk, &mut Random(seed), 30);
        read(&disk);
    }
    assert!(
        files(&path, &["root.hds", "middle.hds", "branch.hds"]) == below,
        "only the top is written"
    );
    assert_clean(&path);
    qemu_img(&["check", "-f", "parallels", path_text(&path.join("top.hds"))]);
}

#[test]
fn layers_report_their_identities() {
    let lab = Lab::new();
    let path = grown(&lab);
    let image = open(&path, &OpenOptions::default()).unwrap();
    let root = path.canonicalize().unwrap();
    let layers = image.layers();
    let ids: Vec<_> = layers.iter().map(|layer| layer.blocks.as_ref().unwrap().id).collect();
    assert_eq!(ids, [Some(TOP), Some(id(2)), Some(id(1))]);
    let paths: Vec<_> = layers
        .iter()
        .map(|layer| layer.path.strip_prefix(&root).unwrap())
        .collect();
    assert_eq!(
        paths,
        [Path::new("top.hds"), Path::new("middle.hds"), Path::new("root.hds")]
    );
    let kinds = layers.iter().map(|layer| layer.blocks.as_ref().unwrap());
    let kinds: Vec<_> = kinds.map(|blocks| (blocks.kind, blocks.block_bytes)).collect();
    let (differing, dynamic) = (ImageKind::Differencing, ImageKind::Dynamic);
    assert_eq!(kinds, [(differing, MIB), (differing, 64 << 10), (dynamic, 256 << 10)]);
    let parent = layers[0].blocks.as_ref().unwrap().parent.as_ref().unwrap();
    assert_eq!(
        (parent.id, &parent.names[..]),
        (Some(id(2)), &["middle.hds".to_owned()][..])
    );
    assert_eq!(
        layers.iter().map(|layer| layer.format_source).collect::<Vec<_>>(),
        [FormatSource::Content, FormatSource::Overlay, FormatSource::Overlay]
    );
    // Code that overwrites or watches files needs the descriptor in this list.
    assert_eq!(layers[0].extent_files, [path.join("DiskDescriptor.xml")]);
    let snapshots = &layers[0].delta.as_ref().unwrap().snapshots;
    let snapshots: Vec<_> = snapshots
        .iter()
        .map(|snapshot| (snapshot.id, snapshot.parent))
        .collect();
    assert_eq!(snapshots, [(id(1), None), (id(2), Some(id(1))), (id(3), Some(id(2)))]);
    assert!(layers[1].delta.as_ref().unwrap().snapshots.is_empty());

    // 3 MiB: zeroes of the middle over data of the root. 8 MiB: past all data.
    for (offset, depth) in [(0, Some(2)), (MIB, Some(1)), (3 * MIB, Some(1)), (8 * MIB, None)] {
        let entry = image.map_at(offset, 512).unwrap();
        assert_eq!(entry.depth, depth, "{offset}: {entry:?}");
        assert_eq!(
            entry.content == MapContent::Zero,
            depth.is_none(),
            "{offset}: {entry:?}"
        );
    }

    let alone = OpenOptions {
        backing: Backing::Ignore,
        ..OpenOptions::default()
    };
    let alone = open(&path, &alone).unwrap();
    assert_eq!(alone.layers().len(), 1);
    assert!(contents(&alone).iter().all(|byte| *byte == 0), "the top is empty");
    let middle = contents(&*alone.snapshot(&id(2).to_string()).unwrap());
    assert!(middle[..1 << 20].iter().all(|byte| *byte == 0) && middle[1 << 20] == 7);
}

#[test]
fn new_parallels_folder_is_readable_by_qemu() {
    let lab = Lab::new();
    let size = 5 * MIB + 512;
    let options = CreateOptions {
        blocks: BlockOptions {
            id: Some(id(5)),
            ..BlockOptions::default()
        },
        ..CreateOptions::new(Format::Parallels, size)
    };
    let late = options.clone().with_final_path(Path::new("web1.hdd"));
    for (name, options) in [("web1.hdd", &options), (".web1.hdd.0123abcd.partial", &late)] {
        let path = lab.path(name);
        create(&path, options).unwrap();
        let mut disk = vec![0; usize::try_from(size).unwrap()];
        work(&path, &mut disk, &mut Random(7), 60);
        let peer = flatten(&path.join("root.hds"), &lab);
        assert!(peer[..disk.len()] == disk, "{name}: the peer reads other data");
        let whole = lab.path("renamed.hdd");
        fs::rename(&path, &whole).unwrap();
        let image = open(&whole, &OpenOptions::default()).unwrap();
        assert_reads_as(&image, &disk, name);
        assert_eq!(image.notes(), []);
        assert_clean(&whole);
        let descriptor = DiskDescriptor::load(&whole).unwrap();
        assert_eq!((descriptor.id(), descriptor.top()), (Some(id(5)), TOP));
        let mut names: Vec<_> = fs::read_dir(&whole)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["DiskDescriptor.xml", "root.hds"]);
        for (place, mode) in [("", 0o700), ("DiskDescriptor.xml", 0o600), ("root.hds", 0o600)] {
            let found = fs::metadata(whole.join(place)).unwrap().permissions().mode();
            assert_eq!(found & 0o777, mode, "{place}");
        }
        // Nothing is overwritten.
        assert!(matches!(
            create(&whole, options),
            Err(Error::Io { .. } | Error::InvalidOption { .. })
        ));
        assert_reads_as(&open(&whole, &OpenOptions::default()).unwrap(), &disk, name);
        fs::remove_dir_all(&whole).unwrap();
    }
    let empty = create(&lab.path("empty.hdd"), &CreateOptions::new(Format::Parallels, 0));
    assert!(matches!(empty, Err(Error::InvalidOption { .. })), "{empty:?}");
    // A failed creation leaves nothing behind.
    let fixed = CreateOptions {
        blocks: BlockOptions {
            kind: ImageKind::Fixed,
            ..BlockOptions::default()
        },
        ..CreateOptions::new(Format::Parallels, size)
    };
    for options in [fixed, CreateOptions::new(Format::Parallels, 1 << 62)] {
        let refused = create(&lab.path("refused.hdd"), &options);
        assert!(matches!(refused, Err(Error::InvalidOption { .. })), "{refused:?}");
    }
    assert!(!lab.path("empty.hdd").exists() && !lab.path("refused.hdd").exists());
    // Without the extension it is a single delta, as before.
    create(&lab.path("one.hds"), &CreateOptions::new(Format::Parallels, size)).unwrap();
    assert!(lab.path("one.hds").is_file());
}

#[test]
fn moved_disk_finds_its_deltas_by_name() {
    let lab = Lab::new();
    fs::create_dir(lab.path("elsewhere")).unwrap();
    let moved = lab.path("elsewhere/root.hds");
    for absolute in ["/Users/me/Parallels/web1.pvm/web1.hdd/root.hds", path_text(&moved)] {
        let path = folder(&lab, MIB, None, &[(TOP, ImageId::NIL, "Compressed", absolute)]);
        let missing = open(&path, &OpenOptions::default()).err();
        assert!(matches!(missing, Some(Error::Refused { .. })), "{missing:?}");
        create(&path.join("root.hds"), &CreateOptions::new(Format::Parallels, MIB)).unwrap();
        let image = open(&path, &OpenOptions::default()).unwrap();
        assert!(image.layers()[0].path.ends_with("web1.hdd/root.hds"));
        // A file of that name that belongs to another delta is not used.
        let rows = [
            (id(1), ImageId::NIL, "Compressed", absolute),
            (TOP, id(1), "Compressed", "top.hds"),
            (id(3), id(1), "Compressed", "./root.hds"),
        ];
        let path = folder(&lab, MIB, None, &rows);
        drop(create(
            &path.join("top.hds"),
            &CreateOptions::new(Format::Parallels, MIB),
        ));
        let refused = open(&path, &OpenOptions::default()).err();
        assert!(matches!(refused, Some(Error::Refused { .. })), "{refused:?}");
        fs::remove_file(path.join("root.hds")).unwrap();
    }
}

#[test]
fn disk_size_is_that_of_the_top() {
    let lab = Lab::new();
    for text in [MIB, 3 * MIB] {
        let path = folder(&lab, text, None, &[(TOP, ImageId::NIL, "Compressed", "root.hds")]);
        drop(create(
            &path.join("root.hds"),
            &CreateOptions::new(Format::Parallels, 2 * MIB),
        ));
        let image = open(&path, &OpenOptions::default()).unwrap();
        assert_eq!(image.size_bytes(), 2 * MIB);
        let note = Note::DiskSizeDiffers {
            image: path.join("DiskDescriptor.xml"),
            descriptor_bytes: text,
            size_bytes: 2 * MIB,
        };
        assert_eq!(image.notes(), [note]);
    }
}

#[test]
fn copy_with_new_identity_reads_the_same() {
    let lab = Lab::new();
    let path = grown(&lab);
    let before = contents(&open(&path, &OpenOptions::default()).unwrap());
    let branch = contents(
        &*open(&path, &OpenOptions::default())
            .unwrap()
            .snapshot(&id(3).to_string())
            .unwrap(),
    );
    let place = path.join("DiskDescriptor.xml");
    fs::set_permissions(&place, fs::Permissions::from_mode(0o640)).unwrap();
    // A leftover of a killed process, and a link to the descriptor.
    fs::File::create(path.join("DiskDescriptor.xml.tmp")).unwrap();
    std::os::unix::fs::symlink(&place, lab.path("link")).unwrap();
    let mut next = 100;
    let renewed = DiskDescriptor::load(&path).unwrap().renewed(|| {
        next += 1;
        Ok(id(next))
    });
    renewed.unwrap().store(&lab.path("link")).unwrap();
    assert!(lab.path("link").is_symlink() && !path.join("DiskDescriptor.xml.tmp").exists());
    assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o640);
    // If it cannot be written, the old one stays, and nothing else.
    fs::create_dir(path.join("DiskDescriptor.xml.tmp")).unwrap();
    let stored = fs::read(&place).unwrap();
    let failed = DiskDescriptor::load(&path).unwrap().store(&path);
    assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
    assert_eq!(fs::read(&place).unwrap(), stored);
    let image = open(&path, &OpenOptions::default()).unwrap();
    assert!(contents(&image) == before);
    assert!(contents(&*image.snapshot(&id(103).to_string()).unwrap()) == branch);
    assert!(image.snapshot(&id(3).to_string()).is_err());
    let ids = image.layers().iter().map(|layer| layer.blocks.as_ref().unwrap().id);
    assert_eq!(ids.collect::<Vec<_>>(), [Some(TOP), Some(id(102)), Some(id(101))]);
}

/// The descriptor may refer to another file as the top, with the same size and the same place in the chain: its bytes
/// are not those of the earlier file.
#[test]
fn switched_top_counts_as_changed() {
    let lab = Lab::new();
    let path = grown(&lab);
    for name in ["one.hds", "two.hds"] {
        made_by_qemu(
            &path.join(name),
            "1M",
            7 * MIB,
            &[&format!("write -P {} 0 1M", name.len() + 1)],
        );
    }
    qemu_io_as("parallels", &path.join("two.hds"), &["write -P 77 0 1M"]);
    let state = |top: &'static str| {
        let rows = [
            (id(1), ImageId::NIL, "Compressed", "root.hds"),
            (TOP, id(1), "Compressed", top),
        ];
        folder(&lab, 7 * MIB, None, &rows);
        open(&path, &OpenOptions::default()).unwrap()
    };
    let clean = |image: &holdfast_image::Image| -> Vec<DirtyBitmap> {
        let lengths = image.layers().iter().map(|layer| layer.file_bytes);
        lengths.map(|length| DirtyBitmap::new(length, 512).unwrap()).collect()
    };
    let (before, same, after) = (state("one.hds"), state("one.hds"), state("two.hds"));
    let changed = |after: &holdfast_image::Image| changed_on_disk(&before, after, &clean(after), 65_536).unwrap();
    assert!(changed(&same).is_clean());
    assert_eq!(changed(&after).dirty_bytes(), 7 * MIB);
}

/// A device and a snapshot can be read after their image was dropped.
#[test]
fn devices_outlive_their_image() {
    let lab = Lab::new();
    let path = grown(&lab);
    let image = open(&path, &OpenOptions::default()).unwrap();
    let devices: Vec<Arc<dyn BlockDevice>> = vec![image.device(), image.snapshot(&id(3).to_string()).unwrap()];
    let before: Vec<_> = devices.iter().map(|device| contents(&**device)).collect();
    drop(image);
    fs::remove_dir_all(&path).unwrap();
    for (device, before) in devices.iter().zip(before) {
        assert!(contents(&**device) == before);
    }
    assert!(check(&path, &OpenOptions::default()).is_err());
}
