//! Fuzz targets for data that this crate parses: see [`holdfast_block::hostile`].

use std::collections::BTreeMap;

use holdfast_block::hostile::{Outcome, Parser};

use crate::Uuid;
use crate::hypervisor::domain_xml::{Emulator, Identity, NewIdentity, Rewrite, rewrite, with_links_down};
use crate::hypervisor::virtualbox::hostile as virtualbox;
use crate::qemu::memory::hostile as memory;
use crate::storage::changed_blocks::hostile as changed_blocks;
use crate::storage::provider::btrfs::stream::hostile as btrfs;
use crate::storage::provider::zfs::stream::hostile as zfs;
use crate::storage::provider::{LVM_SPECIMEN, lvm_volumes};

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "btrfs_stream",
        feed: btrfs_stream,
    },
    Parser {
        name: "domain_xml",
        feed: domain_xml,
    },
    Parser {
        name: "memory_state",
        feed: memory::state,
    },
    Parser {
        name: "memory_stream",
        feed: memory::stream,
    },
    Parser {
        name: "send_stream",
        feed: changed_blocks::send_stream,
    },
    Parser {
        name: "thin_delta",
        feed: changed_blocks::thin_delta,
    },
    Parser {
        name: "lvm_report",
        feed: lvm_report,
    },
    Parser {
        name: "vboxmanage",
        feed: vboxmanage,
    },
    Parser {
        name: "zfs_stream",
        feed: zfs_stream,
    },
];

/// Valid bytes for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let domain = "<domain type='kvm' id='3'><name>web1</name><uuid>0-0</uuid><genid>1-1</genid><os><nvram>/v/web1</nvram></os>\
         <metadata><h:backup xmlns:h='urn:holdfast:domain:1' enabled='no' exclude='vdb' tags='a b'/></metadata><devices>\
         <disk type='file'><driver type='raw'/><source file='/a'/><target dev='vda'/></disk>\
         <interface type='network'><mac address='52:54:00:00:00:01'/></interface>\
         <tpm><backend type='emulator' version='2.0'><source type='dir' path='/t'/></backend></tpm></devices></domain>";
    let mut seeds = vec![("domain_xml", "machine", domain.as_bytes().to_vec())];
    seeds.extend(memory::seeds());
    seeds.extend(changed_blocks::seeds());
    seeds.push(("lvm_report", "volumes", LVM_SPECIMEN.as_bytes().to_vec()));
    seeds.extend(virtualbox::seeds());
    seeds.extend(btrfs::seeds());
    seeds.extend(zfs::seeds());
    seeds
}

/// See [`btrfs::btrfs_stream`].
pub fn btrfs_stream(bytes: &[u8]) -> Outcome {
    btrfs::btrfs_stream(bytes)
}

/// See [`zfs::zfs_stream`].
pub fn zfs_stream(bytes: &[u8]) -> Outcome {
    zfs::zfs_stream(bytes)
}

/// Rewrites a configuration for another place.
pub fn domain_xml(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    let request = Rewrite {
        identity: Identity::New(NewIdentity {
            name: "a<b".to_owned(),
            uuid: Uuid::from_random([7; 16]),
            macs: None,
        }),
        generation: Some(Uuid::from_random([8; 16])),
        disks: BTreeMap::new(),
        nvram: Some("/n&m".into()),
        tpm: Some("/t&m".into()),
        domain_type: Some("q<".to_owned()),
        emulator: Emulator::OfHypervisor,
    };
    let Ok(rewritten) = rewrite(&text, &request) else {
        return Outcome::Refused;
    };
    let again = rewrite(&rewritten.text, &request).expect("what was changed can be changed again");
    assert_eq!(again.text, rewritten.text, "the second change changes nothing");
    with_links_down(&again.text).expect("its links can be set down");
    Outcome::Decoded
}

/// See [`memory::state`].
pub fn memory_state(bytes: &[u8]) -> Outcome {
    memory::state(bytes)
}

/// See [`memory::stream`].
pub fn memory_stream(bytes: &[u8]) -> Outcome {
    memory::stream(bytes)
}

/// See [`changed_blocks::send_stream`].
pub fn send_stream(bytes: &[u8]) -> Outcome {
    changed_blocks::send_stream(bytes)
}

/// See [`changed_blocks::thin_delta`].
pub fn thin_delta(bytes: &[u8]) -> Outcome {
    changed_blocks::thin_delta(bytes)
}

/// The output of `VBoxManage`. Owners of machines choose names and descriptions in it.
pub fn vboxmanage(bytes: &[u8]) -> Outcome {
    virtualbox::answer(bytes)
}

/// LVM's report. Users who may name and tag volumes choose parts of it. A host snapshot must never be listed as a
/// dataset.
pub fn lvm_report(bytes: &[u8]) -> Outcome {
    match lvm_volumes(&String::from_utf8_lossy(bytes)) {
        Ok((datasets, snapshots)) => {
            assert!(
                snapshots.iter().all(|snapshot| !datasets.contains(snapshot)),
                "a snapshot is a dataset too"
            );
            Outcome::Decoded
        }
        Err(_) => Outcome::Refused,
    }
}
