//! `serve iscsi`: disks of snapshots as logical units of iSCSI targets, until the job is interrupted.
//!
//! Each snapshot is a target, and each of its disks a logical unit of it.

use std::net::SocketAddr;
use std::num::NonZero;
use std::sync::Arc;

use holdfast_block::Clock;
use holdfast_repo::Repository;
use holdfast_serve::iscsi::{
    Absent, Authentication, InitiatorAccess, Listener, LogicalUnit, RandomSource, SectorSize, Target, TargetEventSink,
    TargetServer, TargetServerOptions, UnitOptions,
};
use jiff::tz::TimeZone;

use super::disks::{ClientWrites, DiskSelection, OpenDisk, open_disks};
use super::{PATIENCE, limits, wait_for_interrupt, warn_of_abandoned};
use crate::SnapshotName;
use crate::job::{Error, Job, Result};
use crate::repository::removed::keep_readable;

/// Longest serial number of a logical unit: initiators show it in narrow columns.
const SERIAL_BYTES_MAX: usize = 36;

/// The disks to serve as iSCSI targets, and the initiators that may use them.
pub struct ServeTargetsRequest {
    /// Snapshots, or single disks of them.
    pub names: Vec<SnapshotName>,
    /// The time zone of times in these names.
    pub zone: TimeZone,
    /// The addresses at which initiators connect.
    pub addresses: Vec<SocketAddr>,
    /// The part of the targets' names before the machine: a naming authority, such as `iqn.2026-01.org.example`.
    pub authority: String,
    /// How writes of initiators are treated.
    pub writes: ClientWrites,
    /// The size of logical blocks.
    pub sector_size: SectorSize,
    /// The largest size that initiators see.
    pub size_bytes_max: Option<u64>,
    /// The initiators that are served.
    pub access: InitiatorAccess,
    /// How initiators are authenticated.
    pub authentication: Authentication,
    /// The maximum number of simultaneous connections; none for the server's default.
    pub connection_count_max: Option<NonZero<usize>>,
    /// Receives events about initiators.
    pub events: Arc<dyn TargetEventSink>,
    /// The clock, shared with the server's threads.
    pub clock: Arc<dyn Clock>,
    /// Random bytes for authentication.
    pub randomness: Arc<dyn RandomSource>,
}

/// A served logical unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedUnit {
    /// The name of its target.
    pub target: String,
    /// Its number in the target.
    pub number: usize,
    /// A description for users.
    pub description: String,
    /// The size that initiators see, in bytes.
    pub size_bytes: u64,
}

/// Serves disks of snapshots until the job is interrupted, which is the normal end. `ready` is called when initiators
/// can connect, with the units and the addresses.
///
/// Garbage collection is paused meanwhile, as by [`serve`](super::serve).
pub fn serve_targets(
    repository: &Repository,
    request: ServeTargetsRequest,
    job: Job<'_>,
    ready: &mut dyn FnMut(&[ServedUnit], &[SocketAddr]),
) -> Result<()> {
    let pause = keep_readable(repository, job.progress);
    let selection = DiskSelection {
        names: &request.names,
        zone: &request.zone,
        writes: &request.writes,
    };
    let opened = open_disks(repository, &selection, job)?;
    let (units, targets) = targets(opened.disks, &request)?;
    let mut server = TargetServer::new(TargetServerOptions {
        targets,
        authentication: request.authentication,
        limits: limits(request.connection_count_max),
        clock: request.clock,
        events: request.events,
        randomness: request.randomness,
    });
    let mut addresses = Vec::new();
    for address in &request.addresses {
        let listener = Listener::tcp(*address).map_err(Error::Serve)?;
        addresses.push(listener.tcp_address().unwrap_or(*address));
        server.listen(listener).map_err(Error::Serve)?;
    }
    ready(&units, &addresses);
    wait_for_interrupt(job, pause.as_ref());
    warn_of_abandoned(server.stop(PATIENCE), job);
    drop(opened.locks);
    Ok(())
}

