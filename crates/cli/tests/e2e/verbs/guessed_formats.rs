//! Formats without an option: data of a guest in a raw disk opens no other file, and a misleading name is not reported
//! as damage.

use crate::host::{system, text};
use crate::rig::{Rig, noise};
use crate::templates;

const MIB: usize = 1 << 20;

/// A qcow2 header with `other.raw` as backing file, in the first sectors of a raw disk.
fn disk_with_a_header(rig: &Rig) -> Vec<u8> {
    rig.write("other.raw", &noise(MIB, 9));
    rig.ok(&[
        "image",
        "create",
        "head.qcow2",
        "--backing",
        "other.raw",
        "--backing-format",
        "raw",
    ]);
    let mut disk = rig.read("head.qcow2");
    disk.resize(4 * MIB, 0);
    disk
}

fn code(rig: &Rig, words: &[&str]) -> i32 {
    rig.run(words).status.code().unwrap()
}

#[test]
fn data_of_a_guest_in_a_raw_disk_opens_no_other_file() {
    let rig = Rig::new();
    let disk = disk_with_a_header(&rig);
    for name in ["guest.raw", "guest.img", "guest", "guest.snap1"] {
        rig.write(name, &disk);
        for words in [
            &["image", "convert", name, "out.raw"][..],
            &["image", "convert", name, "out.qcow2"],
            &["image", "map", name],
            &["image", "compare", name, "other.raw"],
            &["clone", "--copy", name, "out.img"],
            &["clone", "--overlay", name, "out.qcow2"],
            &["image", "create", "out.qcow2", "--backing", name],
            &["backup", "--machine", "guest", name],
        ] {
            let output = rig.run(words);
            assert_eq!(output.status.code(), Some(1), "{words:?}: {output:?}");
            assert!(
                String::from_utf8_lossy(&output.stderr).contains("--format"),
                "{words:?}: {output:?}"
            );
        }
        // An option states the format.
        assert_eq!(
            code(&rig, &["image", "convert", "--format", "raw", name, "as-it-is.raw"]),
            0,
            "{name}"
        );
        assert!(rig.read("as-it-is.raw") == disk);
        assert_eq!(
            code(&rig, &["image", "convert", "--format", "qcow2", name, "as-image.raw"]),
            0,
            "{name}"
        );
        assert!(rig.read("as-image.raw") == rig.read("other.raw"));
        std::fs::remove_file(rig.path("as-it-is.raw")).unwrap();
        std::fs::remove_file(rig.path("as-image.raw")).unwrap();
    }
    assert_eq!(rig.snapshot_count(), 0);
    // An image with the matching name is read with its backing file.
    assert_eq!(code(&rig, &["image", "convert", "head.qcow2", "base.raw"]), 0);
}

/// A header without a backing file opens no other file, but the guest of a raw disk may have written it.
#[test]
fn a_format_guessed_from_the_content_is_warned_about() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(MIB, 5));
    rig.ok(&["image", "convert", "disk.raw", "web.qcow2"]);
    for name in ["guest", "guest.vdi", "guest.7"] {
        rig.write(name, &rig.read("web.qcow2"));
        for (number, words) in [
            &["image", "convert", name, "out.raw"][..],
            &["image", "convert", name, "-"],
            &["image", "info", name],
            &["clone", "--copy", name, "copy.qcow2"],
            &["clone", "--overlay", name, "over.qcow2"],
            &["clone", "--dry-run", name, "planned.qcow2"],
            &["backup", "--machine", name, name],
        ]
        .into_iter()
        .enumerate()
        {
            for (options, expected) in [(&[][..], 3), (&["--format", "qcow2"], 0)] {
                // If the parent snapshot has the disk as an image, it is known to be one.
                let output = rig.run(&[words, options].concat());
                let message = String::from_utf8_lossy(&output.stderr);
                assert_eq!(
                    output.status.code(),
                    Some(expected),
                    "{number}: {words:?} {options:?}: {message}"
                );
                assert_eq!(
                    message.contains("does not have the name of a qcow2 image"),
                    expected == 3,
                    "{message}"
                );
                for made in ["out.raw", "copy.qcow2", "over.qcow2"] {
                    std::fs::remove_file(rig.path(made)).ok();
                }
            }
        }
        assert_eq!(
            code(&rig, &["backup", "--machine", name, name]),
            0,
            "{name}: the format is known from the parent"
        );
    }
    // The extension of a clone must be that of a known format.
    for way in ["--copy", "--overlay", "--dry-run"] {
        assert_eq!(code(&rig, &["clone", way, "web.qcow2", "clone.qcow"]), 2, "{way}");
        assert_eq!(code(&rig, &["clone", way, "web.qcow2", "clone.vmkd"]), 2, "{way}");
    }
}

