//! Reads images that QEMU wrote.

use std::fs;

use holdfast_block::{BlockDevice as _, ExtentKind};
use holdfast_image::{
    Backing, BitmapState, Error, Feature, Format, Gate, MapContent, Note, OpenOptions, check, detect, open,
};

use crate::peer::{Lab, assert_clean, assert_reads_as, flatten, overwrite, path_text, qemu_img, qemu_io};

#[test]
fn every_image_kind_reads_as_its_source() {
    let lab = Lab::new();
    let (raw, disk) = lab.raw("source.raw", 5 * 1024 * 1024 + 512 * 3, 11);
    let mut options = Vec::new();
    for cluster_size in [512, 1024, 4096, 16_384, 65_536, 262_144, 2_097_152] {
        options.push(format!("compat=0.10,cluster_size={cluster_size}"));
        options.push(format!("compat=1.1,cluster_size={cluster_size}"));
        options.push(format!("compat=1.1,cluster_size={cluster_size},compression_type=zstd"));
        if cluster_size >= 16_384 {
            options.push(format!("compat=1.1,cluster_size={cluster_size},extended_l2=on"));
        }
    }
    for refcount_bits in [1, 2, 4, 8, 32, 64] {
        options.push(format!("compat=1.1,cluster_size=4096,refcount_bits={refcount_bits}"));
    }
    for option in &options {
        for compress in [None, Some("-c")] {
            let image = lab.path("image.qcow2");
            let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", option];
            // A host cluster with several compressed clusters needs more than one refcount bit.
            arguments.extend(compress.filter(|_| !option.ends_with("bits=1") && !option.ends_with("bits=2")));
            arguments.extend([path_text(&raw), path_text(&image)]);
            qemu_img(&arguments);
            let what = format!("{option} {compress:?}");
            assert_eq!(detect(&image).unwrap(), Format::Qcow2);
            assert_reads_as(&open(&image, &OpenOptions::default()).unwrap(), &disk, &what);
            assert_clean(&image);
        }
    }
}

#[test]
fn external_data_files_pass_the_gate() {
    let lab = Lab::new();
    for raw_option in ["", ",data_file_raw=on"] {
        let image = lab.path("image.qcow2");
        fs::remove_file(&image).ok();
        let option = format!("data_file={}{raw_option}", path_text(&lab.path("data")));
        lab.qemu_img(&format!("create -f qcow2 -o {option} image.qcow2 8M"));
        qemu_io(
            &image,
            &[
                "write -P 7 0 64k",
                "write -P 8 1M 100k",
                "write -z 0 4k",
                "discard 1M 64k",
            ],
        );
        let expected = flatten(&image, &lab);
        let opened = open(&image, &OpenOptions::default()).unwrap();
        assert_reads_as(&opened, &expected, raw_option);
        let info = opened.layers()[0].qcow2.as_ref().unwrap();
        assert!(info.has(Feature::ExternalDataFile));
        assert_eq!(info.has(Feature::RawDataFile), !raw_option.is_empty());
        assert_clean(&image);
        let deny = OpenOptions {
            gate: Gate::Deny,
            ..OpenOptions::default()
        };
        assert!(matches!(open(&image, &deny), Err(Error::Refused { .. })));
        let given = OpenOptions {
            data_file: Some(lab.path("data")),
            ..deny
        };
        assert_reads_as(&open(&image, &given).unwrap(), &expected, "given");
    }
}

