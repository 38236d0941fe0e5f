//! Tests with a configuration of difficult cases. Each line that must not change is compared with the result.

use std::collections::BTreeMap;

use holdfast_block::SeededRandom;

use super::conflicts::with_name;
use super::{DiskChange, DiskPlace, Emulator, Identity, Medium, NewIdentity, Rewrite, Rewritten, rewrite};
use crate::hypervisor::domain_xml::DomainXml;
use crate::hypervisor::machine::DiskSource;
use crate::system::identity::{MacAddress, Uuid};

const HARD: &str = r#"<domain type='kvm' id='7' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <!-- web1 <name>web1</name> is not a name here -->
  <name>web1</name>
  <uuid>aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee</uuid>
  <genid>11111111-bbbb-4ccc-8ddd-eeeeeeeeeeee</genid>
  <metadata>
    <o:os xmlns:o="http://libosinfo.org/xmlns" name="web1"/>
    <app:disk xmlns:app='urn:app'><app:uuid>aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee</app:uuid> &amp; &#x263a;</app:disk>
  </metadata>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>
    <nvram template='/usr/share/OVMF/OVMF_VARS_4M.fd'>/nvram/web1_VARS.fd</nvram>
  </os>
  <sysinfo type='smbios'>
    <bios><entry name='vendor'>LENOVO</entry></bios>
    <system>
      <entry name='uuid'>AAAAAAAA-BBBB-4CCC-8DDD-EEEEEEEEEEEE</entry>
      <entry name='serial'>aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee</entry>
      <entry name='family'>web1</entry>
    </system>
  </sysinfo>
  <devices>
    <future:thing xmlns:future='urn:f'><future:mac address='1'/></future:thing>
    <disk type='file' device='disk' snapshot="external">
      <driver name='qemu' type='raw' cache='none'/>
      <source file='/images/a &amp; b.qcow2' startupPolicy='optional' index='3'>
        <seclabel model='dac' relabel='no'/>
      </source>
      <backingStore type='file'>
        <format type='qcow2'/><source file='/images/base.qcow2'/><backingStore/>
      </backingStore>
      <target dev="vda" bus='virtio'/>
      <serial>WD-123</serial>
    </disk>
    <disk type='network' device='disk'><auth username='x'><secret type='ceph' usage='u'/></auth>
      <source protocol='rbd' name='pool/image'><host name='mon'/></source><target dev='vdb' bus='virtio'/></disk>
    <disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='/dev/vg/c'/><target dev='vdc'/></disk>
    <disk type='block' device='cdrom'><source dev='/dev/sr0'/><target dev='sda'/><readonly/></disk>
    <disk type='file' device='disk'><source file='/gone'/><target dev='vdd'/></disk>
    <disk type='file' device='disk'><source file='/stays'/><target dev='vde'/></disk>
    <interface type='bridge'><mac address='52:54:00:aa:aa:aa'/><source bridge='br0'/>
      <virtualport type='openvswitch'><parameters interfaceid='aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee' profileid='p'/></virtualport>
    </interface>
    <interface type='network'><mac address="52:54:00:bb:bb:bb"/><target dev='web1-net'/></interface>
    <serial type='file'><source path='/log/web1.log'/><log file='/log/web1-x.log' append='on'/></serial>
    <serial type='pty'/>
    <channel type='unix'>
      <source mode='bind' path='/var/lib/libvirt/qemu/channel/target/domain-7-web1/org.qemu.guest_agent.0'/>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>
    <channel type='unix'><source mode='bind' path='/run/web12.sock'/><target type='virtio' name='a'/></channel>
    <channel type='unix'><source mode='connect' path='/run/web1.peer'/><target type='virtio' name='b'/></channel>
    <graphics type='vnc' port='5901' autoport='no' passwd='s&lt;cret'><listen type='address' address='::'/></graphics>
    <graphics type='spice' port='-1' autoport='yes'/>
    <tpm model='tpm-crb'><backend type='emulator' version='2.0'><encryption secret='x'/>
      <source type='dir' path='/tpm/web1'/></backend></tpm>
  </devices>
  <qemu:commandline><qemu:arg value='-foo'/></qemu:commandline>
</domain>
"#;

fn place(path: &str, medium: Medium, format: &str) -> DiskChange {
    DiskChange::Place(DiskPlace {
        path: path.into(),
        medium,
        format: format.to_owned(),
    })
}