#[test]
fn a_vhd_footer_at_the_end_of_a_raw_disk_is_data() {
    let rig = Rig::new();
    rig.write("part.raw", &noise(MIB, 2));
    rig.ok(&["image", "convert", "part.raw", "fixed.vhd", "--fixed"]);
    let disk = rig.read("fixed.vhd");
    for name in ["disk.raw", "disk.img"] {
        rig.write(name, &disk);
        assert_eq!(code(&rig, &["image", "convert", name, "out.raw"]), 3, "{name}");
        assert!(rig.read("out.raw") == disk, "{name}");
        std::fs::remove_file(rig.path("out.raw")).unwrap();
        assert_eq!(code(&rig, &["backup", "--machine", name, name]), 3, "{name}");
    }
}

#[test]
fn a_wrong_format_option_or_extension_is_not_reported_as_damage() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(MIB, 3));
    rig.ok(&["image", "convert", "disk.raw", "web.qcow2"]);
    rig.ok(&["image", "convert", "disk.raw", "web.vdi"]);
    for words in [
        &["image", "info", "web.qcow2", "--format", "vdi"][..],
        &["image", "check", "web.qcow2", "--format", "vdi"],
        &["image", "convert", "web.vdi", "out.raw", "--format", "qcow2"],
        &["image", "convert", "web.vdi", "out.raw", "--format", "vmdk"],
        &["backup", "--machine", "web", "web.qcow2", "--format", "vdi"],
    ] {
        let output = rig.run(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("its content is"),
            "{words:?}: {output:?}"
        );
    }
    rig.ok(&["backup", "--machine", "web", "web.qcow2"]);
    for words in [
        &["image", "convert", "web.qcow2", "web.vmkd"][..],
        &["image", "create", "web.foo", "1M"],
        &["restore", "web", "web.vmkd"],
    ] {
        assert_eq!(code(&rig, words), 2, "{words:?}");
    }
}

#[test]
fn a_vmdk_descriptor_is_detected_with_any_first_line() {
    let rig = Rig::new();
    rig.write("flat.img", &noise(8 * MIB, 4));
    for first in ["# Disk Descriptor File", "#disk descriptorfile", "# by a converter\n#"] {
        let descriptor = format!(
            "{first}\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW 16384 FLAT \"flat.img\" 0\n"
        );
        rig.write("disk.vmdk", descriptor.as_bytes());
        rig.ok(&["image", "convert", "disk.vmdk", "out.raw"]);
        assert!(rig.read("out.raw") == rig.read("flat.img"), "{first}");
        std::fs::remove_file(rig.path("out.raw")).unwrap();
    }
    rig.write("short.vmdk", b"no descriptor\n");
    assert_eq!(code(&rig, &["image", "convert", "short.vmdk", "out.raw"]), 1);
}

#[test]
fn a_template_of_a_guessed_overlay_is_refused() {
    let rig = templates::rig();
    let disk = disk_with_a_header(&rig);
    rig.ok(&["image", "convert", "other.raw", "alone.qcow2"]);
    for name in ["guest.raw", "guest.img", "guest"] {
        rig.write(name, &disk);
        let words = ["template", "push", "base:1", name, "--sign", "anna"];
        let (_, message) = rig.error(1, &words);
        assert!(message.contains("--format"), "{name}: {message}");
    }
    for name in ["alone.img", "alone"] {
        rig.write(name, &rig.read("alone.qcow2"));
        assert_eq!(
            code(&rig, &["template", "push", name, name, "--sign", "anna"]),
            3,
            "{name}"
        );
    }
    rig.ok(&[
        "template", "push", "--format", "raw", "base:1", "guest", "--sign", "anna",
    ]);
    rig.ok(&templates::pull_words("base:1", "pulled.raw"));
    assert!(rig.read("pulled.raw") == disk);
}

