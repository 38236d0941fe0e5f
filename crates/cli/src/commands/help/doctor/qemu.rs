//! The machines of libvirt and QEMU that are examined.

use std::path::Path;

use holdfast_block::error_text;
use holdfast_engine::{RunRecord, noted_runs};
use holdfast_host::Libvirt;
use holdfast_repo::{Liveness, SystemProcesses};

use super::Unreachable;
use crate::errors::Error;
use crate::machines::{Everything, Found, Hypervisors, MachineWord};

/// The machines of libvirt and QEMU that are examined.
pub(super) struct QemuMachines<'a> {
    pub(super) found: Vec<Found>,
    pub(super) unreachable: Unreachable,
    /// The connection to libvirt, if it is about machines there.
    pub(super) libvirt: Option<&'a Libvirt>,
    /// What was not examined, although everything was requested.
    pub(super) note: Option<String>,
}

impl<'a> QemuMachines<'a> {
    /// Finds those that words select. If everything is wanted: those of libvirt, if it is in use, and those of other
    /// QEMU processes that dead runs noted in the journal.
    ///
    /// # Errors
    /// libvirt cannot be reached, or there is no such machine.
    pub(super) fn find(
        words: Vec<MachineWord>,
        everything: Everything,
        hypervisors: &'a Hypervisors<'a>,
        journal: Option<&Path>,
    ) -> Result<Self, Error> {
        let noted = journal.map(noted_runs).transpose()?.unwrap_or_default();
        let mut machines = match everything {
            Everything::Wanted => Self::of_libvirt(hypervisors, &noted)?,
            Everything::NotWanted => Self::selected(words, hypervisors)?,
        };
        if everything == Everything::Wanted {
            machines.add_noted(&noted, hypervisors)?;
        }
        Ok(machines)
    }

    fn of_libvirt(hypervisors: &'a Hypervisors<'a>, noted: &[RunRecord]) -> Result<Self, Error> {
        let is_noted = noted.iter().any(|record| record.address() == Some(hypervisors.uri()));
        if !is_noted && hypervisors.is_without_libvirt() {
            return Ok(Self {
                found: Vec::new(),
                unreachable: Unreachable::new(),
                libvirt: None,
                note: Some("no libvirt is in use on this host: none of its machines was looked for".to_owned()),
            });
        }
        let mut found = Vec::new();
        for chosen in hypervisors.all_of(Vec::new())? {
            match hypervisors.find(&chosen) {
                // The machine ended meanwhile.
                Err(error) if error.is_no_such_machine() => {}
                other => found.push(other?),
            }
        }
        Ok(Self {
            found,
            unreachable: Unreachable::new(),
            libvirt: Some(hypervisors.libvirt()?),
            note: None,
        })
    }

    fn selected(words: Vec<MachineWord>, hypervisors: &'a Hypervisors<'a>) -> Result<Self, Error> {
        let is_about_libvirt = words.iter().any(|word| !matches!(word, MachineWord::Qmp(_)));
        // Without words, `all_of` selects all machines; here only datasets or machines elsewhere are named.
        let chosen = if words.is_empty() {
            Vec::new()
        } else {
            hypervisors.all_of(words)?
        };
        let found: Result<Vec<Found>, Error> = chosen.iter().map(|chosen| hypervisors.find(chosen)).collect();
        Ok(Self {
            found: found?,
            unreachable: Unreachable::new(),
            libvirt: is_about_libvirt.then(|| hypervisors.libvirt()).transpose()?,
            note: None,
        })
    }

    /// Adds the machines in the journal that libvirt does not know.
    fn add_noted(&mut self, noted: &[RunRecord], hypervisors: &Hypervisors<'_>) -> Result<(), Error> {
        for record in noted {
            let address = record.address().unwrap_or_default();
            // A live process still owns its monitor.
            if record.liveness(&SystemProcesses) == Liveness::Alive {
                continue;
            }
            let is_known = self.found.iter().any(|found| found.address == *address);
            let Some(path) = address.strip_prefix("qmp:").filter(|_| !is_known) else {
                continue;
            };
            // No process listens on the socket: that QEMU has ended.
            if std::os::unix::net::UnixStream::connect(path).is_err() {
                continue;
            }
            for chosen in hypervisors.all_of(vec![MachineWord::Qmp(path.into())])? {
                match hypervisors.find(&chosen) {
                    Ok(machine) => self.found.push(machine),
                    Err(error) => self.unreachable.push((record.machine.clone(), error_text(&error))),
                }
            }
        }
        Ok(())
    }
}
