//! Helpers for the tests of writing.

use std::path::Path;

use holdfast_image::{
    BackingFile, BulkWriter, CreateOptions, Format, OpenOptions, Qcow2Options, create, create_bulk, open,
};

use crate::peer::{Lab, assert_clean, assert_reads_as, flatten, qemu_check};

/// Creates an image.
pub(crate) fn create_with(image: &Path, qcow2: Qcow2Options, size_bytes: u64) {
    let options = CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(size_bytes)
    };
    create(image, &options).unwrap();
}

/// Creates an image for writing it in bulk.
pub(crate) fn create_bulk_with(image: &Path, qcow2: Qcow2Options, size_bytes: u64) -> BulkWriter {
    let options = CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(size_bytes)
    };
    create_bulk(image, &options).unwrap()
}

/// Options of an image with the raw backing file `base.raw` in its folder.
pub(crate) fn over_base() -> Qcow2Options {
    Qcow2Options {
        backing: Some(BackingFile {
            name: "base.raw".to_owned(),
            format: Format::Raw,
        }),
        ..Qcow2Options::default()
    }
}

/// Asserts that both checks find no problem, and both sides read `disk`.
pub(crate) fn assert_is(image: &Path, disk: &[u8], lab: &Lab, what: &str) {
    assert_clean(image);
    assert_eq!(qemu_check(image), (0, 0), "{what}");
    assert!(flatten(image, lab) == disk, "{what}: the peer reads other data");
    assert_reads_as(&open(image, &OpenOptions::default()).unwrap(), disk, what);
}
