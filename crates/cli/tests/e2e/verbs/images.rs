//! Images of other hypervisors, as users handle them.

use crate::host::{system, text};
use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

fn flat_vmdk(rig: &Rig, name: &str) -> Vec<u8> {
    let path = rig.path(&format!("{name}.vmdk"));
    let bytes = noise(2 * MIB, 21);
    rig.write("disk.raw", &bytes);
    let raw = rig.path("disk.raw");
    let words = ["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=monolithicFlat"];
    system("qemu-img", &[&words[..], &[text(&raw), text(&path)]].concat()).unwrap();
    bytes
}

/// The data of a flat VMDK is in another file than the named descriptor.
#[test]
fn an_extent_of_a_vmdk_is_not_overwritten_by_its_conversion() {
    let rig = Rig::empty();
    let bytes = flat_vmdk(&rig, "flat");
    let before = rig.read("flat-flat.vmdk");
    for target in ["flat.vmdk", "flat-flat.vmdk"] {
        let words = ["image", "convert", "flat.vmdk", target, "--to", "raw", "--force"];
        let (_, message) = rig.error(1, &words);
        assert!(message.contains(target), "{message}");
        assert!(rig.read("flat-flat.vmdk") == before);
    }
    rig.ok(&["image", "convert", "flat.vmdk", "out.raw", "--verify"]);
    assert!(rig.read("out.raw") == bytes);
}