/// A target that is being assembled.
struct TargetDraft {
    name: String,
    units: Vec<LogicalUnit>,
}

/// Makes a target of each snapshot; the units of a target are numbered in the order of the disks.
fn targets(disks: Vec<OpenDisk>, request: &ServeTargetsRequest) -> Result<(Vec<ServedUnit>, Vec<Arc<Target>>)> {
    let mut drafts: Vec<TargetDraft> = Vec::new();
    let mut served = Vec::new();
    for disk in disks {
        let name = target_name(&disk, &request.authority);
        let options = UnitOptions {
            sector_size: request.sector_size,
            size_bytes_max: request.size_bytes_max,
            absent: Absent::ReadsAsZero,
            ..UnitOptions::new(serial(&disk))
        };
        let unit = LogicalUnit::new(disk.device, options);
        let size_bytes = unit.size_bytes();
        let number = if let Some(draft) = drafts.iter_mut().find(|draft| draft.name == name) {
            draft.units.push(unit);
            draft.units.len() - 1
        } else {
            drafts.push(TargetDraft {
                name: name.clone(),
                units: vec![unit],
            });
            0
        };
        served.push(ServedUnit {
            target: name,
            number,
            description: disk.description,
            size_bytes,
        });
    }
    let targets = drafts.into_iter().map(|draft| {
        let target = Target::new(&draft.name, request.access.clone(), draft.units);
        target.map(Arc::new).map_err(Error::Serve)
    });
    Ok((served, targets.collect::<Result<_>>()?))
}

/// `AUTHORITY:MACHINE`, or `AUTHORITY:MACHINE.ID` if several snapshots of a machine are served.
fn target_name(disk: &OpenDisk, authority: &str) -> String {
    let machine = name_part(&disk.machine);
    if disk.has_siblings {
        format!("{authority}:{machine}.{}", name_part(&disk.snapshot))
    } else {
        format!("{authority}:{machine}")
    }
}

/// Replaces characters that the name of a target cannot have.
fn name_part(text: &str) -> String {
    let replace = |c: char| match c.to_ascii_lowercase() {
        c if c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' => c,
        _ => '-',
    };
    text.chars().map(replace).collect()
}

/// The serial number of a unit: the same whenever this disk of this snapshot is served, and another one if it is
/// writable, because its contents differ.
fn serial(disk: &OpenDisk) -> String {
    let kind = match disk.device {
        holdfast_serve::iscsi::ExportDevice::ReadOnly(_) => "",
        holdfast_serve::iscsi::ExportDevice::Writable(_) => "w-",
    };
    let mut serial = format!("{kind}{}-{}", name_part(&disk.snapshot), name_part(&disk.disk));
    serial.truncate(SERIAL_BYTES_MAX);
    serial
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::MemoryDevice;
    use holdfast_serve::iscsi::{ExportDevice, is_iscsi_name};

    use super::{OpenDisk, serial, target_name};

    fn disk(machine: &str, has_siblings: bool) -> OpenDisk {
        OpenDisk {
            machine: machine.to_owned(),
            snapshot: "0a1b2c3d".to_owned(),
            disk: "vda".to_owned(),
            has_siblings,
            description: String::new(),
            size_bytes: 512,
            device: ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(512))),
        }
    }

    #[test]
    fn every_machine_has_a_valid_target_name() {
        for (machine, has_siblings, expected) in [
            ("web1", false, "iqn.2026-01.org.example:web1"),
            ("Web Server_1", false, "iqn.2026-01.org.example:web-server-1"),
            ("wëb", true, "iqn.2026-01.org.example:w-b.0a1b2c3d"),
        ] {
            let name = target_name(&disk(machine, has_siblings), "iqn.2026-01.org.example");
            assert_eq!(name, expected);
            assert!(is_iscsi_name(&name), "{name}");
        }
        assert_eq!(serial(&disk("web1", false)), "0a1b2c3d-vda");
    }
}
