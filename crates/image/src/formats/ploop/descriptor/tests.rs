//! Tests descriptors of other programs, invalid ones, and changes of identities.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{DELTA_COUNT_MAX, DiskDescriptor, TEXT_BYTES_MAX, is_descriptor};
use crate::model::info::DeltaKind;
use crate::{Error, ImageId};

/// Written by hand after libyal's description of the format of Parallels Desktop, with elements that QEMU's
/// description lacks.
const DESKTOP: &str = "\u{feff}<?xml version='1.0' encoding='UTF-8'?>\r
<Parallels_disk_image Version=\"1.0\">
    <Disk_Parameters>
        <Disk_size>134217728</Disk_size>
        <Cylinders>262144</Cylinders>
        <PhysicalSectorSize>4096</PhysicalSectorSize>
        <LogicSectorSize>512</LogicSectorSize>
        <Heads>16</Heads>
        <Sectors>32</Sectors>
        <Padding>0</Padding>
        <Encryption>
            <Engine>{00000000-0000-0000-0000-000000000000}</Engine>
            <Data></Data>
            <Salt></Salt>
        </Encryption>
        <UID>{8C4D7D2B-4C9E-4D5D-9E58-32B6E4C4E1A0}</UID>
        <Name>harddisk1 &amp; more</Name>
        <Miscellaneous>
            <CompatLevel>level2</CompatLevel>
            <Bootable>1</Bootable>
        </Miscellaneous>
    </Disk_Parameters>
    <StorageData>
        <Storage>
            <Start>0</Start>
            <End>134217728</End>
            <Blocksize>2048</Blocksize>
            <Image>
                <GUID>{1c3d2f2b-6b0a-4a3e-8b52-0a3e6b0a4a3e}</GUID>
                <Type>Plain</Type>
                <File>harddisk1.hdd.0.{1c3d2f2b-6b0a-4a3e-8b52-0a3e6b0a4a3e}.hds</File>
            </Image>
            <Image>
                <GUID>{5fbaabe3-6958-40ff-92a7-860e329aab41}</GUID>
                <Type>Compressed</Type>
                <File>a &lt;b&gt;.hds</File>
            </Image>
        </Storage>
    </StorageData>
    <Snapshots>
        <Shot>
            <GUID>{1C3D2F2B-6B0A-4A3E-8B52-0A3E6B0A4A3E}</GUID>
            <ParentGUID>{00000000-0000-0000-0000-000000000000}</ParentGUID>
        </Shot>
        <Shot>
            <!-- kept -->
            <GUID>
                {5fbaabe3-6958-40ff-92a7-860e329aab41}
            </GUID>
            <ParentGUID>{1c3d2f2b-6b0a-4a3e-8b52-0a3e6b0a4a3e}</ParentGUID>
        </Shot>
    </Snapshots>
</Parallels_disk_image>
";

/// Written by hand in the form of `ploop_store_diskdescriptor`: without a version, and with a snapshot that is deleted
/// when it is unused.
const PLOOP: &str = "<?xml version=\"1.0\"?>
<Parallels_disk_image>
  <Disk_Parameters>
    <Disk_size>20971520</Disk_size>
    <Max_delta_size>41943040</Max_delta_size>
    <Cylinders>20805</Cylinders>
    <Heads>16</Heads>
    <Sectors>63</Sectors>
    <Padding>0</Padding>
  </Disk_Parameters>
  <StorageData>
    <Storage>
      <Start>0</Start>
      <End>20971520</End>
      <Blocksize>2048</Blocksize>
      <Preallocated>1</Preallocated>
      <Image>
        <GUID>{b9e9d0c8-4bd2-4bfb-a8b6-4d2b5c0d6a01}</GUID>
        <Type>Compressed</Type>
        <File>root.hds</File>
      </Image>
      <Image>
        <GUID>{5fbaabe3-6958-40ff-92a7-860e329aab41}</GUID>
        <Type>Compressed</Type>
        <File>root.hds.{0b0c1a52-9c9d-4d8e-8c4e-3f1b7a6d2e02}</File>
      </Image>
    </Storage>
  </StorageData>
  <Snapshots>
    <TopGUID>{5fbaabe3-6958-40ff-92a7-860e329aab41}</TopGUID>
    <Shot>
      <GUID>{b9e9d0c8-4bd2-4bfb-a8b6-4d2b5c0d6a01}</GUID>
      <ParentGUID>{00000000-0000-0000-0000-000000000000}</ParentGUID>
      <Temporary></Temporary>
    </Shot>
    <Shot>
      <GUID>{5fbaabe3-6958-40ff-92a7-860e329aab41}</GUID>
      <ParentGUID>{b9e9d0c8-4bd2-4bfb-a8b6-4d2b5c0d6a01}</ParentGUID>
    </Shot>
  </Snapshots>
