use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::num::NonZero;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, MemoryDevice, SeededRandom};
use holdfast_image::{Format, ImageId};

use super::{ImageReading, OvaDisk, OvaOutput, OvaReader, OvaWriteOptions, write_ova};
use crate::ova::disk::StreamImages;
use crate::reader::{ArchiveReader as _, Piece};
use crate::tar::{TarReader, header, padding_of};
use crate::{Error, Result};

pub(super) const MIB: u64 = 1 << 20;
pub(super) const THREADS: NonZero<usize> = NonZero::new(2).unwrap();
pub(super) const READING: ImageReading = ImageReading {
    images: StreamImages::Streamed,
    threads: THREADS,
};

pub(super) fn descriptor(disks: &[(&str, u64)], format: &str) -> String {
    let numbered = || disks.iter().enumerate();
    let files: Vec<String> = numbered()
        .map(|(number, (name, _))| format!("<File ovf:id=\"file{number}\" ovf:href=\"{name}\"/>"))
        .collect();
    let entries: Vec<String> = numbered()
        .map(|(number, (_, size))| {
            format!(
                "<Disk ovf:capacity=\"{size}\" ovf:diskId=\"disk{number}\" ovf:fileRef=\"file{number}\" ovf:format=\"{format}\"/>"
            )
        })
        .collect();
    let (files, entries) = (files.concat(), entries.concat());
    format!(
        "<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\"><References>\
         {files}</References><DiskSection><Info/>{entries}</DiskSection><VirtualSystem ovf:id=\"web1\"><Info/></VirtualSystem></Envelope>"
    )
}

pub(super) const STREAM: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";

pub(super) fn devices() -> [Arc<MemoryDevice>; 2] {
    let mut random = SeededRandom::new(5);
    let first = MemoryDevice::new(5 * MIB);
    first.write_at(&random.bytes(700_000), 100_000).unwrap();
    first.write_at(&[7; 3000], 4 * MIB).unwrap();
    let second = MemoryDevice::new(2 * MIB + 512);
    second.write_at(&[9; 512], 2 * MIB).unwrap();
    [Arc::new(first), Arc::new(second)]
}

fn written(is_file: bool) -> Vec<u8> {
    let disk = |(number, device): (usize, &Arc<MemoryDevice>)| OvaDisk {
        href: format!("disk{number}.vmdk"),
        id: ImageId::random().unwrap(),
        device: Arc::clone(device) as Arc<dyn BlockDevice>,
    };
    let devices = devices();
    let disks: Vec<OvaDisk<'_>> = devices.iter().enumerate().map(disk).collect();
    let text = descriptor(&[("disk0.vmdk", 5 * MIB), ("disk1.vmdk", 2 * MIB + 512)], STREAM);
    let folder = tempfile::tempdir().unwrap();
    let mut file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(folder.path().join("a.ova"))
        .unwrap();
    let copy = file.try_clone().unwrap();
    let output = if is_file {
        OvaOutput::File(copy)
    } else {
        OvaOutput::Pipe(Box::new(copy), folder.path().to_owned())
    };
    let options = OvaWriteOptions {
        threads: THREADS,
        level: None,
        time: 1,
    };
    let mut reported = 0;
    let report = write_ova(output, "web1", &text, &disks, options, &mut |done| {
        reported = done;
        Ok(())
    });
    assert_eq!(reported, 7 * MIB + 512);
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!(report.unwrap().bytes, bytes.len() as u64);
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        1,
        "no temporary file is left"
    );
    bytes
}

fn read(archive: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut tar = TarReader::new(archive);
    let first = tar.next()?.unwrap();
    let mut reader = OvaReader::open_at_descriptor(tar, &first, READING)?;
    let sizes = reader
        .disks()
        .iter()
        .map(|disk| usize::try_from(disk.size_bytes).unwrap());
    let mut disks: Vec<Vec<u8>> = sizes.map(|size| vec![0; size]).collect();
    let mut ended = 0;
    while let Some(piece) = reader.next()? {
        match piece {
            Piece::Data { disk, offset, bytes } => {
                let start = usize::try_from(offset).unwrap();
                disks[disk][start..start + bytes.len()].copy_from_slice(bytes);
            }
            Piece::End { .. } => ended += 1,
        }
    }
    assert_eq!(ended, disks.len());
    Ok(disks)
}

