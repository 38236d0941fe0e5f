//! The parsers of configurations, for fuzzing: see [`holdfast_block::hostile`].

use std::collections::BTreeMap;

use holdfast_block::hostile::{Outcome, Parser};

use crate::{Disk, DiskKind, Machine, libvirt, ovf, proxmox, virtualbox, xen};

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "libvirt_machine",
        feed: libvirt_machine,
    },
    Parser {
        name: "ovf_descriptor",
        feed: ovf_descriptor,
    },
    Parser {
        name: "proxmox_conf",
        feed: proxmox_conf,
    },
    Parser {
        name: "virtualbox_machine",
        feed: virtualbox_machine,
    },
    Parser {
        name: "virtualbox_registry",
        feed: virtualbox_registry,
    },
    Parser {
        name: "xen_records",
        feed: xen_records,
    },
    Parser {
        name: "xen_suspended",
        feed: xen_suspended,
    },
];

/// Valid bytes for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let domain = "<domain type='kvm'><name>web1</name><uuid>7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f</uuid><memory unit='MiB'>64</memory>\
         <vcpu current='2'>4</vcpu><os firmware='efi'><type>hvm</type><boot dev='hd'/></os><cpu><topology sockets='1' cores='2' \
         threads='1'/></cpu><clock offset='localtime'/><devices><disk type='file'><source file='/a'/><target dev='vda' bus='virtio'/>\
         <boot order='1'/></disk><disk device='cdrom'><target dev='hdc' bus='ide'/><readonly/></disk><controller type='scsi' \
         model='virtio-scsi'/><interface type='network'><mac address='52:54:00:00:00:01'/><source network='default'/>\
         <model type='virtio'/></interface><hostdev type='pci'/><tpm/></devices></domain>";
    let machine = libvirt::read(domain).expect("it is well formed").value;
    vec![
        ("libvirt_machine", "machine", domain.as_bytes().to_vec()),
        (
            "ovf_descriptor",
            "esxi",
            sample(include_str!("../tests/samples/esxi.ovf")),
        ),
        (
            "ovf_descriptor",
            "ovirt",
            sample(include_str!("../tests/samples/ovirt.ovf")),
        ),
        (
            "ovf_descriptor",
            "virtualbox",
            sample(include_str!("../tests/samples/virtualbox.ovf")),
        ),
        (
            "ovf_descriptor",
            "xenserver",
            sample(include_str!("../tests/samples/xenserver.ovf")),
        ),
        ("ovf_descriptor", "written", written_as_ovf(&machine).into_bytes()),
        (
            "proxmox_conf",
            "backup",
            include_bytes!("../tests/samples/proxmox.conf").to_vec(),
        ),
        ("proxmox_conf", "written", written_for_proxmox(&machine).into_bytes()),
        (
            "virtualbox_machine",
            "snapshot",
            sample(include_str!("../tests/samples/machine.vbox")),
        ),
        (
            "virtualbox_machine",
            "written",
            written_for_virtualbox(&machine).into_bytes(),
        ),
        (
            "virtualbox_registry",
            "machines",
            sample(include_str!("../tests/samples/VirtualBox.xml")),
        ),
        ("xen_records", "machine", written_for_xen(&machine).into_bytes()),
        (
            "xen_suspended",
            "checkpoint",
            sample(include_str!("../tests/samples/suspended-ova.xml")),
        ),
    ]
}

/// The domain XML of a machine, converted for every platform.
pub fn libvirt_machine(bytes: &[u8]) -> Outcome {
    match libvirt::read(&String::from_utf8_lossy(bytes)) {
        Ok(read) => written_everywhere(&read.value),
        Err(_) => Outcome::Refused,
    }
}

/// The descriptor of an OVF package, converted for every platform.
pub fn ovf_descriptor(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(package) = ovf::OvfPackage::parse(&text) {
        for name in package.files.iter().flat_map(ovf::OvfFile::names) {
            assert!(
                !name.starts_with('/') && !name.contains("../"),
                "{name:?} leaves the folder"
            );
        }
    }
    match ovf::read(&text) {
        Ok(read) => written_everywhere(&read.value),
        Err(_) => Outcome::Refused,
    }
}

/// The configuration of a machine of Proxmox, converted for every platform.
pub fn proxmox_conf(bytes: &[u8]) -> Outcome {
    match proxmox::read(&String::from_utf8_lossy(bytes)) {
        Ok(read) => written_everywhere(&read.value),
        Err(_) => Outcome::Refused,
    }
}

/// The settings of a machine of VirtualBox, converted for every platform.
pub fn virtualbox_machine(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(media) = virtualbox::media(&text) {
        let knows = |uuid: &String| media.iter().any(|medium| medium.uuid == *uuid);
        let mut parents = media.iter().filter_map(|medium| medium.parent.as_ref());
        assert!(parents.all(knows), "a parent does not exist");
        restored_for_virtualbox(&text, &media);
    }
    if let Ok(said) = virtualbox::settings(&text) {
        for snapshot in &said.snapshots {
            virtualbox::read_at(&text, &snapshot.uuid).ok();
        }
    }
    match virtualbox::read(&text) {
        Ok(read) => written_everywhere(&read.value),
        Err(_) => Outcome::Refused,
    }
}