fn new_identity() -> Identity {
    Identity::New(NewIdentity {
        name: "web1-restored".to_owned(),
        uuid: Uuid::from_random([9; 16]),
        macs: Some(vec![
            MacAddress::from_random([1; 3]),
            MacAddress::from_random([2; 3]),
            MacAddress::from_random([3; 3]),
        ]),
    })
}

fn request() -> Rewrite {
    Rewrite {
        identity: new_identity(),
        generation: Some(Uuid::from_random([8; 16])),
        disks: BTreeMap::from([
            ("vda".to_owned(), place("/new/it's <a>.qcow2", Medium::File, "qcow2")),
            ("vdb".to_owned(), place("/new/b.raw", Medium::File, "raw")),
            ("vdc".to_owned(), place("/dev/vg/new", Medium::BlockDevice, "raw")),
            ("sda".to_owned(), DiskChange::Empty),
            ("vdd".to_owned(), DiskChange::Remove),
        ]),
        nvram: Some("/nvram/web1-restored_VARS.fd".into()),
        tpm: Some("/tpm/web1-restored".into()),
        domain_type: None,
        emulator: Emulator::Keep,
    }
}

/// The lines of `one` that `other` does not contain.
fn only_in<'a>(one: &'a str, other: &str) -> Vec<&'a str> {
    let other: Vec<&str> = other.lines().collect();
    one.lines()
        .filter(|line| !other.contains(line))
        .map(str::trim)
        .collect()
}

#[test]
fn a_new_identity_changes_only_what_two_machines_cannot_share() {
    let Rewritten { text, notes, warnings } = rewrite(HARD, &request()).unwrap();
    assert_eq!(
        only_in(&text, HARD),
        [
            "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>",
            "<name>web1-restored</name>",
            "<uuid>09090909-0909-4909-8909-090909090909</uuid>",
            "<genid>08080808-0808-4808-8808-080808080808</genid>",
            "<nvram template='/usr/share/OVMF/OVMF_VARS_4M.fd'>/nvram/web1-restored_VARS.fd</nvram>",
            "<entry name='uuid'>09090909-0909-4909-8909-090909090909</entry>",
            "<entry name='serial'>09090909-0909-4909-8909-090909090909</entry>",
            "<driver name='qemu' type='qcow2' cache='none'/>",
            "<source file='/new/it&apos;s &lt;a&gt;.qcow2' startupPolicy='optional'>",
            "<disk type='file' device='disk'>",
            "<source file='/new/b.raw'/><target dev='vdb' bus='virtio'/><driver name='qemu' type='raw'/></disk>",
            "<disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='/dev/vg/new'/><target dev='vdc'/></disk>",
            "<disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk>",
            "<interface type='bridge'><mac address='52:54:00:01:01:01'/><source bridge='br0'/>",
            "<virtualport type='openvswitch'><parameters profileid='p'/></virtualport>",
            "<interface type='network'><mac address=\"52:54:00:02:02:02\"/><target dev='web1-net'/></interface>",
            "<serial type='file'><source path='/log/web1-restored.log'/><log file='/log/web1-restored-x.log' append='on'/></serial>",
            "<source type='dir' path='/tpm/web1-restored'/></backend></tpm>",
        ]
    );
    let removed = only_in(HARD, &text);
    assert!(removed.contains(&"<backingStore type='file'>") && removed.iter().any(|line| line.contains("dev='vdd'")));
    assert!(removed.iter().any(|line| line.contains("channel/target")));
    assert!(text.contains("web12.sock") && text.contains("web1.peer"));
    assert_eq!(notes.len(), 2, "{notes:?}");
    for what in ["5901", "/run/web12.sock", "web1-net", "arguments for QEMU"] {
        let count = warnings.iter().filter(|warning| warning.contains(what)).count();
        assert_eq!(count, 1, "{what}: {warnings:?}");
    }
    assert_eq!(warnings.len(), 4, "{warnings:?}");
    let read = DomainXml::parse(&text).unwrap();
    assert_eq!(read.disks[0].source, DiskSource::File("/new/it's <a>.qcow2".into()));
    assert_eq!(read.macs, ["52:54:00:01:01:01", "52:54:00:02:02:02"]);
    assert_eq!(read.nvram.as_deref(), Some("/nvram/web1-restored_VARS.fd"));
}

