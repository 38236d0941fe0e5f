//! Reads the descriptions of snapshots and checkpoints, and stores them for a machine whose images have come from another host.

use virt::domain::Domain;
use virt::error::{Error, ErrorNumber};
use virt::sys;

use super::{checkpoints, is_code};
use crate::hypervisor::migration::{MachineHistory, SnapshotDescription};

pub(super) fn read(domain: &Domain) -> Result<MachineHistory, Error> {
    let listed = domain.list_all_snapshots(sys::VIR_DOMAIN_SNAPSHOT_LIST_TOPOLOGICAL)?;
    let described = listed.iter().map(|snapshot| {
        Ok(SnapshotDescription {
            text: snapshot.xml_desc(sys::VIR_DOMAIN_SNAPSHOT_XML_SECURE)?,
            is_current: snapshot.is_current(0)?,
        })
    });
    let listed = checkpoints_of(domain)?;
    Ok(MachineHistory {
        snapshots: described.collect::<Result<_, Error>>()?,
        checkpoints: listed
            .iter()
            .map(checkpoints::Checkpoint::description)
            .collect::<Result<_, _>>()?,
    })
}

/// Forgets what the domain has, and stores `history`.
pub(super) fn replace(domain: &Domain, history: &MachineHistory) -> Result<(), Error> {
    for checkpoint in checkpoints_of(domain)? {
        checkpoint.forget()?;
    }
    for snapshot in domain.list_all_snapshots(0)? {
        snapshot.delete(sys::VIR_DOMAIN_SNAPSHOT_DELETE_METADATA_ONLY)?;
    }
    for snapshot in &history.snapshots {
        let current = if snapshot.is_current {
            sys::VIR_DOMAIN_SNAPSHOT_CREATE_CURRENT
        } else {
            0
        };
        let flags = sys::VIR_DOMAIN_SNAPSHOT_CREATE_REDEFINE | current;
        domain.create_snapshot_xml(&snapshot.text, flags)?;
    }
    for text in &history.checkpoints {
        checkpoints::redefine(domain, text)?;
    }
    Ok(())
}

fn checkpoints_of(domain: &Domain) -> Result<Vec<checkpoints::Checkpoint>, Error> {
    match checkpoints::list(domain) {
        Err(error) if is_code(&error, ErrorNumber::NoSupport) => Ok(Vec::new()),
        listed => listed,
    }
}