#[test]
fn a_vmdk_extent_written_during_reading_is_warned_about() {
    let rig = Rig::new();
    flat_vmdk(&rig, "flat");
    // Standard input is read after the image, and the backup waits for its end.
    let mut child = rig
        .command(&["backup", "--machine", "m", "flat.vmdk", "-"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // More than a pipe buffers: once all of it is written, the image was read.
    std::io::Write::write_all(&mut stdin, &noise(4 * MIB, 22)).unwrap();
    let mut extent = rig.read("flat-flat.vmdk");
    extent[MIB] ^= 1;
    rig.write("flat-flat.vmdk", &extent);
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let message = stderr(&output);
    assert!(
        message.contains("flat-flat.vmdk") && message.contains("changed while it was read"),
        "{message}"
    );
}

/// VirtualBox refuses a copy with the same UUID, which users elsewhere patch with `dd`.
#[test]
fn a_renewed_identity_updates_the_children() {
    let rig = Rig::empty();
    rig.ok(&[
        "image",
        "create",
        "base.vdi",
        "8M",
        "--uuid",
        "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f",
    ]);
    rig.ok(&["image", "create", "child.vdi", "--parent", "base.vdi"]);
    let shown = rig.report(&["image", "identity", "base.vdi"]);
    assert_eq!(shown["id"], "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f");
    assert_eq!(
        (&shown["changed"], &shown["children"][0]),
        (&false.into(), &"child.vdi".into())
    );

    let (kind, message) = rig.error(1, &["image", "identity", "base.vdi", "--renew"]);
    assert_eq!(kind, "refused");
    assert!(
        message.contains("child.vdi") && message.contains("--all-children"),
        "{message}"
    );
    let (kind, _) = rig.error(2, &["image", "identity", "base.vdi", "--all-children"]);
    assert_eq!(kind, "usage");
    let changed = rig.report(&["image", "identity", "base.vdi", "--renew", "--all-children"]);
    assert_eq!(
        (&changed["before"], &changed["children"][0]),
        (&shown["id"], &"child.vdi".into())
    );
    assert_ne!(changed["id"], shown["id"]);
    rig.ok(&["image", "check", "child.vdi"]);
    let child = rig.report(&["image", "identity", "child.vdi"]);
    assert_eq!(child["parent_id"], changed["id"]);

    // A copy in another folder has no children, and those of the original are unchanged.
    std::fs::create_dir(rig.path("copies")).unwrap();
    std::fs::copy(rig.path("base.vdi"), rig.path("copies/base.vdi")).unwrap();
    rig.ok(&["image", "identity", "copies/base.vdi", "--renew"]);
    rig.ok(&["image", "info", "child.vdi"]);
    let (kind, message) = rig.error(1, &["image", "identity", "nothing.vdi"]);
    assert_eq!(kind, "io", "{message}");
    rig.ok(&["image", "create", "disk.qcow2", "8M"]);
    let (kind, message) = rig.error(1, &["image", "identity", "disk.qcow2", "--renew"]);
    assert_eq!(kind, "unsupported");
    assert!(message.contains("backing file by path"), "{message}");
}

/// A disk of Parallels is a folder with a file for each snapshot.
#[test]
fn snapshots_of_a_parallels_disk_are_read() {
    let rig = Rig::empty();
    let (old, new) = (noise(MIB, 23), noise(MIB, 24));
    rig.write("old.raw", &old);
    rig.write("new.raw", &new);
    std::fs::create_dir(rig.path("disk.hdd")).unwrap();
    for name in ["old", "new"] {
        rig.ok(&[
            "image",
            "convert",
            &format!("{name}.raw"),
            &format!("disk.hdd/{name}.hds"),
        ]);
    }
    let (root, top) = (
        "11111111-0d5e-4f0f-9d2e-5b1c6a7d8e9f",
        "5fbaabe3-6958-40ff-92a7-860e329aab41",
    );
    let image = |id: &str, file: &str| {
        format!("<Image><GUID>{{{id}}}</GUID><Type>Compressed</Type><File>{file}</File></Image>")
    };
    let shot =
        |id: &str, parent: &str| format!("<Shot><GUID>{{{id}}}</GUID><ParentGUID>{{{parent}}}</ParentGUID></Shot>");
    let text = format!(
        "<Parallels_disk_image Version=\"1.0\"><Disk_Parameters><Disk_size>2048</Disk_size><Cylinders>4</Cylinders>\
         <Heads>16</Heads><Sectors>32</Sectors><Padding>0</Padding></Disk_Parameters><StorageData><Storage><Start>0</Start>\
         <End>2048</End><Blocksize>2048</Blocksize>{}{}</Storage></StorageData><Snapshots><TopGUID>{{{top}}}</TopGUID>{}{}\
         </Snapshots></Parallels_disk_image>",
        image(root, "old.hds"),
        image(top, "new.hds"),
        shot(root, "00000000-0000-0000-0000-000000000000"),
        shot(top, root),
    );
    rig.write("disk.hdd/DiskDescriptor.xml", text.as_bytes());
    let shown = rig.report(&["image", "info", "disk.hdd", "--chain"]);
    assert_eq!(shown["images"][0]["delta"]["snapshots"][0]["uuid"], root, "{shown}");
    assert_eq!(shown["images"][1]["blocks"]["uuid"], root);
    rig.ok(&["image", "convert", "disk.hdd", "a.raw", "--verify"]);
    rig.ok(&["image", "convert", "disk.hdd", "b.raw", "--snapshot", root]);
    assert!(rig.read("a.raw") == new && rig.read("b.raw") == old);
    rig.ok(&["init", "--no-encryption"]);
    rig.ok(&["backup", "--machine", "m", "disk.hdd"]);
    rig.ok(&["restore", "m", "c.raw"]);
    assert!(rig.read("c.raw") == new);
    let (kind, message) = rig.error(1, &["image", "convert", "disk.hdd", "disk.hdd/old.hds", "--force"]);
    assert_eq!(kind, "refused", "{message}");
}

#[test]
fn images_are_resized_and_keep_their_content() {
    let rig = Rig::empty();
    let bytes = noise(3 << 20, 4);
    rig.write("a.raw", &bytes);
    rig.ok(&["image", "convert", "a.raw", "a.qcow2"]);
    for image in ["a.raw", "a.qcow2"] {
        let report = rig.report(&["image", "resize", image, "+5M"]);
        assert_eq!(
            (&report["before_bytes"], &report["size_bytes"]),
            (&(3 << 20).into(), &(8 << 20).into())
        );
        let output = rig.run(&["image", "convert", image, "-"]);
        assert!(
            output.stdout[..3 << 20] == bytes && output.stdout[3 << 20..] == vec![0; 5 << 20],
            "{image}"
        );
        let (_, text) = rig.error(1, &["image", "resize", image, "2M"]);
        assert!(text.contains("--shrink"), "{text}");
        rig.ok(&["image", "resize", image, "2M", "--shrink"]);
        let output = rig.run(&["image", "convert", image, "-"]);
        assert!(output.stdout == bytes[..2 << 20], "{image}");
    }
}

/// An image named `.hdd` is created as a folder of Parallels by every verb.
#[test]
fn an_image_named_hdd_is_created_as_a_folder() {
    let rig = Rig::empty();
    let bytes = noise(3 * MIB, 23);
    rig.write("disk.raw", &bytes);
    let uuid = "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f";
    rig.ok(&["image", "convert", "disk.raw", "a.hdd", "--verify", "--uuid", uuid]);
    assert_eq!(rig.names("a.hdd"), ["DiskDescriptor.xml", "root.hds"]);
    assert_eq!(rig.report(&["image", "identity", "a.hdd"])["id"], uuid);
    system(
        "qemu-img",
        &[
            "compare",
            "-f",
            "raw",
            "-F",
            "parallels",
            text(&rig.path("disk.raw")),
            text(&rig.path("a.hdd/root.hds")),
        ],
    )
    .unwrap();
    rig.ok(&["image", "create", "empty.hdd", "5M", "--format", "parallels"]);
    assert_eq!(rig.names("empty.hdd"), ["DiskDescriptor.xml", "root.hds"]);
    rig.ok(&["image", "check", "empty.hdd"]);
    // An existing file is not replaced by a folder without --force, and an existing folder never.
    for (target, force) in [("a.hdd", &[][..]), ("a.hdd", &["--force"])] {
        let (_, message) = rig.error(1, &[&["image", "convert", "disk.raw", target], force].concat());
        assert!(message.contains("not a regular file"), "{message}");
    }
    rig.ok(&["image", "convert", "disk.raw", "single.hds", "--to", "parallels"]);
    std::fs::rename(rig.path("single.hds"), rig.path("single.hdd")).unwrap();
    rig.ok(&["image", "convert", "disk.raw", "single.hdd", "--force"]);
    assert_eq!(rig.names("single.hdd"), ["DiskDescriptor.xml", "root.hds"]);
    rig.ok(&["image", "compare", "disk.raw", "single.hdd"]);
    for (number, source) in ["a.hdd", "a.hdd/root.hds"].iter().enumerate() {
        let copy = format!("copy{number}.hdd");
        rig.ok(&["clone", source, &copy, "--copy"]);
        assert_eq!(rig.names(&copy), ["DiskDescriptor.xml", "root.hds"]);
        rig.ok(&["image", "compare", "disk.raw", &copy]);
    }
    // A folder with several files cannot be cloned by sharing blocks.
    let (_, message) = rig.error(1, &["clone", "a.hdd", "b.hdd"]);
    assert!(message.contains("parallels"), "{message}");
    assert!(rig.names(".").iter().all(|name| !name.ends_with(".partial")));
}

/// The new file keeps the owner, mode and path of the old one.
#[test]
fn a_replaced_file_keeps_its_mode_and_links_are_followed() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
    let rig = Rig::empty();
    let bytes = noise(MIB, 24);
    rig.write("disk.raw", &bytes);
    std::fs::create_dir(rig.path("large")).unwrap();
    rig.write("large/web1.qcow2", b"old");
    let large = rig.path("large/web1.qcow2");
    std::fs::set_permissions(&large, std::fs::Permissions::from_mode(0o640)).unwrap();
    let owner = if rustix::process::getuid().is_root() {
        12_345
    } else {
        large.metadata().unwrap().uid()
    };
    chown(&large, Some(owner), None).unwrap();
    std::os::unix::fs::symlink("large/web1.qcow2", rig.path("web1.qcow2")).unwrap();
    rig.ok(&["image", "convert", "disk.raw", "web1.qcow2", "--force"]);
    assert!(rig.path("web1.qcow2").is_symlink());
    rig.ok(&["image", "compare", "disk.raw", "large/web1.qcow2"]);
    let now = large.metadata().unwrap();
    assert_eq!((now.permissions().mode() & 0o777, now.uid()), (0o640, owner));
    // A pipe is no file that could be replaced.
    rustix::fs::mknodat(
        rustix::fs::CWD,
        rig.path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let (_, message) = rig.error(1, &["image", "convert", "disk.raw", "pipe", "--force", "--to", "qcow2"]);
    assert!(message.contains("not a regular file"), "{message}");
}
