//! VMDKs with several files, and streams.

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _};
use holdfast_image::{Error, Gate, ImageKind, OpenOptions, open, open_mut};

use crate::peer::{Lab, Random, assert_reads_as, flatten, path_text, qemu_img, work};

const MIB: u64 = 1 << 20;

#[test]
fn peer_vmdk_kinds_are_read_and_written() {
    for (kind, expected, is_written) in [
        ("monolithicSparse", ImageKind::Dynamic, true),
        ("monolithicFlat", ImageKind::Fixed, true),
        ("twoGbMaxExtentSparse", ImageKind::Dynamic, true),
        ("twoGbMaxExtentFlat", ImageKind::Fixed, true),
        ("streamOptimized", ImageKind::Stream, false),
    ] {
        let lab = Lab::new();
        let (raw, mut disk) = lab.raw("disk.raw", 20 * MIB + 512, 3);
        let image = lab.path("web1.vmdk");
        let options = format!("subformat={kind}");
        let words = [
            "convert",
            "-f",
            "raw",
            "-O",
            "vmdk",
            "-o",
            &options,
            path_text(&raw),
            path_text(&image),
        ];
        qemu_img(&words);
        let opened = open(&image, &OpenOptions::default()).unwrap();
        assert_reads_as(&opened, &disk, kind);
        assert_eq!(opened.layers()[0].blocks.as_ref().unwrap().kind, expected, "{kind}");
        drop(opened);
        if is_written {
            work(&image, &mut disk, &mut Random(5), 60);
            assert!(
                flatten(&image, &lab)[..disk.len()] == disk,
                "{kind}: the peer reads other data"
            );
            assert_reads_as(&open(&image, &OpenOptions::default()).unwrap(), &disk, kind);
        } else {
            let device = open_mut(&image, &OpenOptions::default()).unwrap();
            let refused = device.write_at(&[1], 0).unwrap_err().to_string();
            assert!(refused.contains("compressed"), "{refused}");
        }
    }
}

#[test]
fn reads_cross_extent_files() {
    let lab = Lab::new();
    let image = lab.path("large.vmdk");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "vmdk",
        "-o",
        "subformat=twoGbMaxExtentSparse",
        path_text(&image),
        "5G",
    ]);
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    let border = 2 << 30;
    // The descriptor has the border between files; write the bytes around each possible one at once.
    let data: Vec<u8> = (0..8 << 20_u32)
        .map(|at: u32| u8::try_from(at / 4096 % 251).unwrap())
        .collect();
    device.write_at(&data, border - (4 << 20)).unwrap();
    device.flush().unwrap();
    drop(device);
    let opened = open(&image, &OpenOptions::default()).unwrap();
    let mut found = vec![0; data.len()];
    opened.read_at(&mut found, border - (4 << 20)).unwrap();
    assert!(found == data);
    qemu_img(&["check", "-f", "vmdk", path_text(&image)]);
}

#[test]
fn truncated_extent_is_an_error() {
    let lab = Lab::new();
    let (raw, _) = lab.raw("disk.raw", 3 << 20, 3);
    let image = lab.path("cut.vmdk");
    let options = "subformat=twoGbMaxExtentSparse";
    qemu_img(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "vmdk",
        "-o",
        options,
        path_text(&raw),
        path_text(&image),
    ]);
    let extent = lab.path("cut-s001.vmdk");
    let length = std::fs::metadata(&extent).unwrap().len();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&extent)
        .unwrap()
        .set_len(length - (1 << 20))
        .unwrap();
    let opened = open(&image, &OpenOptions::default()).unwrap();
    let mut all = vec![0; 3 << 20];
    assert!(
        opened
            .read_at(&mut all, 0)
            .unwrap_err()
            .to_string()
            .contains("past the end")
    );
    assert!(crate::peer::corruptions(&image) > 0);
}

/// VMware stores several extents of a disk in one file, one after the other.
#[test]
fn extents_sharing_a_file_are_read_and_written() {
    let lab = Lab::new();
    let image = lab.path("two.vmdk");
    let mut flat: Vec<u8> = (0..8 * 512)
        .map(|at: u32| at.to_le_bytes()[0] ^ at.to_le_bytes()[1])
        .collect();
    std::io::Write::write_all(&mut std::fs::File::create(lab.path("two-flat.vmdk")).unwrap(), &flat).unwrap();
    let write = |extents: &str| {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=7c0bd2a4\nparentCID=ffffffff\ncreateType=\"vmfs\"\n{extents}\n"
        );
        std::io::Write::write_all(&mut std::fs::File::create(&image).unwrap(), text.as_bytes()).unwrap();
    };
    // The second half of the file comes first.
    write("RW 4 FLAT \"two-flat.vmdk\" 4\nRW 4 FLAT \"two-flat.vmdk\" 0");
    let opened = open(&image, &OpenOptions::default()).unwrap();
    let mut all = vec![0; 8 * 512];
    opened.read_at(&mut all, 0).unwrap();
    assert!(all == [&flat[2048..], &flat[..2048]].concat());
    drop(opened);
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    device.write_at(&[0xaa; 1024], 2048 - 512).unwrap();
    device.flush().unwrap();
    drop(device);
    flat[4096 - 512..].fill(0xaa);
    flat[..512].fill(0xaa);
    assert!(std::fs::read(lab.path("two-flat.vmdk")).unwrap() == flat);
    // Extents that overlap would change each other, and one past the end has no data.
    for (extents, says) in [
        (
            "RW 4 FLAT \"two-flat.vmdk\" 0\nRW 4 FLAT \"two-flat.vmdk\" 3",
            "the same bytes",
        ),
        (
            "RW 4 FLAT \"two-flat.vmdk\" 0\nRW 5 FLAT \"two-flat.vmdk\" 4",
            "past the end",
        ),
    ] {
        write(extents);
        let error = open(&image, &OpenOptions::default()).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn extent_in_another_folder_is_not_opened() {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("vm")).unwrap();
    let secret = lab.path("secret");
    crate::peer::sample_disk(512, 1);
    std::fs::File::create(&secret).unwrap().set_len(4096).unwrap();
    let image = lab.path("vm/trap.vmdk");
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=7c0bd2a4\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW 8 FLAT \"{}\" 0\n",
        secret.display()
    );
    std::io::Write::write_all(&mut std::fs::File::create(&image).unwrap(), text.as_bytes()).unwrap();
    assert!(matches!(
        open(&image, &OpenOptions::default()),
        Err(Error::Refused { .. })
    ));
    let trusting = OpenOptions {
        gate: Gate::Deny,
        allow: vec![secret],
        ..OpenOptions::default()
    };
    assert_eq!(open(&image, &trusting).unwrap().size_bytes(), 4096);
}