/// An archive of these members.
pub(super) fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in members {
        bytes.extend(header(name, content.len() as u64, 0));
        bytes.extend(*content);
        bytes.resize(bytes.len() + padding_of(content.len() as u64), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

#[test]
fn packages_written_to_a_file_or_a_pipe_are_read_again() {
    for is_file in [true, false] {
        let found = read(&written(is_file)).unwrap();
        let [first, second] = devices();
        assert!(
            found[0] == first.to_bytes() && found[1] == second.to_bytes(),
            "{is_file}"
        );
    }
}

/// The reader's list of unverified files, after reading everything.
fn unverified(bytes: &[u8]) -> String {
    let mut tar = TarReader::new(bytes);
    let first = tar.next().unwrap().unwrap();
    let mut reader = OvaReader::open_at_descriptor(tar, &first, READING).unwrap();
    while reader.next().unwrap().is_some() {}
    reader.unverified().join("; ")
}

#[test]
fn members_are_named_in_order_and_the_manifest_is_last() {
    let bytes = written(true);
    let mut tar = TarReader::new(&bytes[..]);
    let mut names = Vec::new();
    while let Some(member) = tar.next().unwrap() {
        names.push(member.name);
    }
    assert_eq!(names, ["web1.ovf", "disk0.vmdk", "disk1.vmdk", "web1.mf"]);
}

#[test]
fn a_changed_byte_anywhere_is_found() {
    let bytes = written(true);
    for at in (0..bytes.len() - 1024).step_by(1777) {
        let mut changed = bytes.clone();
        changed[at] ^= 4;
        // Padding, owners and times do not affect the content.
        if let Ok(found) = read(&changed) {
            let [first, second] = devices();
            assert!(found[0] == first.to_bytes() && found[1] == second.to_bytes(), "{at}");
        }
    }
}

#[test]
fn a_truncated_archive_is_an_error() {
    let bytes = written(true);
    for length in (512..bytes.len() - 1024).step_by(4999) {
        assert!(read(&bytes[..length]).is_err(), "{length}");
    }
}

/// Images that are not stream-optimized, with the manifest first, as ovftool writes it.
#[test]
fn images_of_other_formats_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let [first, _] = devices();
    for (format, extension, uri) in [
        (
            Format::Vhd,
            "vhd",
            "http://technet.microsoft.com/en-us/library/bb676673.aspx",
        ),
        (
            Format::Vmdk,
            "vmdk",
            "http://www.vmware.com/interfaces/specifications/vmdk.html#sparse",
        ),
        (
            Format::Raw,
            "img",
            "http://www.gnome.org/~markmc/qcow-raw-image-format.html",
        ),
    ] {
        let path = folder.path().join(format!("disk.{extension}"));
        let options = holdfast_image::CreateOptions::new(format, 5 * MIB);
        holdfast_image::create(&path, &options).unwrap();
        let image = holdfast_image::open_mut(
            &path,
            &holdfast_image::OpenOptions {
                format: Some(format),
                ..Default::default()
            },
        )
        .unwrap();
        image.write_at(&first.to_bytes(), 0).unwrap();
        image.flush().unwrap();
        drop(image);
        let content = std::fs::read(&path).unwrap();
        let name = format!("disk.{extension}");
        let text = descriptor(&[(&name, 5 * MIB)], uri);
        let digest = crate::checksum::sha1_hex(&content);
        let manifest = format!(
            "SHA1(web1.ovf)= {}\nSHA1({name})= {digest}\n",
            crate::checksum::sha1_hex(text.as_bytes())
        );
        let bytes = archive(&[
            ("web1.ovf", text.as_bytes()),
            ("web1.mf", manifest.as_bytes()),
            (&name, &content),
        ]);
        assert!(read(&bytes).unwrap()[0] == first.to_bytes(), "{format}");
        // A packed folder: names are relative to it.
        let bytes = archive(&[
            ("sub/web1.ovf", text.as_bytes()),
            ("sub/web1.mf", manifest.as_bytes()),
            (&format!("sub/{name}"), &content),
        ]);
        assert!(read(&bytes).unwrap()[0] == first.to_bytes(), "{format}, in a folder");
        let wrong = manifest.replace(&digest, &"0".repeat(40));
        let bytes = archive(&[
            ("web1.ovf", text.as_bytes()),
            ("web1.mf", wrong.as_bytes()),
            (&name, &content),
        ]);
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains("the manifest says 0000"), "{error}");
    }
}

