//! Stores a VirtualBox machine: its disks, its settings in their original form and for libvirt, its firmware variables,
//! and its memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Cursor;

use holdfast_image::Format;

use super::backup::OpenedDisks;
use super::chain::Admission;
use super::instant::{ChosenDisk, VirtualBoxCapture, VirtualBoxPoint};
use super::machine::open_regular;
use super::request::VirtualBoxReading;
use super::unchanged::{ChangeCheck, CheckedStream};
use crate::capture::foreign_machine::{AttachedDisk, DomainOptions, domain_xml};
use crate::capture::store::{DiskToStore, MachineToStore, OtherToStore, store_machine};
use crate::job::rate_limit::{RateLimit, RateLimitedReader};
use crate::job::{Error, Result, Unit};
use crate::notes::{
    NOTE_CONSISTENCY, NOTE_FORMAT, NOTE_HYPERVISOR, NOTE_LABEL, NOTE_METHOD, NOTE_PATH, NOTE_UUID, STREAM_DOMAIN,
    STREAM_VIRTUALBOX_NVRAM, STREAM_VIRTUALBOX_SAVED, STREAM_VIRTUALBOX_SETTINGS,
};

/// The name of the hypervisor in snapshots.
pub(super) const HYPERVISOR: &str = "VirtualBox";
/// The maximum size of a file with firmware variables in bytes.
const NVRAM_BYTES_MAX: u64 = 64 << 20;

impl VirtualBoxCapture<'_> {
    /// Stores the opened disks; the snapshot is committed only if `check` succeeds after all disks were read.
    pub(super) fn store(
        &self,
        instant: VirtualBoxPoint<'_>,
        opened: &OpenedDisks,
        check: ChangeCheck<'_>,
    ) -> Result<VirtualBoxReading> {
        let request = &self.request;
        let pace = RateLimit::new(request.bytes_per_second, self.job);
        let admission = Admission::new(request.machine, &request.capture.allowed);
        let taken = &opened.taken;
        let attached: Vec<AttachedDisk> = taken.iter().map(|disk| disk.attached.clone()).collect();
        let wish = DomainOptions {
            domain_type: "kvm",
            network: "default",
            folder: None,
            format: Format::Qcow2,
        };
        let xml = domain_xml(instant.machine, &attached, &wish).value;
        let mut others = vec![
            OtherToStore::stream(STREAM_DOMAIN, CheckedStream::new(check, xml.into_bytes())),
            OtherToStore::stream(STREAM_VIRTUALBOX_SETTINGS, Cursor::new(instant.text.as_bytes())),
        ];
        if let Some(file) = self.nvram(&instant, &admission)? {
            others.push(OtherToStore::stream(STREAM_VIRTUALBOX_NVRAM, file));
        }
        let mut memory_bytes = None;
        if let Some(file) = self.beside(instant.memory, &admission)? {
            memory_bytes = file.metadata().ok().map(|metadata| metadata.len());
            let paced = RateLimitedReader {
                inner: file,
                pace: &pace,
            };
            others.push(OtherToStore::stream(STREAM_VIRTUALBOX_SAVED, paced));
        }
        let mut total_bytes = memory_bytes.unwrap_or_default();
        for disk in taken {
            self.job.interrupt.check()?;
            total_bytes += disk.source.allocated_bytes()?;
        }
        let disks = taken.iter().map(|disk| DiskToStore {
            name: disk.attached.target.clone(),
            device: &*disk.source.device,
            changed: None,
            notes: notes_of(disk),
        });
        let machine = MachineToStore {
            time: instant.time,
            notes: self.notes(&instant),
            disks: disks.collect(),
            others,
            total_bytes: Some(total_bytes),
        };
        self.job
            .progress
            .phase(&self.sink.phase(&request.capture.name), Unit::Bytes);
        let duration = store_machine(self.sink, machine, &pace, self.job)?;
        Ok(VirtualBoxReading {
            way: instant.way,
            reason: instant.reason,
            disks: taken.iter().map(|disk| disk.attached.target.clone()).collect(),
            consistency: instant.consistency,
            memory_bytes,
            left_out: opened.left_out.clone(),
            waited: pace.waited(duration),
            remains: None,
        })
    }

    /// Notes of the snapshot.
    fn notes(&self, instant: &VirtualBoxPoint<'_>) -> BTreeMap<String, String> {
        let notes = [
            (NOTE_HYPERVISOR, HYPERVISOR),
            (NOTE_UUID, self.request.machine.uuid()),
            (NOTE_METHOD, instant.way.word()),
            (NOTE_CONSISTENCY, instant.consistency),
        ];
        notes.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
    }

    /// The firmware variables.
    fn nvram(&self, instant: &VirtualBoxPoint<'_>, admission: &Admission<'_>) -> Result<Option<File>> {
        let file = self.beside(instant.nvram, admission)?;
        let length = file
            .as_ref()
            .and_then(|file| file.metadata().ok())
            .map_or(0, |metadata| metadata.len());
        if let (Some(said), None) = (instant.nvram, &file) {
            self.job.progress.note(&format!(
                "the variables of the firmware would be in {said}, and there is no such file: {} was never started, or has lost them",
                self.request.machine.name()
            ));
        }
        if length <= NVRAM_BYTES_MAX {
            return Ok(file);
        }
        Err(Error::File {
            action: "store the variables of the firmware in",
            path: self.request.machine.file(instant.nvram.unwrap_or_default()),
            source: std::io::Error::new(
                std::io::ErrorKind::InvalidData,
                format!("it has {length} bytes, and no firmware has more than {NVRAM_BYTES_MAX}"),
            ),
        })
    }

    /// A file that the settings name besides the disks; none if it does not exist yet.
    pub(super) fn beside(&self, said: Option<&str>, admission: &Admission<'_>) -> Result<Option<File>> {
        let Some(said) = said else { return Ok(None) };
        let path = self.request.machine.file(said);
        let opened = admission.admit(&path).and_then(|path| {
            open_regular(&path).map_err(|source| Error::File {
                action: "open",
                path,
                source,
            })
        });
        match opened {
            Ok(file) => Ok(Some(file)),
            Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn notes_of(disk: &ChosenDisk) -> BTreeMap<String, String> {
    BTreeMap::from([
        (NOTE_FORMAT.to_owned(), disk.source.format.to_string()),
        (NOTE_PATH.to_owned(), disk.source.canonical.display().to_string()),
        (NOTE_LABEL.to_owned(), disk.attached.label.clone()),
    ])
}
