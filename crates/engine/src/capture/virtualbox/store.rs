//! What is stored of a machine of VirtualBox: its disks, its settings as they were and as libvirt has them, the variables of its firmware, and its
//! memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::time::Duration;

use holdfast_block::BlockDevice;
use holdfast_image::Format;

use super::chain::Admission;
use super::instant::{Backup, Instant, Taken};
use super::machine::open_regular;
use super::request::{VirtualBoxReport, VirtualBoxWay};
use super::unchanged::{Behind, Check};
use crate::capture::foreign_machine::{Attached, DomainWish, domain_xml};
use crate::capture::foreign_store::{DiskToStore, MachineToStore, store_machine};
use crate::capture::images::BackupReport;
use crate::job::rate_limit::{Pace, PacedDevice, PacedReader};
use crate::job::{Error, Job, Progress, Result, Unit};
use crate::notes::{
    NOTE_CONSISTENCY, NOTE_FORMAT, NOTE_HYPERVISOR, NOTE_METHOD, NOTE_PATH, NOTE_UUID, STREAM_DOMAIN,
    STREAM_VIRTUALBOX_NVRAM, STREAM_VIRTUALBOX_SAVED, STREAM_VIRTUALBOX_SETTINGS,
};

/// What a snapshot says of its machine's hypervisor.
pub(super) const HYPERVISOR: &str = "VirtualBox";
/// Bytes of a file with firmware variables, at most.
const NVRAM_BYTES_MAX: u64 = 64 << 20;

/// What was stored.
pub(super) struct Stored {
    backup: BackupReport,
    memory_bytes: Option<u64>,
    waited: Duration,
}

impl Stored {
    /// What there is to say of it so far.
    pub(super) fn report(self, taken: Vec<Taken>) -> VirtualBoxReport {
        VirtualBoxReport {
            backup: self.backup,
            way: VirtualBoxWay::Images,
            reason: String::new(),
            disks: taken.into_iter().map(|disk| disk.attached.target).collect(),
            memory_bytes: self.memory_bytes,
            left_out: Vec::new(),
            waited: self.waited,
            remains: None,
        }
    }
}

impl Backup<'_> {
    /// Stores what is open; the snapshot is committed if `check` finds nothing when all disks are read.
    pub(super) fn store(&self, instant: &Instant<'_>, taken: &[Taken], check: Check<'_>) -> Result<Stored> {
        let request = &self.request;
        let pace = Pace::new(request.bytes_per_second, self.job);
        let paced: Vec<PacedDevice<'_, &dyn BlockDevice>> = taken
            .iter()
            .map(|disk| PacedDevice {
                inner: &*disk.source.device,
                pace: &pace,
            })
            .collect();
        let admission = Admission::new(request.machine, &request.allowed);
        let attached: Vec<Attached> = taken.iter().map(|disk| disk.attached.clone()).collect();
        let wish = DomainWish {
            domain_type: "kvm",
            network: "default",
            folder: None,
            format: Format::Qcow2,
        };
        let xml = domain_xml(instant.machine, &attached, &wish).value;
        let mut streams: Vec<(String, Box<dyn Read + Send + '_>)> = vec![
            (STREAM_DOMAIN.to_owned(), Box::new(Behind::new(check, xml.into_bytes()))),
            (
                STREAM_VIRTUALBOX_SETTINGS.to_owned(),
                Box::new(std::io::Cursor::new(instant.text.as_bytes())),
            ),
        ];
        if let Some(file) = self.nvram(instant, &admission)? {
            streams.push((STREAM_VIRTUALBOX_NVRAM.to_owned(), Box::new(file)));
        }
        let mut memory_bytes = None;
        if let Some(file) = self.beside(instant.memory, &admission)? {
            memory_bytes = file.metadata().ok().map(|metadata| metadata.len());
            let paced = PacedReader {
                inner: file,
                pace: &pace,
            };
            streams.push((STREAM_VIRTUALBOX_SAVED.to_owned(), Box::new(paced)));
        }
        let mut total_bytes = memory_bytes.unwrap_or_default();
        for disk in taken {
            self.job.interrupt.check()?;
            total_bytes += disk.source.allocated_bytes()?;
        }
        let disks = taken.iter().zip(&paced).map(|(disk, device)| DiskToStore {
            name: disk.attached.target.clone(),
            device,
            changed: None,
            notes: notes_of(disk),
        });
        let machine = self.to_store(instant, disks.collect(), streams);
        let progress = WithTotal {
            inner: self.job.progress,
            total_bytes,
        };
        let job = Job {
            progress: &progress,
            ..self.job
        };
        let stored = store_machine(self.repository, machine, job);
        let backup = stored.map_err(|error| self.interrupted_or(error))?;
        Ok(Stored {
            waited: pace.waited(backup.duration),
            backup,
            memory_bytes,
        })
    }

    /// A snapshot of one instant.
    fn to_store<'s>(
        &'s self,
        instant: &Instant<'_>,
        disks: Vec<DiskToStore<'s>>,
        streams: Vec<(String, Box<dyn Read + Send + 's>)>,
    ) -> MachineToStore<'s> {
        let request = &self.request;
        let notes = [
            (NOTE_HYPERVISOR.to_owned(), HYPERVISOR.to_owned()),
            (NOTE_UUID.to_owned(), request.machine.uuid().to_owned()),
            (NOTE_METHOD.to_owned(), instant.way.word().to_owned()),
            (NOTE_CONSISTENCY.to_owned(), instant.consistency.to_owned()),
        ];
        MachineToStore {
            name: request.name.clone(),
            doing: "backing up",
            parent: self.parent,
            tags: request.tags.clone(),
            time: instant.time,
            host: request.host.clone(),
            program: request.program.clone(),
            notes: notes.into_iter().chain(self.note.clone()).collect(),
            disks,
            streams,
        }
    }

    /// Why it ended: whoever reads tells of an interruption by an error of its own.
    fn interrupted_or(&self, error: Error) -> Error {
        self.job.interrupt.check().err().map_or(error, Error::from)
    }

    /// The variables of its firmware.
    fn nvram(&self, instant: &Instant<'_>, admission: &Admission<'_>) -> Result<Option<File>> {
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

    /// A file beside the disks that the settings name; one that is not there yet is none.
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

fn notes_of(disk: &Taken) -> BTreeMap<String, String> {
    // What it becomes when it is restored, as `domain.xml` says.
    BTreeMap::from([
        (NOTE_FORMAT.to_owned(), Format::Qcow2.name().to_owned()),
        (NOTE_PATH.to_owned(), disk.source.canonical.display().to_string()),
        ("label".to_owned(), disk.attached.label.clone()),
    ])
}

/// Listens to a job of which is known how much it reads.
struct WithTotal<'p> {
    inner: &'p dyn Progress,
    total_bytes: u64,
}

impl Progress for WithTotal<'_> {
    fn phase(&self, name: &str, unit: Unit) {
        self.inner.phase(name, unit);
        self.inner.total(self.total_bytes);
    }

    fn total(&self, total: u64) {
        self.inner.total(total);
    }

    fn advance(&self, amount: u64) {
        self.inner.advance(amount);
    }

    fn note(&self, message: &str) {
        self.inner.note(message);
    }

    fn warning(&self, message: &str) {
        self.inner.warning(message);
    }

    fn bottleneck(&self, bottleneck: crate::Bottleneck) {
        self.inner.bottleneck(bottleneck);
    }
}
