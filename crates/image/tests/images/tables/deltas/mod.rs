//! Parallels and ploop disks: chains of deltas with a descriptor.
//!
//! No peer reads the descriptor. Therefore each delta is made by QEMU or by us, a simple model that only reads the
//! table of a delta merges their clusters, and the result is compared with what is read through the descriptor.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, DirtyBitmap};
use holdfast_image::{
    Backing, BlockOptions, CreateOptions, DiskDescriptor, Error, Format, FormatSource, Gate, ImageId, ImageKind,
    MapContent, Note, OpenOptions, changed_on_disk, check, create, detect, open, open_mut,
};

use crate::peer::{
    Lab, Random, assert_clean, assert_reads_as, flatten, overwrite, path_text, qemu_img, qemu_io_as, work,
};

const MIB: u64 = 1 << 20;
const TOP: ImageId = DiskDescriptor::TOP;

/// A row of the descriptor: GUID, GUID of the parent, type, file.
type Row<'a> = (ImageId, ImageId, &'a str, &'a str);

fn id(number: u8) -> ImageId {
    ImageId([number; 16])
}

fn descriptor(size_bytes: u64, top: Option<ImageId>, rows: &[Row<'_>]) -> String {
    let (mut images, mut shots) = (String::new(), String::new());
    for (guid, parent, kind, file) in rows {
        let file = format!("<File>{file}</File>");
        writeln!(
            images,
            "<Image><GUID>{{{guid}}}</GUID><Type>{kind}</Type>{file}</Image>"
        )
        .unwrap();
        writeln!(
            shots,
            "<Shot><GUID>{{{guid}}}</GUID><ParentGUID>{{{parent}}}</ParentGUID></Shot>"
        )
        .unwrap();
    }
    let top = top.map_or(String::new(), |top| format!("<TopGUID>{{{top}}}</TopGUID>\n"));
    let sectors = size_bytes / 512;
    format!(
        "<?xml version='1.0' encoding='UTF-8'?>\n<Parallels_disk_image Version=\"1.0\">\n<Disk_Parameters>\n\
         <Disk_size>{sectors}</Disk_size><Cylinders>{sectors}</Cylinders><Heads>1</Heads><Sectors>1</Sectors>\n\
         <Padding>0</Padding>\n</Disk_Parameters>\n<StorageData>\n<Storage>\n<Start>0</Start>\n<End>{sectors}</End>\n\
         <Blocksize>2048</Blocksize>\n{images}</Storage>\n</StorageData>\n<Snapshots>\n{top}{shots}</Snapshots>\n\
         </Parallels_disk_image>\n"
    )
}

/// Creates the folder of a disk with its descriptor.
fn folder(lab: &Lab, size_bytes: u64, top: Option<ImageId>, rows: &[Row<'_>]) -> PathBuf {
    let path = lab.path("web1.hdd");
    fs::create_dir_all(&path).unwrap();
    let text = descriptor(size_bytes, top, rows);
    let place = path.join("DiskDescriptor.xml");
    fs::File::create(&place).unwrap();
    overwrite(&place, text.as_bytes());
    path
}

/// The model of one expanding delta: copies the clusters in its table over `disk`, which gets the size of the delta.
fn overlay(disk: &mut Vec<u8>, delta: &Path) {
    let bytes = fs::read(delta).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let (cluster, size) = (u32_at(28) * 512, u32_at(36) * 512);
    let entry = match &bytes[..16] {
        b"WithoutFreeSpace" => 512,
        b"WithouFreSpacExt" => cluster,
        other => panic!("the magic number {other:?}"),
    };
    disk.resize(size, 0);
    for (index, piece) in disk.chunks_mut(cluster).enumerate() {
        let host = u32_at(64 + index * 4) * entry;
        if host != 0 {
            // Bytes past the end of the file are zero.
            let held = &bytes[host..bytes.len().min(host + piece.len())];
            piece[..held.len()].copy_from_slice(held);
            piece[held.len()..].fill(0);
        }
    }
}

fn contents(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0xee; usize::try_from(device.size_bytes()).unwrap()];
    device.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn made_by_qemu(path: &Path, cluster: &str, size_bytes: u64, commands: &[&str]) {
    let (options, size) = (format!("cluster_size={cluster}"), size_bytes.to_string());
    qemu_img(&["create", "-f", "parallels", "-o", &options, path_text(path), &size]);
    qemu_io_as("parallels", path, commands);
}

/// Four deltas with three cluster sizes, of a disk that grew with each, and a branch.
///
/// ```text
/// root (QEMU) ── middle (QEMU) ── top (ours)
///                     └── branch (QEMU)
/// ```
fn grown(lab: &Lab) -> PathBuf {
    let rows = [
        (id(1), ImageId::NIL, "Compressed", "root.hds"),
        (id(2), id(1), "Compressed", "middle.hds"),
        (id(3), id(2), "Compressed", "branch.hds"),
        (TOP, id(2), "Compressed", "top.hds"),
    ];
    let path = folder(lab, 9 * MIB, None, &rows);
    let (raw, _) = lab.raw("disk.raw", 5 * MIB + 512, 3);
    let words = ["convert", "-f", "raw", "-O", "parallels", "-o", "cluster_size=256k"];
    qemu_img(&[&words[..], &[path_text(&raw), path_text(&path.join("root.hds"))]].concat());
    // Whole clusters of the middle hide those of the root, also where they are zero.
    let writes = [
        "write -P 7 1M 64k",
        "write -P 8 4M 100k",
        "write -z 3M 1M",
        "write -P 9 6M 1000",
    ];
    made_by_qemu(&path.join("middle.hds"), "64k", 7 * MIB, &writes);
    made_by_qemu(&path.join("branch.hds"), "1M", 7 * MIB, &["write -P 3 100k 2M"]);
    make_old(&path.join("branch.hds"));
    // Data in the last cluster of the root past the end of its disk is ignored.
    let root = fs::File::options()
        .read(true)
        .write(true)
        .open(path.join("root.hds"))
        .unwrap();
    let mut last = [0; 4];
    root.read_exact_at(&mut last, 64 + 20 * 4).unwrap();
    let host = u64::from(u32::from_le_bytes(last)) * (256 << 10);
    assert!(host > 0, "the root has its last cluster");
    root.write_all_at(&[0xee; 10_000], host + 512).unwrap();
    create(&path.join("top.hds"), &CreateOptions::new(Format::Parallels, 9 * MIB)).unwrap();
    path
}

/// Converts a delta to version 1, as Parallels and ploop before Virtuozzo 7 write it: entries are in sectors.
fn make_old(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let sectors = u32::from_le_bytes(bytes[28..32].try_into().unwrap());
    let entry_count = u32::from_le_bytes(bytes[32..36].try_into().unwrap()) as usize;
    bytes[..16].copy_from_slice(b"WithoutFreeSpace");
    for entry in bytes[64..64 + entry_count * 4].chunks_exact_mut(4) {
        let old = u32::from_le_bytes((&*entry).try_into().unwrap()) * sectors;
        entry.copy_from_slice(&old.to_le_bytes());
    }
    overwrite(path, &bytes);
}

fn files(folder: &Path, names: &[&str]) -> Vec<Vec<u8>> {
    names.iter().map(|name| fs::read(folder.join(name)).unwrap()).collect()
}

#[test]
fn check_includes_lower_deltas() {
    let lab = Lab::new();
    let path = grown(&lab);
    let check = || holdfast_image::check(&path, &OpenOptions::default()).unwrap();
    assert_eq!(check().corruption_count, 0);
    let middle = path.join("middle.hds");
    let length = fs::metadata(&middle).unwrap().len();
    fs::File::options()
        .write(true)
        .open(&middle)
        .unwrap()
        .set_len(length / 2)
        .unwrap();
    let report = check();
    assert!(report.corruption_count > 0);
    assert!(report.problems[0].kind.to_string().starts_with("middle.hds: "));
}

#[test]
fn plain_disk_has_no_metadata_to_check() {
    let lab = Lab::new();
    let path = folder(&lab, 2 * MIB, Some(TOP), &[(TOP, ImageId::NIL, "Plain", "root.hds")]);
    lab.raw("web1.hdd/root.hds", 2 * MIB, 5);
    let refused = holdfast_image::check(&path, &OpenOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("no metadata"), "{refused}");
}

#[test]
fn chain_reads_merged_deltas() {
    let lab = Lab::new();
    let path = grown(&lab);
    let (mut root, below) = (Vec::new(), files(&path, &["root.hds", "middle.hds", "branch.hds"]));
    overlay(&mut root, &path.join("root.hds"));
    assert_eq!(
        root,
        fs::read(lab.path("disk.raw")).unwrap(),
        "the model knows what a delta is"
    );
    let mut middle = root.clone();
    overlay(&mut middle, &path.join("middle.hds"));
    let mut branch = middle.clone();
    overlay(&mut branch, &path.join("branch.hds"));
    let mut disk = middle.clone();
    overlay(&mut disk, &path.join("top.hds"));

    let read = |disk: &[u8]| {
        let mut model = middle.clone();
        overlay(&mut model, &path.join("top.hds"));
        assert!(model == disk, "the model of the top says something else");
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
        "only the top is written to"
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
    let late = options.clone().to_be_at(Path::new("web1.hdd"));
    for (name, options) in [("web1.hdd", &options), (".web1.hdd.0123abcd.partial", &late)] {
        let path = lab.path(name);
        create(&path, options).unwrap();
        let mut disk = vec![0; usize::try_from(size).unwrap()];
        work(&path, &mut disk, &mut Random(7), 60);
        let peer = flatten(&path.join("root.hds"), &lab);
        assert!(peer[..disk.len()] == disk, "{name}: the peer reads something else");
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

#[test]
fn disk_size_is_that_of_the_top() {
    let lab = Lab::new();
    for said in [MIB, 3 * MIB] {
        let path = folder(&lab, said, None, &[(TOP, ImageId::NIL, "Compressed", "root.hds")]);
        drop(create(
            &path.join("root.hds"),
            &CreateOptions::new(Format::Parallels, 2 * MIB),
        ));
        let image = open(&path, &OpenOptions::default()).unwrap();
        assert_eq!(image.size_bytes(), 2 * MIB);
        let note = Note::DiskSizeDiffers {
            image: path.join("DiskDescriptor.xml"),
            descriptor_bytes: said,
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

/// Deltas do not refer to each other: any two can be in a chain, with any sizes, and any of them can be damaged.
#[test]
fn damaged_delta_limits_the_readable_chain() {
    let lab = Lab::new();
    let rows = [
        (id(1), ImageId::NIL, "Compressed", "root.hds"),
        (id(2), id(1), "Compressed", "middle.hds"),
        (TOP, id(2), "Compressed", "top.hds"),
    ];
    let path = folder(&lab, 65_536, None, &rows);
    for (name, cluster, command) in [
        ("root.hds", "4096", "write -P 1 0 60k"),
        ("middle.hds", "8192", "write -P 2 9k 20k"),
        ("top.hds", "4096", "write -P 3 30k 9k"),
    ] {
        made_by_qemu(&path.join(name), cluster, 65_536, &[command]);
    }
    let sound = files(&path, &["root.hds", "middle.hds", "top.hds"]);
    let seed = holdfast_block::conformance::test_seed();
    let mut random = Random(seed);
    let (mut opened_count, mut refused_count) = (0, 0);
    for round in 0..600 {
        let which = usize::try_from(random.below(3)).unwrap();
        let mut bytes = sound[which].clone();
        match random.below(8) {
            0 => bytes.truncate(usize::try_from(random.below(bytes.len() as u64)).unwrap()),
            // Fields after the magic number and the version, and the table.
            1..=5 => {
                let at = 28 + usize::try_from(random.below(40)).unwrap();
                bytes[at] = [0, 1, 0x7f, 0x80, 0xff][usize::try_from(random.below(5)).unwrap()];
            }
            _ => {
                let at = usize::try_from(random.below(128)).unwrap();
                bytes[at] ^= 1 << random.below(8);
            }
        }
        overwrite(&path.join(rows[which].3), &bytes);
        match open(&path, &OpenOptions::default()) {
            Ok(image) => {
                opened_count += 1;
                let size = image.size_bytes();
                let (mut at, mut entry_count) = (0, 0);
                while at < size && entry_count < 100 {
                    let Ok(entry) = image.map_at(at, u64::MAX) else { break };
                    assert!(
                        entry.length > 0 && at + entry.length <= size,
                        "seed {seed}, round {round}"
                    );
                    at += entry.length;
                    entry_count += 1;
                }
                let mut buffer = vec![0; usize::try_from(size.min(65_536)).unwrap()];
                drop(image.read_at(&mut buffer, 0));
                let last = size - buffer.len() as u64;
                drop(image.read_at(&mut buffer, last));
                drop(image.extents(0..size, 100));
                drop(image.snapshot(&id(1).to_string()).unwrap().extents(0..512, 10));
            }
            Err(error) => {
                refused_count += 1;
                assert!(!error.to_string().is_empty());
            }
        }
        overwrite(&path.join(rows[which].3), &sound[which]);
    }
    assert!(
        opened_count > 0 && refused_count > 0,
        "seed {seed}: {opened_count}, {refused_count}"
    );
    let image = open(&path, &OpenOptions::default()).unwrap();
    let mut disk = Vec::new();
    for (_, _, _, name) in rows {
        overlay(&mut disk, &path.join(name));
    }
    assert_reads_as(&image, &disk, "the sound chain");
}