#[test]
fn chain_and_single_layers_read() {
    let lab = Lab::new();
    let (base, _) = lab.raw("base.raw", 3 * 1024 * 1024, 5);
    let (middle, top) = (lab.path("middle.qcow2"), lab.path("top.qcow2"));
    // The overlay is larger than its base, and the top is smaller again.
    qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "base.raw",
        path_text(&middle),
        "6M",
    ]);
    let subclusters = "extended_l2=on,cluster_size=128k";
    qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        "middle.qcow2",
        "-o",
        subclusters,
        path_text(&top),
        "5M",
    ]);
    qemu_io(
        &middle,
        &["write -P 1 2M 2M", "write -z 128k 64k", "write -P 3 5900k 100k"],
    );
    qemu_io(
        &top,
        &[
            "write -P 9 2052k 4k",
            "write -z 1M 8k",
            "write -P 4 0 512",
            "discard 3M 128k",
        ],
    );
    let image = open(&top, &OpenOptions::default()).unwrap();
    assert_eq!(image.layers().len(), 3);
    assert_eq!(image.layers()[2].format, Format::Raw);
    assert_eq!(image.notes(), []);
    assert_reads_as(&image, &flatten(&top, &lab), "top");
    let below = open(&middle, &OpenOptions::default()).unwrap();
    assert_reads_as(&below, &flatten(&middle, &lab), "middle");
    assert!(base.exists());

    let alone = image.layer(0).unwrap();
    let list = alone.extents(0..alone.size_bytes(), 1000).unwrap();
    assert!(list.as_slice().iter().any(|extent| extent.kind == ExtentKind::Absent));
    let stored: u64 = list
        .into_iter()
        .filter(|extent| extent.kind == ExtentKind::Data)
        .map(|extent| extent.length)
        .sum();
    assert_eq!(stored, 2 * 4096, "two subclusters of 4 KiB");
    let ignored = open(
        &top,
        &OpenOptions {
            backing: Backing::Ignore,
            ..OpenOptions::default()
        },
    )
    .unwrap();
    let mut byte = [1];
    ignored.read_at(&mut byte, 2 * 1024 * 1024).unwrap();
    assert_eq!(byte, [0]);

    let entry = image.map_at(2052 << 10, u64::MAX).unwrap();
    assert_eq!((entry.depth, entry.length), (Some(0), 4096));
    assert!(matches!(entry.content, MapContent::Data { .. }));
    assert_eq!(image.map_at(2 << 20, u64::MAX).unwrap().depth, Some(1));
    assert_eq!(image.map_at(8 << 10, 512).unwrap().depth, Some(2));
}

#[test]
fn gate_refuses_hostile_names() {
    let lab = Lab::new();
    fs::create_dir(lab.path("vm")).unwrap();
    let (secret, _) = lab.raw("secret", 65_536, 1);
    let image = lab.path("vm/image.qcow2");
    std::os::unix::fs::symlink("../secret", lab.path("vm/link")).unwrap();
    for name in [
        "/etc/shadow",
        "../secret",
        "link",
        "json:{}",
        "nbd://localhost/x",
        path_text(&secret),
    ] {
        fs::remove_file(&image).ok();
        lab.qemu_img(&format!("create -u -f qcow2 -F raw -b {name} vm/image.qcow2 1M"));
        match open(&image, &OpenOptions::default()) {
            Err(error @ Error::Refused { .. }) => {
                let text = error.to_string();
                assert!(text.contains("image.qcow2") && text.contains(name), "{text}");
            }
            Err(error) => panic!("{name}: {error}"),
            Ok(_) => panic!("{name} was opened"),
        }
        check(&image, &OpenOptions::default()).unwrap();
    }
    let allowed = OpenOptions {
        allow: vec![secret],
        ..OpenOptions::default()
    };
    open(&image, &allowed).unwrap();
}

