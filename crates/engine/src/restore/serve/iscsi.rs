//! Served disks as logical units of iSCSI targets. Each machine or snapshot is a target, and each of its disks a unit.

use std::sync::Arc;

use holdfast_serve::iscsi::{
    Authentication, InitiatorAccess, LogicalUnit, RandomSource, SectorSize, TargetEventSink, TargetSet, UnitOptions,
    UnitPosition,
};
use holdfast_serve::registry::RegisteredExport;

use super::disks::OpenServedDisk;
use super::doors::ServeAddress;
use crate::job::{Error, Result};

/// Longest serial number of a logical unit: initiators show it in narrow columns.
const SERIAL_BYTES_MAX: usize = 36;

/// Options of serving over iSCSI.
pub struct IscsiOptions {
    /// The addresses at which initiators connect.
    pub doors: Vec<ServeAddress>,
    /// How disks appear.
    pub units: UnitRules,
    /// How initiators are authenticated.
    pub authentication: Authentication,
    /// Receives events about initiators.
    pub events: Arc<dyn TargetEventSink>,
    /// Random bytes for authentication.
    pub randomness: Arc<dyn RandomSource>,
}

/// How disks appear as logical units.
#[derive(Debug, Clone)]
pub struct UnitRules {
    /// The part of the targets' names before the machine: a naming authority, such as `iqn.2026-01.org.example`.
    pub authority: String,
    /// The size of logical blocks.
    pub sector_size: SectorSize,
    /// The largest size that initiators see.
    pub size_bytes_max: Option<u64>,
    /// The initiators that are served.
    pub access: InitiatorAccess,
}

/// Properties of a disk that determine its unit.
pub(super) struct UnitSource {
    group: String,
    serial: String,
}

impl UnitSource {
    pub(super) fn of(disk: &OpenServedDisk) -> Self {
        Self {
            group: disk.group.clone(),
            serial: disk.serial.clone(),
        }
    }
}

impl UnitRules {
    /// Adds a unit for an export, which is taken out when the export is removed.
    pub(super) fn place(
        &self,
        export: &Arc<RegisteredExport>,
        source: &UnitSource,
        targets: &Arc<TargetSet>,
    ) -> Result<UnitPosition> {
        let options = UnitOptions {
            sector_size: self.sector_size,
            size_bytes_max: self.size_bytes_max,
            absent: export.absent(),
            ..UnitOptions::new(serial(export, &source.serial))
        };
        let unit = LogicalUnit::of(export, options);
        let target = target_name(&source.group, &self.authority);
        let position = targets.add_unit(&target, &self.access, unit).map_err(Error::Serve)?;
        let (set, place) = (Arc::clone(targets), position.clone());
        export.on_removal(move || set.remove_unit(&place));
        Ok(position)
    }

    /// The size that initiators see of a disk.
    pub(super) fn visible_bytes(&self, size_bytes: u64) -> u64 {
        let size_bytes = self.size_bytes_max.map_or(size_bytes, |max| size_bytes.min(max));
        size_bytes - size_bytes % u64::from(self.sector_size.bytes())
    }
}

/// `AUTHORITY:MACHINE`, or `AUTHORITY:MACHINE.ID`.
fn target_name(group: &str, authority: &str) -> String {
    format!("{authority}:{}", name_part(group))
}

/// Replaces characters that the name of a target cannot have.
fn name_part(text: &str) -> String {
    let replace = |c: char| match c.to_ascii_lowercase() {
        c if c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' => c,
        _ => '-',
    };
    text.chars().map(replace).collect()
}

/// The serial number of a unit: the same whenever this disk is served, and another one if it is writable, because its
/// contents differ.
fn serial(export: &RegisteredExport, identity: &str) -> String {
    let kind = if export.is_writable() { "w-" } else { "" };
    let mut serial = format!("{kind}{}", name_part(identity));
    serial.truncate(SERIAL_BYTES_MAX);
    serial
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::MemoryDevice;
    use holdfast_serve::iscsi::{ExportDevice, is_iscsi_name};
    use holdfast_serve::registry::{ExportOptions, Registry};

    use super::{serial, target_name};

    #[test]
    fn every_machine_has_a_valid_target_name() {
        for (group, expected) in [
            ("web1", "iqn.2026-01.org.example:web1"),
            ("Web Server_1", "iqn.2026-01.org.example:web-server-1"),
            ("wëb.0a1b2c3d", "iqn.2026-01.org.example:w-b.0a1b2c3d"),
        ] {
            let name = target_name(group, "iqn.2026-01.org.example");
            assert_eq!(name, expected);
            assert!(is_iscsi_name(&name), "{name}");
        }
    }

    #[test]
    fn a_writable_unit_has_a_serial_number_of_its_own() {
        let registry = Registry::default();
        let device = || Arc::new(MemoryDevice::new(512));
        let devices = [ExportDevice::ReadOnly(device()), ExportDevice::Writable(device())];
        let serials = devices.map(|device| {
            let name = format!("{}", registry.exports().len());
            serial(&registry.add(ExportOptions::new(name, device)).unwrap(), "0a1b2c3d-vda")
        });
        assert_eq!(serials, ["0a1b2c3d-vda", "w-0a1b2c3d-vda"]);
    }
}