/// Restores the settings with other images: a second restore must not change them.
fn restored_for_virtualbox(text: &str, media: &[virtualbox::Medium]) {
    let image = |(number, medium): (usize, &virtualbox::Medium)| (medium.uuid.clone(), image_of(number));
    let options = virtualbox::RestoredOptions {
        name: "a<b".to_owned(),
        identity: virtualbox::RestoredIdentity::Same,
        disks: media.iter().enumerate().map(image).collect(),
        nvram: None,
    };
    let Ok(restored) = virtualbox::restored(text, &options) else {
        return;
    };
    let listed = virtualbox::media(&restored.value).expect("the changed text can be read");
    let disks = listed.iter().map(|medium| {
        let image = options.disks.values().find(|image| image.uuid == medium.uuid);
        (medium.uuid.clone(), image.expect("every image was listed").clone())
    });
    let again = virtualbox::RestoredOptions {
        disks: disks.collect(),
        ..options.clone()
    };
    let again = virtualbox::restored(&restored.value, &again).expect("the changed text can be changed again");
    assert_eq!(again.value, restored.value, "the second change changes nothing");
}

/// The registry of VirtualBox's machines.
pub fn virtualbox_registry(bytes: &[u8]) -> Outcome {
    match virtualbox::registry(&String::from_utf8_lossy(bytes)) {
        Ok(_) => Outcome::Decoded,
        Err(_) => Outcome::Refused,
    }
}

/// The records of a machine of XenServer, converted for every platform.
pub fn xen_records(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(records) = xen::XenRecords::parse(&text) {
        records.disks().ok();
    }
    match xen::read(&text) {
        Ok(read) => written_everywhere(&read.value),
        Err(_) => Outcome::Refused,
    }
}

/// The records of a suspended machine of XenServer, turned into those of another machine.
pub fn xen_suspended(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    let Ok(before) = xen::SuspendedMachine::read(&text) else {
        return Outcome::Refused;
    };
    let Ok(changed) = xen::suspended_machine(&text, &text, Some("a<b")) else {
        return Outcome::Refused;
    };
    let after = xen::SuspendedMachine::read(&changed).expect("the changed text can be read");
    assert_eq!(after.name, "a<b");
    let named = xen::SuspendedMachine {
        name: before.name.clone(),
        ..after
    };
    assert_eq!(named, before, "the memory and disks differ");
    Outcome::Decoded
}

fn written_everywhere(machine: &Machine) -> Outcome {
    let options = libvirt::LibvirtOptions {
        domain_type: "kvm".to_owned(),
        disks: BTreeMap::new(),
        network: "default".to_owned(),
    };
    let domain = libvirt::write(machine, &options).value;
    libvirt::read(&domain).expect("the written text can be read");
    xen::read(&written_for_xen(machine)).expect("the written text can be read");
    ovf::read(&written_as_ovf(machine)).expect("the written text can be read");
    let settings = written_for_virtualbox(machine);
    let again = virtualbox::read(&settings).expect("the written text can be read").value;
    let count = |machine: &Machine| machine.disks.iter().filter(|disk| disk.kind == DiskKind::Disk).count();
    let media = virtualbox::media(&settings).expect("the written text can be read");
    assert_eq!(media.len(), count(&again), "each disk has its image");
    let conf = written_for_proxmox(machine);
    let again = proxmox::read(&conf).expect("the written text can be read").value;
    let conf_again = written_for_proxmox(&again);
    let again_again = proxmox::read(&conf_again).expect("the written text can be read").value;
    assert_eq!(again.cards, again_again.cards, "a second round trip changes nothing");
    assert_eq!(
        again.description, again_again.description,
        "a second round trip changes nothing"
    );
    Outcome::Decoded
}

/// A sample for fuzzers: without indentation, which adds no coverage.
fn sample(text: &str) -> Vec<u8> {
    text.lines().map(str::trim_start).collect::<String>().into_bytes()
}

fn written_as_ovf(machine: &Machine) -> String {
    let file = |disk: &Disk| {
        let file = ovf::DiskFile {
            href: "a.vmdk".to_owned(),
            size_bytes: Some(1),
            capacity_bytes: 1 << 30,
            populated_bytes: None,
        };
        (disk.key.clone(), file)
    };
    let options = ovf::OvfOptions {
        disks: machine.disks.iter().map(file).collect(),
    };
    ovf::write(machine, &options).value
}

fn written_for_proxmox(machine: &Machine) -> String {
    let options = proxmox::ProxmoxOptions {
        vm_id: 100,
        storage: "local".to_owned(),
        bridge: "vmbr0".to_owned(),
        disks: machine.disks.iter().map(|disk| (disk.key.clone(), 1 << 30)).collect(),
    };
    proxmox::write(machine, &options).value.config
}

fn written_for_virtualbox(machine: &Machine) -> String {
    let image = |(number, disk): (usize, &Disk)| (disk.key.clone(), image_of(number));
    let options = virtualbox::VirtualBoxOptions {
        uuid: "00000000-0000-4000-8000-000000000001".to_owned(),
        disks: machine.disks.iter().enumerate().map(image).collect(),
        network: virtualbox::NetworkAttachment::Nat,
    };
    virtualbox::write(machine, &options).value
}

fn image_of(number: usize) -> virtualbox::Image {
    virtualbox::Image {
        uuid: format!("00000000-0000-4000-8000-{number:012}"),
        location: format!("{number}.vdi"),
        format: "VDI".to_owned(),
    }
}

fn written_for_xen(machine: &Machine) -> String {
    let mut options = xen::XenOptions {
        host_name: "host",
        time: "19700101T00:00:00Z",
        new_uuid: &mut || "00000000-0000-4000-8000-000000000001".to_owned(),
        original: None,
    };
    xen::write(machine, &mut options).value.xml
}