#[test]
fn guessed_backing_format_gives_a_note() {
    let lab = Lab::new();
    let (raw, disk) = lab.raw("base", 1024 * 1024, 9);
    let image = lab.path("image.qcow2");
    lab.qemu_img("create -f qcow2 -F raw -b base image.qcow2 1M");
    // QEMU requires the backing format; remove the extension, which old programs did not write.
    let mut bytes = fs::read(&image).unwrap();
    let at = bytes
        .windows(4)
        .position(|window| window == 0xe279_2aca_u32.to_be_bytes())
        .unwrap();
    bytes[at..at + 4].copy_from_slice(&0x7777_7777_u32.to_be_bytes());
    overwrite(&image, &bytes);
    let opened = open(&image, &OpenOptions::default()).unwrap();
    assert_reads_as(&opened, &disk, "raw by content");
    assert!(matches!(
        opened.notes(),
        [Note::BackingFormatGuessed {
            format: Format::Raw,
            ..
        }]
    ));
    // A guest that writes a VMDK header into its raw disk causes an error; its bytes are not interpreted differently.
    let mut base = fs::read(&raw).unwrap();
    base[..4].copy_from_slice(b"KDMV");
    overwrite(&raw, &base);
    assert!(open(&image, &OpenOptions::default()).is_err());
}

#[test]
fn loops_and_long_chains_are_refused() {
    let lab = Lab::new();
    let image = lab.path("a.qcow2");
    lab.qemu_img("create -u -f qcow2 -F qcow2 -b b.qcow2 a.qcow2 1M");
    lab.qemu_img("create -u -f qcow2 -F qcow2 -b a.qcow2 b.qcow2 1M");
    assert!(matches!(
        open(&image, &OpenOptions::default()),
        Err(Error::ChainLoop { .. })
    ));
    for number in 0..70 {
        let name = lab.path(&format!("{number}.qcow2"));
        let below = format!("{}.qcow2", number + 1);
        let option = "cluster_size=512";
        qemu_img(&[
            "create",
            "-q",
            "-u",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-b",
            &below,
            "-o",
            option,
            path_text(&name),
            "4k",
        ]);
    }
    let opened = open(&lab.path("0.qcow2"), &OpenOptions::default());
    assert!(matches!(opened, Err(Error::ChainTooLong { .. })));
    fs::remove_file(lab.path("69.qcow2")).unwrap();
    lab.qemu_img("create -q -f qcow2 69.qcow2 4k");
    let opened = open(&lab.path("6.qcow2"), &OpenOptions::default()).unwrap();
    assert_eq!(opened.layers().len(), 64);
    assert_reads_as(&opened, &[0; 4096], "64 layers");
}

#[test]
fn snapshots_keep_their_content() {
    let lab = Lab::new();
    for option in [
        "cluster_size=64k",
        "cluster_size=512,compat=0.10",
        "extended_l2=on,cluster_size=16k",
    ] {
        let image = lab.path("image.qcow2");
        lab.qemu_img(&format!("create -f qcow2 -o {option} image.qcow2 3M"));
        qemu_io(&image, &["write -P 1 0 1M"]);
        lab.qemu_img("snapshot -c first image.qcow2");
        qemu_io(&image, &["write -P 2 512k 1M"]);
        lab.qemu_img("snapshot -c second image.qcow2");
        qemu_io(&image, &["write -P 3 100k 4k", "discard 1M 256k"]);
        assert_clean(&image);
        let opened = open(&image, &OpenOptions::default()).unwrap();
        let listed = &opened.layers()[0].qcow2.as_ref().unwrap().snapshots;
        assert_eq!(
            listed.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(),
            ["first", "second"]
        );
        assert_eq!(listed[0].disk_bytes, 3 << 20);
        for name in ["first", "second"] {
            let raw = lab.path("snapshot.raw");
            let wanted = format!("snapshot.name={name}");
            lab.qemu_img(&format!("convert -l {wanted} -O raw image.qcow2 snapshot.raw"));
            assert_reads_as(&*opened.snapshot(name).unwrap(), &fs::read(&raw).unwrap(), name);
        }
        let by_id = opened.snapshot("1").unwrap();
        let mut byte = [0];
        by_id.read_at(&mut byte, 100 << 10).unwrap();
        assert_eq!(byte, [1]);
        assert!(matches!(opened.snapshot("third"), Err(Error::NotFound { .. })));
        assert_reads_as(&opened, &flatten(&image, &lab), option);
    }
}

