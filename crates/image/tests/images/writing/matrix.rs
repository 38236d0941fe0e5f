//! Variants of qcow2 that need different code in the writer.

use holdfast_image::{Compression, Preallocation, Qcow2Options};

use super::MIB;

/// Variants of options.
pub(crate) fn matrix() -> Vec<(&'static str, Qcow2Options)> {
    let base = Qcow2Options::default();
    vec![
        ("plain", base.clone()),
        (
            "version 2",
            Qcow2Options {
                version: 2,
                ..base.clone()
            },
        ),
        (
            "512",
            Qcow2Options {
                cluster_bytes: 512,
                ..base.clone()
            },
        ),
        (
            "512, 1 bit",
            Qcow2Options {
                cluster_bytes: 512,
                refcount_bits: 1,
                ..base.clone()
            },
        ),
        (
            "512, 64 bit",
            Qcow2Options {
                cluster_bytes: 512,
                refcount_bits: 64,
                ..base.clone()
            },
        ),
        (
            "4k, zstd",
            Qcow2Options {
                cluster_bytes: 4096,
                compression: Compression::Zstd,
                ..base.clone()
            },
        ),
        (
            "2M",
            Qcow2Options {
                cluster_bytes: 2 * MIB,
                ..base.clone()
            },
        ),
        (
            "extended",
            Qcow2Options {
                extended_l2: true,
                ..base.clone()
            },
        ),
        (
            "extended, 16k",
            Qcow2Options {
                extended_l2: true,
                cluster_bytes: 16_384,
                refcount_bits: 32,
                ..base.clone()
            },
        ),
        (
            "lazy",
            Qcow2Options {
                lazy_refcounts: true,
                ..base.clone()
            },
        ),
        (
            "preallocated",
            Qcow2Options {
                preallocation: Preallocation::Metadata,
                ..base.clone()
            },
        ),
        (
            "preallocated, extended",
            Qcow2Options {
                preallocation: Preallocation::Metadata,
                extended_l2: true,
                ..base
            },
        ),
    ]
}
