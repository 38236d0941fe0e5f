//! Images and archives whose names and texts contain control characters for the terminal.

use crate::host::{system, text};
use crate::rig::{Rig, noise};

/// A colour, a line end, a bell, and a mark that changes the direction of writing.
const CONTROL_CHARACTERS: &[u8; 12] = b"\x1b[31m\r\x07\xe2\x80\xaeXY";

/// Replaces all occurrences of `there` in the file by [`EVIL`].
fn insert_control_characters(rig: &Rig, name: &str, placeholder: &[u8; 12]) {
    let mut bytes = rig.read(name);
    let places: Vec<usize> = (0..bytes.len() - placeholder.len())
        .filter(|at| bytes[*at..].starts_with(placeholder))
        .collect();
    assert!(!places.is_empty(), "{name}");
    for at in places {
        bytes[at..at + CONTROL_CHARACTERS.len()].copy_from_slice(CONTROL_CHARACTERS);
    }
    rig.write(name, &bytes);
}

fn assert_harmless(rig: &Rig, words: &[&str]) {
    let output = rig.run(words);
    let code = output.status.code();
    assert!(matches!(code, Some(0 | 1 | 3 | 5)), "{words:?}: {output:?}");
    for stream in [output.stdout, output.stderr] {
        let message = String::from_utf8(stream).unwrap();
        let turns = |character: char| matches!(character, '\u{202a}'..='\u{202e}');
        let harm = message
            .chars()
            .find(|character| (character.is_control() && *character != '\n') || turns(*character));
        assert_eq!(harm, None, "{words:?}: {message:?}");
    }
}

#[test]
fn names_inside_an_image_are_escaped_on_the_terminal() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(1 << 20, 4));
    rig.write("aaaaaaaaaaaa", &noise(1 << 20, 5));
    for name in ["a.qcow2", "a.vdi", "a.vmdk", "a.vhdx", "a.vhd"] {
        rig.ok(&["image", "convert", "disk.raw", name]);
    }
    rig.ok(&[
        "image",
        "create",
        "child.qcow2",
        "--backing",
        "aaaaaaaaaaaa",
        "--backing-format",
        "raw",
    ]);
    insert_control_characters(&rig, "child.qcow2", b"aaaaaaaaaaaa");
    insert_control_characters(&rig, "a.vdi", b"<<< Holdfast");
    let vhdx: Vec<u8> = "Holdfa".encode_utf16().flat_map(u16::to_le_bytes).collect();
    insert_control_characters(&rig, "a.vhdx", vhdx.as_slice().try_into().unwrap());
    insert_control_characters(&rig, "a.vmdk", b"ddb.uuid.ima");
    rig.write(
        "b.vmdk",
        &[
            &b"# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW 8 FLAT \""[..],
            CONTROL_CHARACTERS,
            b"\" 0\n",
        ]
        .concat(),
    );
    for name in ["child.qcow2", "a.vdi", "a.vhdx", "a.vmdk", "a.vhd", "a.qcow2", "b.vmdk"] {
        for words in [
            &["image", "info", name][..],
            &["image", "info", "--chain", name],
            &["image", "info", "--json", name],
            &["image", "map", name],
            &["image", "map", "--json", name],
            &["image", "check", name],
            &["image", "compare", name, "disk.raw"],
            &["image", "convert", "--force", name, "out.raw"],
        ] {
            assert_harmless(&rig, words);
        }
    }
}

#[test]
fn names_of_archive_members_are_escaped_on_the_terminal() {
    let rig = Rig::new();
    let inserted = String::from_utf8(CONTROL_CHARACTERS.to_vec()).unwrap();
    rig.write("disk.img", &noise(1 << 20, 6));
    for (named, member) in [
        ("disk.img", "bbbbbbbbbbbb"),
        ("other.img", "bbbbbbbbbbbb"),
        ("bbbbbbbbbbbb", "disk.img"),
    ] {
        let named = named.replace("bbbbbbbbbbbb", &inserted.replace(['\u{1b}', '\u{7}'], "&#xa;"));
        let descriptor = format!(
            "<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\">\
             <References><File ovf:id=\"f\" ovf:href=\"{named}\"/></References><DiskSection><Info/>\
             <Disk ovf:capacity=\"1048576\" ovf:diskId=\"d\" ovf:fileRef=\"f\" ovf:format=\"raw\"/></DiskSection>\
             <VirtualSystem ovf:id=\"web1\"><Info/><VirtualHardwareSection><Info/></VirtualHardwareSection></VirtualSystem></Envelope>"
        );
        rig.write("w.ovf", descriptor.as_bytes());
        let renamed = format!(
            "--transform=s/^disk.img$/{}/",
            member.replace("bbbbbbbbbbbb", &inserted)
        );
        let archive = rig.path("w.ova");
        let folder = rig.path(".");
        let words = [
            "--format=ustar",
            &renamed,
            "-C",
            text(&folder),
            "-cf",
            text(&archive),
            "w.ovf",
            "disk.img",
        ];
        system("tar", &words).unwrap();
        for words in [
            &["archive", "info", "w.ova"][..],
            &["archive", "check", "w.ova"],
            &["import", "w.ova", "--to", "machine"],
        ] {
            assert_harmless(&rig, words);
        }
    }
}