</Parallels_disk_image>
";

fn parse(text: &str) -> Result<DiskDescriptor, Error> {
    DiskDescriptor::parse(text.as_bytes(), "web1.hdd/DiskDescriptor.xml")
}

fn id(number: u8) -> ImageId {
    ImageId([number; 16])
}

/// A disk with these deltas: number, number of the parent (0 for none), type.
fn tree(top: Option<u8>, deltas: &[(u8, u8, &str)]) -> String {
    let (mut images, mut shots) = (String::new(), String::new());
    for (number, parent, kind) in deltas {
        let (guid, parent) = (id(*number), id(*parent));
        let file = format!("<File>{number}.hds</File>");
        write!(
            images,
            "<Image><GUID>{{{guid}}}</GUID><Type>{kind}</Type>{file}</Image>"
        )
        .unwrap();
        write!(
            shots,
            "<Shot><GUID>{{{guid}}}</GUID><ParentGUID>{{{parent}}}</ParentGUID></Shot>"
        )
        .unwrap();
    }
    let top = top.map_or(String::new(), |top| format!("<TopGUID>{{{}}}</TopGUID>", id(top)));
    format!(
        "<Parallels_disk_image Version='1.0'><Disk_Parameters><Disk_size>2048</Disk_size><Padding>0</Padding></Disk_Parameters>\
         <StorageData><Storage><Start>0</Start><End>2048</End><Blocksize>8</Blocksize>{images}</Storage></StorageData>\
         <Snapshots>{top}{shots}</Snapshots></Parallels_disk_image>"
    )
}

fn chain(descriptor: &DiskDescriptor, of: ImageId) -> Vec<&str> {
    descriptor
        .chain_of(of)
        .iter()
        .map(|delta| delta.file.as_str())
        .collect()
}

#[test]
fn descriptors_of_other_programs_are_parsed() {
    let desktop = parse(DESKTOP).unwrap();
    assert_eq!(desktop.disk_bytes(), 64 << 30);
    assert_eq!(desktop.top(), DiskDescriptor::TOP);
    assert_eq!(
        desktop.id(),
        Some("8c4d7d2b-4c9e-4d5d-9e58-32b6e4c4e1a0".parse().unwrap())
    );
    let root = "harddisk1.hdd.0.{1c3d2f2b-6b0a-4a3e-8b52-0a3e6b0a4a3e}.hds";
    assert_eq!(chain(&desktop, desktop.top()), ["a <b>.hds", root]);
    assert_eq!(desktop.deltas()[0].kind, DeltaKind::Plain);
    assert_eq!(desktop.as_text(), DESKTOP);
    assert!(is_descriptor(DESKTOP.as_bytes()) && is_descriptor(PLOOP.as_bytes()));

    let ploop = parse(PLOOP).unwrap();
    assert_eq!((ploop.disk_bytes(), ploop.id()), (10 << 30, None));
    assert_eq!(
        chain(&ploop, ploop.top()),
        ["root.hds.{0b0c1a52-9c9d-4d8e-8c4e-3f1b7a6d2e02}", "root.hds"]
    );
    assert!(ploop.has_children(ploop.deltas()[0].id) && !ploop.has_children(ploop.top()));
}

