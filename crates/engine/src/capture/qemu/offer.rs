//! Determines which methods a machine supports, and why others are not possible.

use std::collections::BTreeSet;
use std::path::Path;

use holdfast_host::MachineState;
use holdfast_host::provider::why_no_reflink;
use holdfast_host::qemu::{Danger, QemuVersion, disks, no_filter};

use super::QemuCapture;
use super::choice::not_beside;
use super::host_snapshots::no_host_snapshot;
use super::method::{Method, Offer, run_of_overlay};
use crate::job::{Error, Result};

impl QemuCapture<'_> {
    /// The methods that this machine supports.
    pub(super) fn offer(&self) -> Result<Offer> {
        let failed = |source| {
            Error::from(holdfast_host::Error::Monitor {
                machine: self.description.summary.name.clone(),
                source,
            })
        };
        let qemu = QemuVersion::query(self.request.machine.monitor()).map_err(failed)?;
        let present = disks(self.request.machine.monitor()).map_err(failed)?;
        let no_filter = no_filter(self.request.machine.monitor(), &present.iter().collect::<Vec<_>>());
        let no_filter = no_filter.map_err(failed)?;
        let images = self.images();
        let has_no_filter = no_filter.is_some() || qemu.defect(Danger::FilterFailsGuest).is_some();
        let is_asked = |method| self.request.method == Some(method) || has_no_filter;
        Ok(Offer {
            machine: self.request.capture.name.to_string(),
            qemu,
            no_filter,
            no_reflink: match &images {
                Err(error) => Some(error.to_string()),
                Ok(_) if not_beside(self.request.machine).is_some() => not_beside(self.request.machine),
                Ok(images) if is_asked(Method::Reflink) => no_reflink(images, self.request.capture.run),
                Ok(_) => None,
            },
            no_overlay: match (&images, self.request.overlays) {
                _ if not_beside(self.request.machine).is_some() => not_beside(self.request.machine),
                (_, None) => Some("overlays are libvirt's business, and it does not know this machine".to_owned()),
                (Err(error), _) => Some(error.to_string()),
                (Ok(images), _) => self.no_overlay(images),
            },
            no_snapshot: self.no_snapshot(),
            with_memory: self.request.memory.is_some(),
        })
    }

    /// Why host snapshots are not possible, if they were requested.
    pub(super) fn no_snapshot(&self) -> Option<String> {
        let is_asked = self.request.method == Some(Method::Snapshot);
        let why = || no_host_snapshot(&self.description, &self.taken, self.request.capture.run);
        is_asked.then(|| not_beside(self.request.machine).or_else(why))?
    }

    fn no_overlay(&self, images: &[&Path]) -> Option<String> {
        if self.description.summary.state != MachineState::Running {
            return Some("an overlay is brought down only while the machine runs".to_owned());
        }
        let overlay = images.iter().find(|image| run_of_overlay(image).is_some())?;
        Some(format!(
            "{} is an overlay that a dead backup has left: holdfast doctor --fix brings it down",
            overlay.display()
        ))
    }
}

/// Why images cannot be cloned; none if they can.
fn no_reflink(images: &[&Path], run: u32) -> Option<String> {
    let folders: BTreeSet<&Path> = images.iter().filter_map(|image| image.parent()).collect();
    folders
        .into_iter()
        .find_map(|folder| why_no_reflink(folder, &format!("{run:08x}")))
}
