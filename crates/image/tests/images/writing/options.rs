//! Tests refused options and odd sizes.

use holdfast_block::{BlockDeviceMut as _, to_usize};
use holdfast_image::{
    BackingFile, CreateOptions, DataFile, DataFileKind, Error, Format, OpenOptions, Preallocation, Qcow2Options,
    create, open_mut,
};

use super::MIB;
use crate::peer::{Lab, assert_clean, assert_reads_as, qemu_check};

#[test]
fn inconsistent_options_are_refused() {
    let lab = Lab::new();
    let base = Qcow2Options::default();
    let raw = Some(DataFile {
        name: "data".to_owned(),
        kind: DataFileKind::Raw,
        made_at: None,
    });
    let backing = Some(BackingFile {
        name: "gone".to_owned(),
        format: Format::Raw,
    });
    for options in [
        Qcow2Options {
            cluster_bytes: 1000,
            ..base.clone()
        },
        Qcow2Options {
            cluster_bytes: 4 * MIB,
            ..base.clone()
        },
        Qcow2Options {
            version: 2,
            extended_l2: true,
            ..base.clone()
        },
        Qcow2Options {
            version: 4,
            ..base.clone()
        },
        Qcow2Options {
            cluster_bytes: 4096,
            extended_l2: true,
            ..base.clone()
        },
        Qcow2Options {
            refcount_bits: 3,
            ..base.clone()
        },
        Qcow2Options {
            refcount_bits: 0,
            ..base.clone()
        },
        Qcow2Options {
            data_file: raw,
            backing: backing.clone(),
            ..base.clone()
        },
        Qcow2Options {
            backing,
            preallocation: Preallocation::Metadata,
            ..base
        },
    ] {
        let result = create(
            &lab.path("x"),
            &CreateOptions {
                qcow2: options,
                ..CreateOptions::qcow2(MIB)
            },
        );
        assert!(matches!(result, Err(Error::InvalidOption { .. })), "{result:?}");
        assert!(!lab.path("x").exists());
    }
    let large = Qcow2Options {
        cluster_bytes: 512,
        ..Qcow2Options::default()
    };
    let result = create(
        &lab.path("x"),
        &CreateOptions {
            qcow2: large,
            ..CreateOptions::qcow2(MIB * MIB)
        },
    );
    assert!(matches!(result, Err(Error::InvalidOption { option: "size", .. })));
    create(&lab.path("x"), &CreateOptions::qcow2(MIB)).unwrap();
    assert!(
        matches!(create(&lab.path("x"), &CreateOptions::raw(MIB)), Err(Error::Io { .. })),
        "an existing file is not replaced"
    );
}

#[test]
fn odd_sizes_work() {
    let lab = Lab::new();
    for size_bytes in [0, 1, 511, 65_535, 65_537] {
        let image = lab.path(&format!("{size_bytes}.qcow2"));
        create(&image, &CreateOptions::qcow2(size_bytes)).unwrap();
        assert_clean(&image);
        assert_eq!(qemu_check(&image), (0, 0));
        let device = open_mut(&image, &OpenOptions::default()).unwrap();
        let disk = vec![7; to_usize(size_bytes)];
        device.write_at(&disk, 0).unwrap();
        device.flush().unwrap();
        assert!(device.write_at(&[1], size_bytes).is_err());
        if size_bytes > 0 {
            assert_reads_as(&device, &disk, "odd");
        }
        drop(device);
        assert_clean(&image);
        assert_eq!(qemu_check(&image), (0, 0));
    }
}
