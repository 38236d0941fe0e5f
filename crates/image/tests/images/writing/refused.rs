//! Images that must not be written, and bitmaps that a write invalidates.

use std::fs;

use holdfast_block::BlockDeviceMut as _;
use holdfast_image::{BitmapState, CreateOptions, Error, OpenOptions, create, open, open_at_rest, open_mut};

use super::MIB;
use crate::peer::{self, Lab, path_text, qemu_check, qemu_io};

#[test]
fn write_without_bitmap_support_makes_it_stale() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    lab.qemu_img("create -f qcow2 image.qcow2 4M");
    lab.qemu_img("bitmap --add image.qcow2 daily");
    let state = || {
        let opened = open(&image, &OpenOptions::default()).unwrap();
        opened.layers()[0].qcow2.as_ref().unwrap().bitmaps[0].state
    };
    drop(open_mut(&image, &OpenOptions::default()).unwrap());
    assert_eq!(state(), BitmapState::Valid, "opening changes nothing");
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    device.write_at(&[1], 0).unwrap();
    assert_eq!(state(), BitmapState::Stale, "at the first write, not at the flush");
    device.flush().unwrap();
    drop(device);
    let (corruptions, _) = qemu_check(&image);
    assert_eq!(corruptions, 0);
}

#[test]
fn inconsistent_images_are_not_written() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    for bit in [1u8, 2] {
        fs::remove_file(&image).ok();
        create(&image, &CreateOptions::qcow2(MIB)).unwrap();
        let mut bytes = fs::read(&image).unwrap();
        bytes[79] = bit;
        peer::overwrite(&image, &bytes);
        assert!(matches!(
            open_mut(&image, &OpenOptions::default()),
            Err(Error::NotWritable { .. })
        ));
        assert_eq!(open(&image, &OpenOptions::default()).unwrap().notes().len(), 1);
    }
    // An entry that points at the header is detected before the header is overwritten, and the image is marked.
    fs::remove_file(&image).ok();
    create(&image, &CreateOptions::qcow2(MIB)).unwrap();
    qemu_io(&image, &["write 0 64k"]);
    let mut bytes = fs::read(&image).unwrap();
    let l2 = bytes
        .windows(8)
        .rposition(|word| word[0] == 0x80 && word[7] == 0 && word[1..7] != [0; 6])
        .unwrap();
    let at_l1 = 65_536;
    bytes[l2..l2 + 8].copy_from_slice(&(1u64 << 63 | at_l1).to_be_bytes());
    peer::overwrite(&image, &bytes);
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    assert!(device.write_at(&[1], 0).is_err());
    assert!(device.write_at(&[1], 512 * 1024).is_err(), "no further write succeeds");
    drop(device);
    assert_eq!(fs::read(&image).unwrap()[79], 2, "marked as corrupt");
}

#[test]
fn image_in_use_by_qemu_is_locked() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    create(&image, &CreateOptions::qcow2(MIB)).unwrap();
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    assert!(peer::qemu_img_fails(&["snapshot", "-c", "x", path_text(&image)]).contains("lock"));
    drop(device);
    let running = peer::QemuIo::hold(&image);
    assert!(matches!(
        open_mut(&image, &OpenOptions::default()),
        Err(Error::Locked { .. })
    ));
    drop(running);
    open_mut(&image, &OpenOptions::default()).unwrap();
}

#[test]
fn an_image_at_rest_is_shared_with_readers_of_qemu_only() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    create(&image, &CreateOptions::qcow2(MIB)).unwrap();
    let still = || open_at_rest(&image, &OpenOptions::default());
    let held = (still().unwrap(), still().unwrap());
    lab.qemu_img("convert -O raw image.qcow2 copy.raw");
    assert!(peer::qemu_img_fails(&["snapshot", "-c", "x", path_text(&image)]).contains("lock"));
    let own = open_mut(&image, &OpenOptions::default());
    assert!(matches!(own, Err(Error::Locked { .. })));
    drop(held);
    let running = peer::QemuIo::hold(&image);
    assert!(matches!(still(), Err(Error::Locked { .. })));
    drop(running);
    let written = open_mut(&image, &OpenOptions::default()).unwrap();
    assert!(matches!(still(), Err(Error::Locked { .. })));
    drop(written);
    still().unwrap();
}

/// A server that has an image open for writing also opens it to check or describe it.
#[test]
fn other_opens_by_the_same_process_keep_the_lock() {
    let lab = Lab::new();
    for name in ["image.qcow2", "image.raw"] {
        let image = lab.path(name);
        match name {
            "image.raw" => drop(lab.raw(name, MIB, 1)),
            _ => create(&image, &CreateOptions::qcow2(MIB)).unwrap(),
        }
        let device = open_mut(&image, &OpenOptions::default()).unwrap();
        drop(open(&image, &OpenOptions::default()).unwrap());
        drop(fs::File::open(&image).unwrap());
        let again = open_mut(&image, &OpenOptions::default());
        assert!(matches!(again, Err(Error::Locked { .. })), "{name}");
        drop(again);
        let refused = peer::qemu_img_fails(&["resize", "-f", "raw", path_text(&image), "8M"]);
        assert!(refused.contains("lock"), "{name}: {refused}");
        device.write_at(&[1], 0).unwrap();
        drop(device);
        open_mut(&image, &OpenOptions::default()).unwrap();
    }
}