/// A processor, memory, and a controller with a disk.
const HARDWARE: &str = "<Item><r:InstanceID>1</r:InstanceID><r:ResourceType>3</r:ResourceType><r:VirtualQuantity>1</r:VirtualQuantity></Item>\
     <Item><r:AllocationUnits>byte * 2^20</r:AllocationUnits><r:InstanceID>2</r:InstanceID><r:ResourceType>4</r:ResourceType>\
     <r:VirtualQuantity>512</r:VirtualQuantity></Item>\
     <Item><r:Address>0</r:Address><r:InstanceID>3</r:InstanceID><r:ResourceSubType>lsilogic</r:ResourceSubType><r:ResourceType>6</r:ResourceType></Item>\
     <Item><r:AddressOnParent>0</r:AddressOnParent><r:HostResource>ovf:/disk/d</r:HostResource><r:InstanceID>4</r:InstanceID><r:Parent>3</r:Parent>\
     <r:ResourceType>17</r:ResourceType></Item>";

/// The descriptor of an archive states for each disk whether it is raw. If it is, data of its guest is not interpreted;
/// otherwise, the image must not open other files.
#[test]
fn a_disk_in_an_archive_opens_no_other_file() {
    let rig = Rig::new();
    let disk = disk_with_a_header(&rig);
    let folder = rig.path(".");
    for (number, (name, format)) in [
        ("disk.img", "raw"),
        ("disk.qcow2", "raw"),
        ("disk.img", "qcow2"),
        ("disk", "qcow2"),
        ("disk.raw", "vmdk.html#streamOptimized"),
    ]
    .into_iter()
    .enumerate()
    {
        let machine = format!("web{number}");
        let capacity = if format == "raw" { disk.len() } else { MIB };
        let descriptor = format!(
            "<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\" \
             xmlns:r=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData\">\
             <References><File ovf:id=\"f\" ovf:href=\"{name}\"/></References><DiskSection><Info/>\
             <Disk ovf:capacity=\"{capacity}\" ovf:diskId=\"d\" ovf:fileRef=\"f\" ovf:format=\"{format}\"/></DiskSection>\
             <VirtualSystem ovf:id=\"web1\"><Info/><VirtualHardwareSection><Info/>{HARDWARE}</VirtualHardwareSection></VirtualSystem></Envelope>"
        );
        rig.write("w.ovf", descriptor.as_bytes());
        rig.write(name, &disk);
        let archive = rig.path("w.ova");
        let words = [
            "--format=ustar",
            "-C",
            text(&folder),
            "-cf",
            text(&archive),
            "w.ovf",
            name,
        ];
        system("tar", &words).unwrap();
        if format == "raw" {
            // An OVA without a manifest may cause a warning.
            assert!(
                matches!(code(&rig, &["import", "w.ova", "--machine", &machine]), 0 | 3),
                "{name}"
            );
            rig.ok(&["restore", &format!("{machine}:sda"), "back.raw"]);
            assert!(rig.read("back.raw") == disk, "{name}");
            std::fs::remove_file(rig.path("back.raw")).unwrap();
        } else {
            let (_, message) = rig.error(1, &["import", "w.ova"]);
            assert!(message.contains("other.raw"), "{name}: {message}");
        }
    }
}

/// A guest can write the metadata of an image into its raw disk: verbs that change metadata would change its data.
#[test]
fn a_disk_that_may_be_raw_is_not_changed_as_another_format() {
    let rig = Rig::new();
    for name in ["disk.img", "disk.raw"] {
        rig.ok(&["image", "create", "new.qcow2", "4M"]);
        std::fs::rename(rig.path("new.qcow2"), rig.path(name)).unwrap();
        let disk = rig.read(name);
        for words in [
            &["image", "check", name, "--repair"][..],
            &["image", "check", name, "--repair", "--dry-run"],
            &["image", "resize", name, "8M"],
            &["image", "resize", name, "+4M"],
        ] {
            let output = rig.run(words);
            assert_eq!(output.status.code(), Some(1), "{words:?}: {output:?}");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(
                stderr.contains("has the name of a raw image") && stderr.contains("--format"),
                "{words:?}: {stderr}"
            );
            assert!(rig.read(name) == disk, "{words:?}");
        }
        rig.ok(&["image", "resize", name, "8M", "--format", "qcow2"]);
        rig.ok(&["image", "check", name, "--repair", "--format", "qcow2"]);
    }
    rig.ok(&["image", "create", "new.vdi", "4M"]);
    std::fs::rename(rig.path("new.vdi"), rig.path("disk.img")).unwrap();
    rig.code(1, &["image", "identity", "disk.img", "--renew"]);
    rig.ok(&["image", "identity", "disk.img", "--renew", "--format", "vdi"]);
}
