//! Partition tables made by sfdisk and sgdisk, LVM made by its tools, and volumes of all kinds.

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use holdfast_guest_files::{CachedDevice, Content, Found, find_volumes, open_file_system};

use crate::compare::{content, node_at};
use crate::place::{Place, disk, system, text, try_system};

const MIB: u64 = 1 << 20;

fn sfdisk(image: &Path, script: &str) {
    let mut child = Command::new("/sbin/sfdisk")
        .args(["-q", text(image)])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("sfdisk: {error} (scripts/setup installs it)"));
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}

/// Writes an ext4 with a file at an offset of an image.
fn put_ext4(place: &Place, offset: u64, size_bytes: u64, label: &str) {
    let source = place.folder(label);
    std::fs::write(source.join("name"), label).unwrap();
    let part = place.path("part");
    std::fs::File::create(&part).unwrap().set_len(size_bytes).unwrap();
    system(
        "mkfs.ext4",
        &["-q", "-F", "-L", label, "-d", text(&source), text(&part)],
    );
    let bytes = std::fs::read(&part).unwrap();
    let image = std::fs::File::options().write(true).open(place.image()).unwrap();
    image.write_all_at(&bytes, offset).unwrap();
}

fn names(found: &Found) -> Vec<(String, Content, Option<String>)> {
    let volumes = found.volumes.iter();
    volumes
        .map(|volume| (volume.name.clone(), volume.content, volume.label.clone()))
        .collect()
}

/// Every volume with a file system has a file with its label.
fn check_files(place: &Place, found: &Found) {
    for volume in found.volumes.iter().filter(|volume| volume.content == Content::Ext4) {
        let device = CachedDevice::new(volume.device(&place.disks()), 1 << 20);
        let mut file_system = open_file_system(std::sync::Arc::new(device), volume.content).unwrap();
        let node = node_at(&mut *file_system, "/name");
        let label = volume.label.clone().unwrap();
        assert_eq!(content(&mut *file_system, node), label.as_bytes());
    }
}

#[test]
fn an_mbr_with_logical_partitions() {
    let place = Place::new(64 * MIB);
    let script = "label: dos\nstart=2048, size=16384, type=83\nstart=20480, size=100000, type=5\n\
                  start=22528, size=16384, type=83\nstart=43008, size=16384, type=83\nstart=122880, size=4096, type=7\n";
    sfdisk(&place.image(), script);
    for (sector, label) in [(2048, "first"), (22_528, "second"), (43_008, "third")] {
        put_ext4(&place, sector * 512, 8 * MIB, label);
    }
    let found = find_volumes(&place.disks()).unwrap();
    let label = |text: &str| Some(text.to_owned());
    assert_eq!(
        names(&found),
        [
            ("1".to_owned(), Content::Ext4, label("first")),
            ("3".to_owned(), Content::Empty, None),
            ("5".to_owned(), Content::Ext4, label("second")),
            ("6".to_owned(), Content::Ext4, label("third")),
        ]
    );
    check_files(&place, &found);
}

#[test]
fn a_gpt_and_its_second_copy() {
    let place = Place::new(64 * MIB);
    let image = text(&place.image()).to_owned();
    system(
        "sgdisk",
        &["-n", "1:2048:+8M", "-c", "1:boot area", "-n", "3:0:+8M", &image],
    );
    put_ext4(&place, MIB, 8 * MIB, "root");
    let found = find_volumes(&place.disks()).unwrap();
    let expected = [
        ("1".to_owned(), Content::Ext4, Some("root".to_owned())),
        ("3".to_owned(), Content::Empty, None),
    ];
    assert_eq!(names(&found), expected);
    check_files(&place, &found);
    // The first copy is damaged: the second counts. Both are: nothing is guessed.
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(b"x", 512 + 100 - 20).unwrap();
    file.write_all_at(&[7], 512 + 40).unwrap();
    let found = find_volumes(&place.disks()).unwrap();
    assert_eq!(names(&found), expected);
    assert!(found.notes[0].contains("second"), "{:?}", found.notes);
    file.write_all_at(&[7], 64 * MIB - 512 + 40).unwrap();
    let found = find_volumes(&place.disks()).unwrap();
    assert!(
        found.volumes.is_empty() && found.notes[0].contains("checksum"),
        "{found:?}"
    );
}

