//! A plan reports what the operation itself would report, and changes nothing.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use holdfast_block::BlockDeviceMut as _;
use holdfast_image::{
    CreateOptions, Error, Format, ImageId, LostData, NewIdentity, OpenOptions, Shrink, UnnamedChildren, create, open,
    open_mut, plan_create, plan_identity, plan_resize, resize, set_identity,
};

const MIB: u64 = 1 << 20;
const FORMATS: [(Format, &str); 7] = [
    (Format::Raw, "raw"),
    (Format::Qcow2, "qcow2"),
    (Format::Vdi, "vdi"),
    (Format::Vhd, "vhd"),
    (Format::Vhdx, "vhdx"),
    (Format::Vmdk, "vmdk"),
    (Format::Parallels, "parallels"),
];

fn content(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// Gives a file its former content again.
fn put(path: &Path, bytes: &[u8]) {
    File::create(path).unwrap().write_all(bytes).unwrap();
}

fn words<T: std::fmt::Debug>(result: Result<T, Error>) -> Result<String, String> {
    result
        .map(|value| format!("{value:?}"))
        .map_err(|error| error.to_string())
}

#[test]
fn a_planned_image_is_checked_and_not_created() {
    for (format, extension) in FORMATS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("disk.{extension}"));
        for size_bytes in [0, 512, 5 * MIB, 1 << 52] {
            let options = CreateOptions::new(format, size_bytes);
            let planned = words(plan_create(&path, &options));
            assert!(content(folder.path()).is_empty(), "{format}");
            if size_bytes < 1 << 52 || planned.is_err() {
                assert_eq!(planned, words(create(&path, &options)), "{format} of {size_bytes}");
                std::fs::remove_file(&path).ok();
            }
        }
    }
}

#[test]
fn a_planned_resize_reports_data_that_would_be_lost() {
    let options = OpenOptions::default();
    for (format, extension) in FORMATS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("disk.{extension}"));
        create(&path, &CreateOptions::new(format, 8 * MIB)).unwrap();
        let image = open_mut(&path, &options).unwrap();
        image.write_at(&[1; 4096], 0).unwrap();
        image.write_at(&[2; 4096], 6 * MIB).unwrap();
        image.flush().unwrap();
        drop(image);
        let before = content(folder.path());
        for (size_bytes, shrink) in [
            (4 * MIB, Shrink::Refuse),
            (4 * MIB, Shrink::Allow),
            (8 * MIB, Shrink::Refuse),
            (9 * MIB, Shrink::Refuse),
            (0, Shrink::Allow),
            (4 * MIB + 1, Shrink::Allow),
        ] {
            let plan = plan_resize(&path, &options, size_bytes, shrink);
            assert!(content(folder.path()) == before, "{format} to {size_bytes}");
            if let Ok(plan) = &plan {
                let lost = plan.lost.map(|lost| lost.first_offset);
                let expected = (size_bytes < 6 * MIB).then_some(6 * MIB);
                assert!(
                    lost <= expected && lost.is_some() == expected.is_some(),
                    "{format}: {plan:?}"
                );
                assert!(plan.lost.is_none_or(|lost: LostData| lost.data_bytes >= 4096));
            }
            let done = resize(&path, &options, size_bytes, shrink);
            assert_eq!(
                words(plan.map(|plan| plan.report)),
                words(done),
                "{format} to {size_bytes}"
            );
            for (name, bytes) in &before {
                put(&folder.path().join(name), bytes);
            }
        }
    }
}

#[test]
fn a_planned_identity_is_checked_and_not_written() {
    let options = OpenOptions::default();
    for (format, extension) in FORMATS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("disk.{extension}"));
        create(&path, &CreateOptions::new(format, 8 * MIB)).unwrap();
        if matches!(format, Format::Vdi | Format::Vhd | Format::Vhdx | Format::Vmdk) {
            let mut child = CreateOptions::new(format, 8 * MIB);
            child.blocks.parent = Some(path.clone());
            child.blocks.kind = holdfast_image::ImageKind::Differencing;
            create(&folder.path().join(format!("child.{extension}")), &child).unwrap();
        }
        let before = content(folder.path());
        for (id, unnamed_children) in [
            (ImageId::NIL, UnnamedChildren::Change),
            (ImageId::random().unwrap(), UnnamedChildren::Refuse),
            (ImageId::random().unwrap(), UnnamedChildren::Change),
        ] {
            let new = NewIdentity {
                id,
                children: Vec::new(),
                unnamed_children,
                name: None,
            };
            let planned = plan_identity(&path, &options, &new);
            assert!(content(folder.path()) == before, "{format}");
            assert_eq!(words(planned), words(set_identity(&path, &options, &new)), "{format}");
            for (name, bytes) in &before {
                put(&folder.path().join(name), bytes);
            }
        }
        open(&path, &options).unwrap();
    }
}