#[test]
fn top_is_stated_or_has_the_usual_guid() {
    let kind = "Compressed";
    let branches = [(1, 0, kind), (2, 1, kind), (3, 2, kind), (4, 2, kind)];
    let descriptor = parse(&tree(Some(4), &branches)).unwrap();
    assert_eq!(chain(&descriptor, descriptor.top()), ["4.hds", "2.hds", "1.hds"]);
    assert_eq!(chain(&descriptor, id(3)), ["3.hds", "2.hds", "1.hds"]);
    assert!(chain(&descriptor, id(9)).is_empty());
    // If the top is stated, the usual GUID of a top has no special meaning.
    let usual = tree(Some(4), &branches).replace(&id(3).to_string(), &DiskDescriptor::TOP.to_string());
    assert_eq!(parse(&usual).unwrap().top(), id(4));
    let unnamed = tree(None, &branches).replace(&id(3).to_string(), &DiskDescriptor::TOP.to_string());
    assert_eq!(parse(&unnamed).unwrap().top(), DiskDescriptor::TOP);
    // A disk that never had a snapshot.
    let alone = tree(None, &[(1, 0, kind)]);
    assert_eq!(parse(&alone).unwrap().top(), id(1));
    let shots = alone.find("<Shot>").unwrap()..alone.find("</Snapshots>").unwrap();
    let without = alone.replace(&alone[shots], "");
    assert_eq!(parse(&without).unwrap().deltas(), parse(&alone).unwrap().deltas());
    let without = without.replace("<Snapshots></Snapshots>", "");
    assert_eq!(parse(&without).unwrap().deltas(), parse(&alone).unwrap().deltas());
    // The delta of a backup program is an ordinary one below the top.
    let backup = tree(Some(2), &branches).replace(&id(1).to_string(), &DiskDescriptor::BACKUP.to_string());
    assert_eq!(parse(&backup).unwrap().chain_of(id(2)).len(), 2);
}