#[test]
fn volumes_are_named_by_what_they_hold() {
    let made: [(Content, &str, &[&str]); 11] = [
        (Content::Ext2, "mkfs.ext2", &["-q", "-F"]),
        (Content::Ext3, "mkfs.ext3", &["-q", "-F"]),
        (Content::Ext4, "mkfs.ext4", &["-q", "-F"]),
        (Content::Xfs, "mkfs.xfs", &["-q", "-f"]),
        (Content::Btrfs, "mkfs.btrfs", &["-q", "-f"]),
        (Content::Fat, "mkfs.fat", &["-F", "32"]),
        (Content::ExFat, "mkfs.exfat", &[]),
        (Content::Ntfs, "mkntfs", &["-q", "-Q", "-F"]),
        (Content::Swap, "mkswap", &[]),
        (
            Content::Luks,
            "cryptsetup",
            &[
                "luksFormat",
                "-q",
                "--pbkdf-force-iterations",
                "4",
                "--pbkdf-memory",
                "32",
                "--pbkdf",
                "argon2id",
            ],
        ),
        (Content::LvmMember, "pvcreate", &["-q", "--devicesfile", ""]),
    ];
    for (content, program, options) in made {
        let place = Place::new(320 * MIB);
        if content == Content::Luks {
            std::fs::write(place.path("key"), "a secret of the test").unwrap();
            let key = place.path("key");
            system(
                program,
                &[options, &["--key-file", text(&key), text(&place.image())]].concat(),
            );
        } else if content == Content::LvmMember {
            if try_lvm(&place, 1).is_none() {
                continue;
            }
        } else {
            system(program, &[options, &[text(&place.image())]].concat());
        }
        let found = find_volumes(&place.disks()).unwrap();
        assert_eq!(found.volumes[0].content, content, "{program}");
        assert_eq!(found.notes, Vec::<String>::new());
        let opened = open_file_system(std::sync::Arc::new(found.volumes[0].device(&place.disks())), content);
        assert_eq!(opened.is_ok(), content.is_readable(), "{program}");
    }
    let empty = Place::new(MIB);
    assert_eq!(find_volumes(&empty.disks()).unwrap().volumes[0].content, Content::Empty);
}

/// A volume group on loop devices; removed on drop.
struct LoopGroup {
    name: String,
    devices: Vec<String>,
}

impl Drop for LoopGroup {
    fn drop(&mut self) {
        lvm("vgchange", &["-an", &self.name]).ok();
        lvm("vgremove", &["-ff", "-y", &self.name]).ok();
        for device in &self.devices {
            try_system("losetup", &["-d", device]).ok();
        }
    }
}

fn lvm(command: &str, words: &[&str]) -> Result<String, String> {
    // Without udev nothing but the tool itself makes device nodes.
    let configuration = "activation{udev_sync=0 udev_rules=0 verify_udev_operations=1} devices{use_devicesfile=0}";
    // The kernel's device mapper is not needed: nothing is activated.
    try_system(
        command,
        &[&["--driverloaded", "n", "--config", configuration], words].concat(),
    )
}

/// Makes physical volumes of the image and of `count - 1` other files, and a volume group of them. None without root.
fn try_lvm(place: &Place, count: usize) -> Option<LoopGroup> {
    let mut group = LoopGroup {
        name: format!("holdfast-test-{}-{count}", std::process::id()),
        devices: Vec::new(),
    };
    for number in 0..count {
        let file = if number == 0 {
            place.image()
        } else {
            place.path(&format!("disk{number}"))
        };
        std::fs::File::options()
            .create(true)
            .append(true)
            .open(&file)
            .unwrap()
            .set_len(64 * MIB)
            .unwrap();
        match try_system("losetup", &["--find", "--show", text(&file)]) {
            Ok(device) => group.devices.push(device.trim().to_owned()),
            Err(reason) => {
                println!("skipped: {reason}");
                return None;
            }
        }
    }
    let devices: Vec<&str> = group.devices.iter().map(String::as_str).collect();
    let made = lvm("pvcreate", &[&["-q"], &devices[..]].concat());
    made.and_then(|_| lvm("vgcreate", &[&["-q", "-s", "1M", &group.name], &devices[..]].concat()))
        .map_err(|reason| println!("skipped: {reason}"))
        .ok()?;
    Some(group)
}