#[test]
fn bitmaps_list_written_ranges() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    lab.qemu_img("create -f qcow2 -o cluster_size=4k image.qcow2 3G");
    lab.qemu_img("bitmap --add -g 32k image.qcow2 daily");
    lab.qemu_img("bitmap --add --disable image.qcow2 still");
    qemu_io(&image, &["write 64k 4k", "write 100M 33k", "write 2900M 64k"]);
    let opened = open(&image, &OpenOptions::default()).unwrap();
    let bitmaps = &opened.layers()[0].qcow2.as_ref().unwrap().bitmaps;
    assert_eq!(bitmaps.len(), 2);
    assert_eq!(
        (bitmaps[0].name.as_str(), bitmaps[0].granularity_bytes),
        ("daily", 32 << 10)
    );
    let mut ranges = Vec::new();
    opened.for_each_dirty("daily", |range| ranges.push(range)).unwrap();
    let mib = 1 << 20;
    let expected = [
        65_536..98_304,
        100 * mib..100 * mib + 65_536,
        2900 * mib..2900 * mib + 65_536,
    ];
    assert_eq!(ranges, expected);
    let bitmap = opened.dirty_bitmap("daily").unwrap();
    assert_eq!(bitmap.iter().collect::<Vec<_>>(), expected);
    let mut count = 0;
    opened.for_each_dirty("still", |_| count += 1).unwrap();
    assert_eq!(count, 0);
    assert_clean(&image);

    // A program without support for bitmaps clears the autoclear bit: the bitmap exists, but is outdated.
    let mut bytes = fs::read(&image).unwrap();
    bytes[95] &= !1;
    overwrite(&image, &bytes);
    let stale = open(&image, &OpenOptions::default()).unwrap();
    assert_eq!(
        stale.layers()[0].qcow2.as_ref().unwrap().bitmaps[0].state,
        BitmapState::Stale
    );
    assert!(stale.for_each_dirty("daily", |_| ()).is_err());
    assert_eq!(stale.notes().len(), 2);
}

#[test]
fn disks_above_2_tib_are_addressed() {
    let lab = Lab::new();
    let image = lab.path("large.qcow2");
    lab.qemu_img("create -f qcow2 large.qcow2 60T");
    qemu_io(&image, &["write -P 5 50T 64k", "write -P 6 64424509439k 1k"]);
    let opened = open(&image, &OpenOptions::default()).unwrap();
    let mut bytes = [0; 2];
    opened.read_at(&mut bytes, (50 << 40) - 1).unwrap();
    assert_eq!(bytes, [0, 5]);
    let list = opened.extents(0..opened.size_bytes(), 10).unwrap();
    assert_eq!(
        list.as_slice()
            .iter()
            .filter(|extent| extent.kind == ExtentKind::Data)
            .count(),
        2
    );
    assert_eq!(list.end(), 60 << 40);
}

#[test]
fn encryption_and_other_formats_are_refused_by_name() {
    let lab = Lab::new();
    let image = lab.path("locked.qcow2");
    let options = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    lab.qemu_img(&format!(
        "create --object secret,id=key,data=abc -f qcow2 -o {options} locked.qcow2 1M"
    ));
    match open(&image, &OpenOptions::default()) {
        Err(Error::UnsupportedFeature { feature, .. }) => assert_eq!(feature, "LUKS encryption"),
        other => panic!("{:?}", other.err()),
    }
    for (name, format) in [("qed", Format::Qed), ("qcow", Format::Qcow)] {
        let image = lab.path(name);
        qemu_img(&["create", "-f", name, path_text(&image), "8M"]);
        assert_eq!(detect(&image).unwrap(), format);
        assert!(
            matches!(
                open(&image, &OpenOptions::default()),
                Err(Error::UnsupportedFormat { .. })
            ),
            "{name}"
        );
    }
}