#[test]
fn invalid_descriptors_are_errors() {
    let kind = "Compressed";
    let sound = tree(Some(2), &[(1, 0, kind), (2, 1, kind)]);
    parse(&sound).unwrap();
    let of = |deltas: &[(u8, u8, &str)]| tree(Some(2), deltas);
    let with = |from: &str, to: &str| {
        assert!(sound.contains(from), "{from}");
        sound.replacen(from, to, 1)
    };
    let two_shots = of(&[(1, 0, kind), (2, 1, kind)]).replace("<Shot>", "<Shot/><Shot>");
    for (text, expected) in [
        (of(&[(1, 2, kind), (2, 1, kind)]), "is its own ancestor"),
        (of(&[(1, 0, kind), (2, 2, kind)]), "is its own ancestor"),
        (
            of(&[(1, 0, kind), (2, 1, kind), (3, 4, kind), (4, 3, kind)]),
            "is its own ancestor",
        ),
        (of(&[(1, 0, kind), (2, 7, kind)]), "the parent of {02020202"),
        (of(&[(1, 0, kind), (1, 0, kind)]), "used by two images"),
        (of(&[(1, 0, kind), (2, 0, kind)]), "are both roots"),
        (of(&[(1, 0, kind), (2, 1, "Plain")]), "is a plain image, but"),
        (of(&[(1, 0, kind), (2, 1, "Weird")]), "is \"Weird\""),
        (of(&[(1, 0, kind), (0, 1, kind)]), "the nil UUID"),
        (of(&[(1, 0, kind), (3, 1, kind)]), "the top, {02020202"),
        (of(&[]), "it lists no image"),
        (tree(None, &[(1, 0, kind), (2, 1, kind)]), "the top image is missing"),
        (
            sound.replace(&id(2).to_string(), &DiskDescriptor::BACKUP.to_string()),
            "the delta of a backup",
        ),
        (two_shots, "has no GUID"),
        (with("Version='1.0'", "Version='2.0'"), "the version is \"2.0\""),
        (
            sound.replace("Parallels_disk_image", "domain"),
            "its root element is \"domain\"",
        ),
        (with("<Disk_size>2048</Disk_size>", ""), "has no Disk_size"),
        (with("<Disk_size>2048", "<Disk_size>0"), "the disk has 0 sectors"),
        (with("<Disk_size>2048", "<Disk_size>18014398509481984"), "sectors"),
        (
            with("<Disk_size>2048", "<Disk_size>99999999999999999999"),
            "Disk_size is",
        ),
        (with("<Disk_size>2048", "<Disk_size>-1"), "Disk_size is"),
        (with("<Disk_size>2048", "<Disk_size>+1"), "Disk_size is"),
        (with("<Disk_size>", "<Disk_size><a/>"), "Disk_size contains elements"),
        (
            with("<Disk_size>", "<Disk_size>1</Disk_size><Disk_size>"),
            "Disk_size occurs twice",
        ),
        (with("<Start>0", "<Start>1"), "Start is 1"),
        (with("<End>2048", "<End>2049"), "End is 2049"),
        (with("<File>1.hds</File>", ""), "Image has no File"),
        (with("<Padding>0", "<Padding>1"), "padding"),
        (
            with("<Padding>", "<Encryption><Engine>{0af0}</Engine></Encryption><Padding>"),
            "encryption",
        ),
        (
            with("<Padding>", "<Encryption><KeyId>key</KeyId></Encryption><Padding>"),
            "encryption",
        ),
        (with("<Storage>", "<Storage/><Storage>"), "2 parts of the disk"),
        (
            with("<Storage>", "<Volume><Parent>..</Parent></Volume><Storage>"),
            "another disk",
        ),
        (with("{01", "{0x"), "GUID is \"{0x"),
        (with("{01", "<!-- -->{01<!-- -->"), "character references"),
        (with("<Padding>", "<!DOCTYPE x><Padding>"), "it is not valid XML"),
        (with("<Padding>0", "<Padding>&x;"), "it is not valid XML"),
        (with("</Snapshots>", ""), "it is not valid XML"),
        (
            format!("<!DOCTYPE a [<!ENTITY x \"y\">]>{sound}"),
            "it is not valid XML",
        ),
        (String::new(), "it is not valid XML"),
    ] {
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
    let no_text = DiskDescriptor::parse(b"<Parallels_disk_image>\xff", "x")
        .unwrap_err()
        .to_string();
    assert!(no_text.contains("UTF-8") && no_text.contains("offset 22"), "{no_text}");
}

/// A truncated descriptor is refused at any length, without a panic.
#[test]
fn truncated_descriptor_is_an_error_at_any_length() {
    for text in [DESKTOP, PLOOP] {
        let end = text.trim_end().len();
        for length in 0..end {
            let cut = DiskDescriptor::parse(&text.as_bytes()[..length], "x");
            assert!(cut.is_err(), "{length} bytes");
        }
        assert!(DiskDescriptor::parse(&text.as_bytes()[..end], "x").is_ok());
    }
}

/// Everything that can grow in a text has a limit, and parsing within the limits is fast.
#[test]
fn descriptor_sizes_are_bounded() {
    let kind = "Compressed";
    let wrong = |text: &str, expected: &str| {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    };
    let many: Vec<_> = (1..=DELTA_COUNT_MAX).collect();
    let texts = |count: usize| {
        let one = tree(None, &[(1, 0, kind)]);
        let (image, shot) = (one.find("<Image>").unwrap(), one.find("<Shot>").unwrap());
        let (images_end, shots_end) = (one.find("</Storage>").unwrap(), one.find("</Snapshots>").unwrap());
        let mut text = one[..image].to_owned();
        let name = |number: usize| format!("{number:08x}-0000-0000-0000-000000000000");
        for number in &many[..count.min(many.len())] {
            text += &one[image..images_end].replace(&id(1).to_string(), &name(*number));
        }
        if count > many.len() {
            text += &one[image..images_end];
        }
        text += &one[images_end..shot];
        write!(text, "<TopGUID>{}</TopGUID>", name(count.min(many.len()))).unwrap();
        for number in &many {
            let pair = one[shot..shots_end].replace(&id(1).to_string(), &name(*number));
            text += &pair.replace(&ImageId::NIL.to_string(), &name(number - 1));
        }
        text + &one[shots_end..]
    };
    let most = parse(&texts(DELTA_COUNT_MAX)).unwrap();
    assert_eq!(most.chain_of(most.top()).len(), DELTA_COUNT_MAX);
    wrong(&texts(DELTA_COUNT_MAX + 1), "more than 1024 images");

    let sound = tree(None, &[(1, 0, kind)]);
    let long = " ".repeat(usize::try_from(TEXT_BYTES_MAX).unwrap() - sound.len());
    parse(&format!("{sound}{long}")).unwrap();
    wrong(&format!("{sound}{long} "), "1048577 bytes");
    let with_content = |inside: &str| sound.replace("<Padding>", &format!("{inside}<Padding>"));
    let nested = |depth: usize| with_content(&("<a>".repeat(depth) + &"</a>".repeat(depth)));
    parse(&nested(60_000)).unwrap();
    wrong(&nested(70_000), "nodes limit");
    let attributes = |count: usize| {
        let names: Vec<_> = (0..count).map(|number| format!(" a{number}=''")).collect();
        with_content(&format!("<a{}/>", names.concat()))
    };
    let long = "é".repeat(10_000);
    for (from, to) in [
        ("</Image>", "</"),
        ("<Disk_size>", "<Disk_size>"),
        ("<GUID>", "<GUID>"),
        ("'1.0'", "'"),
        (">Compressed", ">"),
    ] {
        let to = format!("{to}{long}{}", if to == "'" { "'" } else { "" });
        let error = parse(&sound.replacen(from, &to, 1)).unwrap_err().to_string();
        assert!(error.len() < 400, "{error}");
    }
    parse(&attributes(1000)).unwrap();
    wrong(&attributes(1100), "too many attributes");
}

#[test]
fn new_identity_changes_nothing_else() {
    let mut next = 0;
    let mut count = || {
        next += 1;
        Ok(id(next))
    };
    let before = parse(DESKTOP).unwrap();
    let after = before.renewed(&mut count).unwrap();
    // Byte for byte, except for the identity of the disk and that of its root, which keep their case.
    let expected = DESKTOP
        .replace("8C4D7D2B-4C9E-4D5D-9E58-32B6E4C4E1A0", &id(1).to_string())
        .replace("1C3D2F2B-6B0A-4A3E-8B52-0A3E6B0A4A3E", &id(2).to_string())
        .replace("1c3d2f2b-6b0a-4a3e-8b52-0a3e6b0a4a3e", &id(2).to_string());
    let in_name = "harddisk1.hdd.0.{1c3d2f2b-6b0a-4a3e-8b52-0a3e6b0a4a3e}";
    let renamed = format!("harddisk1.hdd.0.{{{}}}", id(2));
    assert_eq!(after.as_text(), expected.replace(&renamed, in_name));
    assert_eq!((after.id(), after.top()), (Some(id(1)), DiskDescriptor::TOP));
    assert_eq!(chain(&after, after.top()), chain(&before, before.top()));

    // A GUID without braces stays without braces.
    let bare = tree(Some(2), &[(1, 0, "Plain"), (2, 1, "Compressed")]).replace(['{', '}'], "");
    let new = BTreeMap::from([(id(2), id(7)), (id(9), id(8))]);
    let after = parse(&bare).unwrap().with_ids(&new).unwrap();
    assert_eq!(after.as_text(), bare.replace(&id(2).to_string(), &id(7).to_string()));
    assert_eq!(after.top(), id(7));

    let taken = BTreeMap::from([(id(2), id(1))]);
    assert!(parse(&bare).unwrap().with_ids(&taken).unwrap_err().is_corrupt());
    for meaning in [DiskDescriptor::TOP, DiskDescriptor::BACKUP, ImageId::NIL] {
        for pair in [(meaning, id(5)), (id(2), meaning)] {
            let refused = parse(&bare).unwrap().with_ids(&BTreeMap::from([pair]));
            assert!(matches!(refused, Err(Error::InvalidOption { .. })), "{pair:?}");
        }
    }
}

/// The product of the geometry is the disk size, as the specification demands.
#[test]
fn new_disk_geometry_matches_its_size() {
    for sectors in [1, 2, 31, 512, 2048, 20_481, 20_971_520, 1 << 40, (1 << 40) + 16] {
        let descriptor = DiskDescriptor::of_new(sectors * 512, 1 << 20, "root.hds", id(1)).unwrap();
        assert_eq!(descriptor.disk_bytes(), sectors * 512);
        let text = descriptor.as_text();
        let number = |name: &str| -> u64 {
            let start = text.find(&format!("<{name}>")).unwrap() + name.len() + 2;
            text[start..].split('<').next().unwrap().parse().unwrap()
        };
        assert_eq!(number("Cylinders") * number("Heads") * number("Sectors"), sectors);
        assert_eq!((number("End"), number("Blocksize")), (sectors, 2048));
        assert_eq!(chain(&descriptor, DiskDescriptor::TOP), ["root.hds"]);
    }
}