#[test]
fn a_manifest_at_the_end_is_checked_with_every_algorithm() {
    let (text, content) = (descriptor(&[("disk.img", 4096)], "raw"), vec![7; 4096]);
    for (name, length) in [("SHA1", 40), ("SHA256", 64), ("SHA512", 128)] {
        let manifest = format!("{name}(disk.img)= {}\n", "0".repeat(length));
        let members: [(&str, &[u8]); 3] = [
            ("a.ovf", text.as_bytes()),
            ("disk.img", &content),
            ("a.mf", manifest.as_bytes()),
        ];
        assert!(read(&archive(&members)).is_err(), "{name}");
        assert_eq!(read(&archive(&members[..2])).unwrap()[0], content);
        // Files without a digest are reported as unverified.
        assert!(unverified(&archive(&members[..2])).starts_with("the archive has no manifest"));
        let other = manifest.replace("disk.img", "gone.img");
        let members = [members[0], members[1], ("a.mf", other.as_bytes())];
        let message = unverified(&archive(&members));
        assert!(
            message.contains("\"gone.img\", which the archive does not have"),
            "{message}"
        );
        assert!(message.contains("\"disk.img\" is not in the manifest"), "{message}");
    }
    assert_eq!(unverified(&written(true)), "");
    // An unsupported algorithm is not damage.
    let members: [(&str, &[u8]); 3] = [
        ("a.ovf", text.as_bytes()),
        ("disk.img", &content),
        ("a.mf", b"BLAKE3(a.ovf)= 00\nBLAKE3(disk.img)= 00\n"),
    ];
    assert_eq!(read(&archive(&members)).unwrap()[0], content);
    let message = unverified(&archive(&members));
    assert!(
        message.contains("\"disk.img\" by an algorithm that is not known"),
        "{message}"
    );
    assert!(!message.contains("is not in the manifest"), "{message}");
    // oVirt rounds up to GiB, and the image may be smaller; bytes of the image beyond the disk must be zero.
    let counted = |count: u64, content: &[u8]| {
        let text = descriptor(&[("disk.img", count)], "raw")
            .replace("ovf:diskId", "ovf:capacityAllocationUnits=\"byte * 2^22\" ovf:diskId");
        read(&archive(&[("a.ovf", text.as_bytes()), ("disk.img", content)]))
    };
    let mut disk = content.clone();
    disk.resize(1 << 22, 0);
    assert!(counted(1, &content).unwrap()[0] == disk);
    disk.resize(5 << 20, 0);
    assert!(counted(1, &disk).unwrap()[0] == disk[..1 << 22]);
    disk[(5 << 20) - 1] = 1;
    let error = counted(1, &disk).unwrap_err().to_string();
    assert!(error.contains("has data behind the 4194304 bytes"), "{error}");
    // An image of half the capacity is refused.
    let text = descriptor(&[("disk.img", 4 << 20)], "raw");
    let error = read(&archive(&[("a.ovf", text.as_bytes()), ("disk.img", &content)])).unwrap_err();
    assert!(matches!(error, Error::Corrupt { what: "disk", .. }), "{error}");
}

#[test]
fn missing_and_surplus_members_are_errors() {
    let text = descriptor(&[("disk0.vmdk", MIB)], STREAM);
    let error = read(&archive(&[("web1.ovf", text.as_bytes())]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("names \"disk0.vmdk\" for disk0"), "{error}");
    assert!(error.contains("has \"web1.ovf\""), "{error}");
    let large = MemoryDevice::new(4 * MIB);
    let folder = tempfile::tempdir().unwrap();
    let mut file = File::create(folder.path().join("a")).unwrap();
    let disk = OvaDisk {
        href: "disk0.vmdk".to_owned(),
        id: ImageId::random().unwrap(),
        device: Arc::new(large),
    };
    let options = OvaWriteOptions {
        threads: THREADS,
        level: None,
        time: 1,
    };
    let output = OvaOutput::File(file.try_clone().unwrap());
    write_ova(output, "web1", &text, &[disk], options, &mut |_| Ok(())).unwrap();
    std::io::Write::flush(&mut file).unwrap();
    let error = read(&std::fs::read(folder.path().join("a")).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Corrupt { what: "disk", .. }), "{error}");
}
