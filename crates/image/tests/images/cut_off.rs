//! Truncated images are not changed: a write past the end would replace missing data with zeroes.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDeviceMut as _, SeededRandom};
use holdfast_image::{
    BlockOptions, CreateOptions, Error, Format, ImageId, ImageKind, NewIdentity, OpenOptions, Shrink, UnnamedChildren,
    create, open_mut, resize, set_identity,
};

const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 8 * MIB;

/// An image whose disk is filled with random bytes.
fn image(folder: &Path, format: Format, kind: ImageKind) -> PathBuf {
    let extension = if format == Format::Parallels {
        "hds"
    } else {
        format.name()
    };
    let path = folder.join(format!("disk.{extension}"));
    let options = CreateOptions {
        blocks: BlockOptions {
            kind,
            ..BlockOptions::default()
        },
        ..CreateOptions::new(format, SIZE_BYTES)
    };
    create(&path, &options).unwrap();
    let image = open_mut(&path, &OpenOptions::default()).unwrap();
    image.write_at(&SeededRandom::new(3).bytes(8 << 20), 0).unwrap();
    image.flush().unwrap();
    path
}

fn overwrite(path: &Path, bytes: &[u8]) {
    let file = File::options().write(true).truncate(true).open(path).unwrap();
    file.write_all_at(bytes, 0).unwrap();
}

fn is_refused<T>(result: Result<T, Error>, what: &str) {
    let error = result.map(|_| ()).unwrap_err();
    assert!(error.is_corrupt(), "{what}: {error}");
}

#[test]
fn truncated_images_are_not_written_or_resized() {
    for (format, kind) in [
        (Format::Qcow2, ImageKind::Dynamic),
        (Format::Vdi, ImageKind::Dynamic),
        (Format::Vdi, ImageKind::Fixed),
        (Format::Vhd, ImageKind::Dynamic),
        (Format::Vhdx, ImageKind::Dynamic),
        (Format::Vhdx, ImageKind::Fixed),
        (Format::Vmdk, ImageKind::Dynamic),
        (Format::Parallels, ImageKind::Dynamic),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = image(folder.path(), format, kind);
        let whole = std::fs::read(&path).unwrap();
        for cut in [700, 100_000, 3 * MIB] {
            let what = format!("{format} {kind:?} without {cut} bytes");
            let file = File::options().write(true).open(&path).unwrap();
            file.set_len(whole.len() as u64 - cut).unwrap();
            let before = std::fs::read(&path).unwrap();
            let options = OpenOptions::default();
            let opened = open_mut(&path, &options);
            // A qcow2 is refused with its first write.
            is_refused(opened.and_then(|image| Ok(image.write_at(&[7; 512], 0)?)), &what);
            is_refused(resize(&path, &options, 2 * SIZE_BYTES, Shrink::Refuse), &what);
            let new = NewIdentity {
                id: ImageId::random().unwrap(),
                children: Vec::new(),
                unnamed_children: UnnamedChildren::Refuse,
                name: None,
            };
            if set_identity(&path, &options, &new).is_ok() {
                assert_eq!(format, Format::Qcow2, "{what}");
            }
            assert!(std::fs::read(&path).unwrap() == before, "{what}: the image was changed");
            overwrite(&path, &whole);
            let image = open_mut(&path, &options).unwrap();
            image.write_at(&[7; 512], 0).unwrap();
            image.flush().unwrap();
            drop(image);
            overwrite(&path, &whole);
        }
    }
}