/// The state of the guest was rolled back, so the generation id changes, and nothing else.
#[test]
fn a_kept_identity_changes_only_the_generation() {
    let request = Rewrite {
        identity: Identity::Keep,
        generation: Some(Uuid::from_random([8; 16])),
        disks: BTreeMap::new(),
        nvram: None,
        tpm: None,
        domain_type: None,
        emulator: Emulator::Keep,
    };
    let done = rewrite(HARD, &request).unwrap();
    let expected = HARD
        .replace(
            "11111111-bbbb-4ccc-8ddd-eeeeeeeeeeee",
            "08080808-0808-4808-8808-080808080808",
        )
        .replace(" id='7'", "");
    assert_eq!(done.text, expected);
    assert!(done.notes.is_empty() && done.warnings.is_empty());
    let named = Rewrite {
        identity: Identity::Named("web & co".to_owned()),
        ..request
    };
    let named = rewrite(HARD, &named).unwrap().text;
    assert_eq!(
        named,
        expected.replace("\n  <name>web1</name>", "\n  <name>web &amp; co</name>")
    );
}

#[test]
fn firmware_variables_are_found_in_all_their_forms() {
    let request = Rewrite {
        identity: Identity::Keep,
        nvram: Some("/n".into()),
        ..request()
    };
    let changed = |os: &str| rewrite(&format!("<domain><name>a</name>{os}</domain>"), &request);
    for (before, after) in [
        ("<os><nvram>/o</nvram></os>", "<os><nvram>/n</nvram></os>"),
        (
            "<os><nvram template='/t'/></os>",
            "<os><nvram template='/t'>/n</nvram></os>",
        ),
        (
            "<os><nvram type='file'><source file='/o'/></nvram></os>",
            "<os><nvram type='file'><source file='/n'/></nvram></os>",
        ),
        (
            "<os firmware='efi'>\n  <type/>\n</os>",
            "<os firmware='efi'>\n  <type/>\n  <nvram>/n</nvram>\n</os>",
        ),
    ] {
        assert_eq!(
            changed(before).unwrap().text,
            format!("<domain><name>a</name>{after}</domain>")
        );
    }
    let network = "<os><nvram type='network'><source protocol='iscsi' name='x'/></nvram></os>";
    assert!(changed(network).unwrap_err().contains("not in a file"));
}

/// libvirt derives the folder from the machine's UUID unless a folder is configured. The state of an external swtpm
/// is not managed by libvirt.
#[test]
fn the_path_of_a_tpm_state_changes_only_if_it_is_configured() {
    for tpm in [
        "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>",
        "<tpm model='tpm-crb'><backend type='external'><source type='unix' mode='connect' path='/s'/></backend></tpm>",
    ] {
        let text = format!("<domain><name>a</name><devices>{tpm}</devices></domain>");
        let request = Rewrite {
            nvram: None,
            ..request()
        };
        let done = rewrite(&text, &request).unwrap();
        assert!(done.text.contains(tpm), "{}", done.text);
        assert_eq!(
            done.warnings.len(),
            usize::from(tpm.contains("external")),
            "{:?}",
            done.warnings
        );
    }
}

#[test]
fn disks_that_cannot_be_moved_are_refused_with_a_reason() {
    let encrypted = HARD.replace(
        "<seclabel model='dac' relabel='no'/>",
        "<encryption format='luks'><secret type='passphrase' uuid='x'/></encryption>",
    );
    assert!(rewrite(&encrypted, &request()).unwrap_err().contains("encrypted"));
    let Identity::New(mut incomplete) = new_identity() else {
        unreachable!("the identity is new");
    };
    incomplete.macs.as_mut().unwrap().truncate(1);
    let incomplete = Rewrite {
        identity: Identity::New(incomplete),
        ..request()
    };
    assert!(rewrite(HARD, &incomplete).unwrap_err().contains("network cards"));
    assert!(rewrite("<domain>", &request()).is_err());
}

/// An image that is a slice of a file, or has a data file, becomes a plain image.
#[test]
fn a_composed_source_becomes_plain() {
    let text = "<domain><name>a</name><devices><disk type='file'><source file='/o'><slices><slice type='storage' \
                offset='1' size='2'/></slices></source><target dev='vda'/></disk></devices></domain>";
    let done = rewrite(
        text,
        &Rewrite {
            identity: Identity::Keep,
            nvram: None,
            ..request()
        },
    );
    assert!(
        done.unwrap()
            .text
            .contains("<source file='/new/it&apos;s &lt;a&gt;.qcow2'/><target")
    );
}