#[test]
fn linear_volumes_of_lvm_on_several_disks() {
    let place = Place::new(64 * MIB);
    let Some(group) = try_lvm(&place, 2) else { return };
    let create = |words: &[&str]| {
        lvm(
            "lvcreate",
            &[&["-q", "-y", "-an", "-Zn", "-Wn"], words, &[&group.name]].concat(),
        )
    };
    create(&["-l", "4", "-i", "2", "-n", "striped"]).unwrap();
    create(&["-l", "40", "-n", "first"]).unwrap();
    create(&["-l", "10", "-n", "between"]).unwrap();
    // It is extended behind another volume, and onto the second disk.
    lvm("lvextend", &["-q", "-l", "100", &format!("{}/first", group.name)]).unwrap();
    let mut disks = place.disks();
    disks.push(disk("vdb", &place.path("disk1")));
    let found = find_volumes(&disks).unwrap();
    let volume = |name: &str| {
        let name = format!("{}/{name}", group.name);
        found.volumes.iter().find(|volume| volume.name == name).unwrap()
    };
    assert_eq!(found.notes, Vec::<String>::new());
    let first = volume("first");
    assert_eq!((first.size_bytes, first.disks.len()), (100 * MIB, 2), "{first:?}");
    assert!(first.segments.len() >= 3, "{first:?}");
    assert!(volume("striped").unreadable.as_ref().unwrap().0.contains("striped"));
    // A file system is written where LVM says that the extents are.
    let source = place.folder("source");
    std::fs::write(source.join("name"), "lvm").unwrap();
    std::fs::write(source.join("large"), vec![7; 70 << 20]).unwrap();
    let part = place.path("part");
    std::fs::File::create(&part).unwrap().set_len(100 * MIB).unwrap();
    system(
        "mkfs.ext4",
        &["-q", "-F", "-L", "lvm", "-d", text(&source), text(&part)],
    );
    write_by_lvm(&group, &part, &[place.image(), place.path("disk1")]);
    let found = find_volumes(&disks).unwrap();
    let first = found
        .volumes
        .iter()
        .find(|volume| volume.name.ends_with("/first"))
        .unwrap();
    assert_eq!((first.content, first.label.as_deref()), (Content::Ext4, Some("lvm")));
    let device = CachedDevice::new(first.device(&disks), 1 << 20);
    let mut file_system = open_file_system(std::sync::Arc::new(device), first.content).unwrap();
    let node = node_at(&mut *file_system, "/large");
    assert!(content(&mut *file_system, node) == vec![7; 70 << 20]);
    // Without the second disk the volume is known and refused.
    let found = find_volumes(&disks[..1]).unwrap();
    let first = found
        .volumes
        .iter()
        .find(|volume| volume.name.ends_with("/first"))
        .unwrap();
    assert!(first.unreadable.as_ref().unwrap().0.contains("not there"), "{first:?}");
}

/// Writes the bytes of a file to the volume "first", by the list of its segments.
fn write_by_lvm(group: &LoopGroup, from: &Path, files: &[std::path::PathBuf]) {
    let bytes = std::fs::read(from).unwrap();
    let name = format!("{}/first", group.name);
    let list = lvm(
        "lvs",
        &[
            "--noheadings",
            "--units",
            "b",
            "--nosuffix",
            "-o",
            "seg_start,seg_size,seg_pe_ranges",
            &name,
        ],
    );
    let starts = lvm(
        "pvs",
        &["--noheadings", "--units", "b", "--nosuffix", "-o", "pv_name,pe_start"],
    )
    .unwrap();
    let number = |text: &str| text.parse::<u64>().unwrap();
    for line in list.unwrap().lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (device, extents) = words[2].split_once(':').unwrap();
        let first = number(extents.split_once('-').unwrap().0);
        let of_device = starts
            .lines()
            .find(|line| line.split_whitespace().next() == Some(device))
            .unwrap();
        let start = number(of_device.split_whitespace().nth(1).unwrap());
        let index = group.devices.iter().position(|other| other == device).unwrap();
        let file = std::fs::File::options().write(true).open(&files[index]).unwrap();
        let range =
            usize::try_from(number(words[0])).unwrap()..usize::try_from(number(words[0]) + number(words[1])).unwrap();
        file.write_all_at(&bytes[range], start + first * MIB).unwrap();
    }
}
