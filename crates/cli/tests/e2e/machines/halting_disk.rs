//! A disk from which UEFI starts a program that halts the processor. Without one, the firmware's shell waits busily for a key.

use std::fs::File;
use std::path::Path;

use crate::host::{system, text};
use crate::rig::Rig;

const FILE_BYTES: usize = 0x400;
/// Of the headers, and of the section in the file.
const PART_BYTES: u32 = 0x200;
/// Where the section is in memory.
const SECTION_ADDRESS: u32 = 0x1000;
/// `cli`, `hlt`, and a jump back to it after an interrupt that cannot be masked.
const CODE: [u8; 4] = [0xFA, 0xF4, 0xEB, 0xFD];

/// Makes a file system with the program as the default one for x86-64.
pub(super) fn make_halting_disk(image: &Path, rig: &Rig) {
    File::create(image).unwrap().set_len(1 << 20).unwrap();
    system("mkfs.fat", &[text(image)]).unwrap();
    rig.write("BOOTX64.EFI", &program());
    system("mmd", &["-i", text(image), "::EFI", "::EFI/BOOT"]).unwrap();
    let file = rig.path("BOOTX64.EFI");
    system("mcopy", &["-i", text(image), text(&file), "::EFI/BOOT"]).unwrap();
}

/// An EFI application in the format PE32+ with one section.
fn program() -> Vec<u8> {
    let mut bytes = vec![0; FILE_BYTES];
    let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    put(0, b"MZ");
    put(0x3C, &[0x40]);
    put(0x40, b"PE\0\0");
    put(0x44, &0x8664u16.to_le_bytes());
    // One section, and 240 bytes of the optional header; it is executable, and knows large addresses.
    put(0x46, &[1]);
    put(0x54, &[0xF0, 0, 0x22]);
    put(0x58, &0x20Bu16.to_le_bytes());
    put(0x5C, &PART_BYTES.to_le_bytes());
    for offset in [0x68, 0x6C, 0x78] {
        // The entry point, the code, and the alignment in memory.
        put(offset, &SECTION_ADDRESS.to_le_bytes());
    }
    for offset in [0x7C, 0x94] {
        // The alignment in the file, and the size of the headers.
        put(offset, &PART_BYTES.to_le_bytes());
    }
    put(0x90, &(2 * SECTION_ADDRESS).to_le_bytes());
    // An EFI application, with 16 empty directories.
    put(0x9C, &[10]);
    put(0xC4, &[16]);
    put(0x148, b".text");
    for (offset, value) in [
        (0x150, u32::try_from(CODE.len()).unwrap()),
        (0x154, SECTION_ADDRESS),
        (0x158, PART_BYTES),
        (0x15C, PART_BYTES),
        (0x16C, 0x6000_0020),
    ] {
        put(offset, &value.to_le_bytes());
    }
    put(PART_BYTES as usize, &CODE);
    bytes
}