#[test]
fn a_name_is_replaced_as_a_whole_word() {
    for (path, expected) in [
        ("/run/vm.sock", "/run/new.sock"),
        ("/run/vms/vm-vm_1", "/run/vms/new-new_1"),
        ("/vmvm/xvm/vm", "/vmvm/xvm/new"),
    ] {
        assert_eq!(with_name(path, "vm", "new"), expected);
    }
    assert_eq!(with_name("/a", "", "new"), "/a");
}

/// Foreign lines are inserted at random places in a configuration. The result is the same with and without them, and
/// the lines are unchanged.
#[test]
fn foreign_lines_stay_byte_for_byte() {
    let expected = rewrite(HARD, &request()).unwrap().text;
    let strangers = [
        "<!-- <uuid>1</uuid> & -->",
        "  <x:y xmlns:x='urn:x' a='\"' >\t<x:name>web1</x:name><x:disk/></x:y>",
        "<unknown value=\"&gt;\"/>  ",
        "<?instruction web1?>",
    ];
    let mut random = SeededRandom::new(7);
    for round in 0..300 {
        let (mut text, mut count) = (String::new(), 0);
        for line in HARD.lines() {
            text.push_str(line);
            text.push('\n');
            // A foreign line inside a removed element is removed with it.
            let continues_inside =
                line.contains("backingStore") || line.contains("<format") || line.contains("<channel type='unix'>");
            if !continues_inside && random.below(5) == 0 && line != "</domain>" {
                text.push_str(strangers[usize::try_from(random.below(4)).unwrap()]);
                text.push('\n');
                count += 1;
            }
        }
        let done = rewrite(&text, &request()).unwrap().text;
        let is_stranger = |line: &&str| strangers.contains(line);
        assert_eq!(done.lines().filter(is_stranger).count(), count, "round {round}");
        let without: String = done
            .lines()
            .filter(|line| !is_stranger(line))
            .fold(String::new(), |text, line| text + line + "\n");
        assert_eq!(without, expected, "round {round}");
    }
}

/// A broken configuration is refused, and never results in XML that cannot be parsed.
#[test]
fn broken_configurations_give_an_error_or_valid_xml() {
    let mut random = SeededRandom::new(8);
    let (mut done_count, mut refused_count) = (0, 0);
    for _ in 0..4000 {
        let mut lines: Vec<&str> = HARD.lines().collect();
        for _ in 0..=random.below(3) {
            let at = usize::try_from(random.below(lines.len() as u64)).unwrap();
            match random.below(3) {
                0 => drop(lines.remove(at)),
                1 => lines.insert(at, lines[at]),
                _ => {
                    let to = usize::try_from(random.below(lines.len() as u64)).unwrap();
                    lines.swap(at, to);
                }
            }
        }
        match rewrite(&lines.join("\n"), &request()) {
            Ok(done) => {
                done_count += 1;
                DomainXml::parse(&done.text).unwrap();
            }
            Err(_) => refused_count += 1,
        }
    }
    assert!(done_count > 100 && refused_count > 100, "{done_count} {refused_count}");
}

#[test]
fn accelerator_and_emulator_are_changed_on_request() {
    let text = "<domain type='kvm'><name>a</name><cpu mode='host-passthrough' check='none'><feature name='x'/></cpu><devices>\
        <emulator>/usr/libexec/qemu-kvm</emulator><disk><target dev='vda'/></disk></devices></domain>";
    let request = Rewrite {
        identity: Identity::Keep,
        generation: Some(Uuid::from_random([1; 16])),
        disks: BTreeMap::new(),
        nvram: None,
        tpm: None,
        domain_type: Some("qemu".to_owned()),
        emulator: Emulator::OfHypervisor,
    };
    let done = rewrite(text, &request).unwrap();
    assert_eq!(
        done.text,
        "<domain type='qemu'><name>a</name><cpu mode='maximum'/><devices><disk><target dev='vda'/></disk></devices></domain>"
    );
    assert!(done.notes.len() == 2 && done.warnings[0].contains("host-passthrough"));
    assert_eq!(rewrite(&done.text, &request).unwrap().text, done.text);
    let custom = text.replace("host-passthrough", "custom");
    assert!(rewrite(&custom, &request).unwrap().text.contains("mode='custom'"));
}
