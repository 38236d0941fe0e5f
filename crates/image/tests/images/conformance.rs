//! Every image kind passes the conformance suite of `holdfast-block`.

use std::cell::Cell;

use holdfast_block::conformance::Conformance;
use holdfast_image::{BackingFile, CreateOptions, Format, ImageMut, OpenOptions, Qcow2Options, create, open_mut};

/// Runs the suite on images with `options`, each with an empty backing file if it needs one.
fn conform(options: &CreateOptions) {
    let directory = tempfile::tempdir().unwrap();
    let count = Cell::new(0u32);
    create(&directory.path().join("base"), &CreateOptions::raw(100_000)).unwrap();
    let make = |size_bytes: u64| -> ImageMut {
        count.set(count.get() + 1);
        let path = directory.path().join(format!("image-{}", count.get()));
        create(
            &path,
            &CreateOptions {
                size_bytes,
                ..options.clone()
            },
        )
        .unwrap();
        let format = Some(options.format);
        open_mut(
            &path,
            &OpenOptions {
                format,
                ..OpenOptions::default()
            },
        )
        .unwrap()
    };
    Conformance::new().with_operation_count(60).check_mutable(make);
}

#[test]
fn raw() {
    conform(&CreateOptions::raw(0));
}

#[test]
fn qcow2() {
    conform(&CreateOptions::qcow2(0));
}

#[test]
fn qcow2_with_small_clusters() {
    let qcow2 = Qcow2Options {
        cluster_bytes: 512,
        refcount_bits: 64,
        ..Qcow2Options::default()
    };
    conform(&CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(0)
    });
}

#[test]
fn qcow2_with_subclusters_over_a_backing_file() {
    let backing = Some(BackingFile {
        name: "base".to_owned(),
        format: Format::Raw,
    });
    let qcow2 = Qcow2Options {
        cluster_bytes: 16_384,
        extended_l2: true,
        backing,
        ..Qcow2Options::default()
    };
    conform(&CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(0)
    });
}

#[test]
fn qcow2_version_2_over_a_backing_file() {
    let backing = Some(BackingFile {
        name: "base".to_owned(),
        format: Format::Raw,
    });
    let qcow2 = Qcow2Options {
        version: 2,
        cluster_bytes: 4096,
        backing,
        ..Qcow2Options::default()
    };
    conform(&CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(0)
    });
}

#[test]
fn vdi() {
    conform(&CreateOptions::new(Format::Vdi, 0));
}
