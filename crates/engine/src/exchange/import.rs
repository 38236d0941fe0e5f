//! `import`: stores the machine of an archive as a snapshot, or as images in a folder.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_archive::{
    ArchiveKind, Counter, Document, OpenOptions as OpenArchiveOptions, Ordered, Packing, StreamImages, open,
};
use holdfast_block::Threads;
use holdfast_hardware::{DiskKind, Machine, Untranslated};
use holdfast_image::{BlockOptions, Format, OpenOptions, Qcow2Options, Storage};
use holdfast_repo::{Environment, Repository};
use jiff::Timestamp;

use crate::capture::foreign_disks::{ArchiveDevice, ArchiveDisks, StreamAfterDisks};
use crate::capture::foreign_machine::{
    AttachedDisk, DescribedMachine, Domain, DomainOptions, attach, describe, domain_xml, kept_name, warn_of_format,
};
use crate::capture::sink::{RepositorySink, SnapshotSink as _};
use crate::capture::snapshot::{BackupReport, SnapshotOptions};
use crate::capture::store::{DiskToStore, MachineToStore, OtherToStore, store_machine};
use crate::files::block_target::Overwrite;
use crate::image::convert::{ConvertRequest, ConvertSource, VerifyImage, convert};
use crate::image::new_folder::{NewFolder, write_file};
use crate::job::error::ExchangeError;
use crate::job::rate_limit::RateLimit;
use crate::job::{Error, Job, MachineName, Result, Unit};
use crate::notes::{NOTE_FORMAT, NOTE_HYPERVISOR, NOTE_LABEL, NOTE_UUID, STREAM_DOMAIN};
use crate::repository::name_conflict::Claimant;

/// An open archive: everything before its first disk is known.
pub struct Importing {
    kind: ArchiveKind,
    packing: Packing,
    counter: Counter,
    described: DescribedMachine,
    documents: Vec<Document>,
    attached: Vec<AttachedDisk>,
    disks: Arc<ArchiveDisks>,
    domain: Domain,
}

/// An imported machine.
#[derive(Debug)]
pub struct Imported {
    /// Kind of the archive.
    pub kind: ArchiveKind,
    /// Compression of the archive.
    pub packing: Packing,
    /// Bytes of the archive as read.
    pub read_bytes: u64,
    /// The configuration of the machine.
    pub machine: Machine,
    /// Its disks, in the order of the archive.
    pub disks: Vec<ImportedDisk>,
    /// Settings that are not supported here, and their replacements.
    pub dropped: Vec<Untranslated>,
}

/// An imported disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedDisk {
    /// Its name here.
    pub name: String,
    /// Its name in the archive.
    pub key: String,
    /// Its label, set by its owner.
    pub label: String,
    /// Its size.
    pub size_bytes: u64,
    /// Whether the archive describes it as empty: it consists of zeroes.
    pub is_blank: bool,
    /// Its image, if imported into a folder.
    pub path: Option<PathBuf>,
}

/// Result of an import into a repository.
#[derive(Debug)]
pub struct ImportReport {
    /// The snapshot.
    pub backup: BackupReport,
    /// The machine.
    pub imported: Imported,
}

/// Options of an import into a repository.
#[derive(Clone)]
pub struct ImportRepository {
    /// The name for its snapshots; its own name if not given.
    pub machine: Option<MachineName>,
    /// Options of the snapshot.
    pub snapshot: SnapshotOptions,
    /// The point in time of the archive.
    pub time: Timestamp,
}

/// Options of an import into a folder.
pub struct ImportFolder {
    /// The folder to create; it may exist if it is empty.
    pub folder: PathBuf,
    /// The format of its images.
    pub format: Format,
    /// Whether they are compressed.
    pub storage: Storage,
}

/// Opens an archive.
///
/// # Errors
/// It is not an archive, or does not describe the machine.
pub fn open_import(
    stream: Box<dyn Read + Send>,
    images: StreamImages,
    domain: Domain,
    job: Job<'_>,
) -> Result<Importing> {
    let mut archive = open(stream, open_options(images, job))?;
    if !archive.reader.is_in_order() {
        archive.reader = Box::new(Ordered::new(archive.reader, &std::env::temp_dir()));
    }
    let mut described = describe(&*archive.reader)?;
    let attached = attach(&*archive.reader, &mut described);
    let has_content = |key: &str| attached.iter().any(|disk| disk.key == key);
    let disks = described.machine.disks.iter();
    for disk in disks.filter(|disk| disk.kind == DiskKind::Disk && !has_content(&disk.key)) {
        let name = if disk.label.is_empty() { &disk.key } else { &disk.label };
        job.progress.warning(&format!(
            "the machine has a disk {name:?}, and the archive has nothing of it: it is left out"
        ));
    }
    let wanted: Vec<usize> = attached.iter().map(|disk| disk.number).collect();
    Ok(Importing {
        kind: archive.kind,
        packing: archive.packing,
        counter: archive.read,
        documents: archive.reader.documents().to_vec(),
        disks: Arc::new(ArchiveDisks::new(archive.reader, &wanted)),
        described,
        attached,
        domain,
    })
}

/// As many threads as the job may use.
pub(super) fn threads(job: Job<'_>) -> Threads {
    Threads {
        count: NonZero::new(job.thread_count).unwrap_or(NonZero::<usize>::MIN),
        load_max: None,
    }
}

pub(super) fn open_options(images: StreamImages, job: Job<'_>) -> OpenArchiveOptions {
    OpenArchiveOptions {
        threads: threads(job),
        images,
    }
}

impl Importing {
    /// What is known of the machine before its disks are read.
    pub fn look(mut self) -> Imported {
        self.domain_xml(None, Format::Qcow2);
        self.imported(&[])
    }

    /// The machine's name.
    pub fn name(&self) -> &str {
        &self.described.machine.name
    }

    /// The default name for its snapshots.
    fn listed_name(&self) -> Result<MachineName> {
        let name = MachineName::new(self.name()).map_err(|source| ExchangeError::Name {
            name: self.name().to_owned(),
            source,
        })?;
        Ok(name)
    }

    fn device(&self, disk: &AttachedDisk) -> ArchiveDevice {
        self.disks.device(disk.number)
    }

    /// Its domain XML; settings that libvirt does not support are added to the dropped ones.
    fn domain_xml(&mut self, folder: Option<&str>, format: Format) -> String {
        let wish = DomainOptions {
            domain_type: &self.domain.domain_type,
            network: &self.domain.network,
            folder,
            format,
        };
        let written = domain_xml(&self.described.machine, &self.attached, &wish);
        self.described.dropped.extend(written.dropped);
        written.value
    }

    fn imported(self, paths: &[PathBuf]) -> Imported {
        let mut paths = paths.iter();
        let archive = &self.disks;
        let disks = self.attached.into_iter().map(|disk| ImportedDisk {
            path: paths.next().cloned(),
            name: disk.target,
            key: disk.key,
            label: disk.label,
            size_bytes: archive.device(disk.number).known_size_bytes(),
            is_blank: disk.is_blank,
        });
        Imported {
            kind: self.kind,
            packing: self.packing,
            read_bytes: self.counter.bytes(),
            disks: disks.collect(),
            machine: self.described.machine,
            dropped: self.described.dropped,
        }
    }

    /// Imports the machine as a snapshot, with its configuration both for libvirt and as in the archive.
    ///
    /// # Errors
    /// The archive is damaged or truncated; no snapshot is created.
    pub fn into_repository(
        mut self,
        repository: &Repository,
        request: ImportRepository,
        job: Job<'_>,
    ) -> Result<ImportReport> {
        let name = match request.machine {
            Some(name) => name,
            None => self.listed_name()?,
        };
        let sink = RepositorySink::new(repository, request.snapshot, job);
        sink.begin(&name, Claimant::Archive(self.described.machine.uuid.as_deref()))?;
        let notes = self.notes();
        let xml = self.domain_xml(None, Format::Qcow2);
        let mut texts = vec![(STREAM_DOMAIN.to_owned(), xml.into_bytes())];
        let documents = self.documents.iter();
        texts.extend(documents.map(|document| (kept_name(document), document.content.clone())));
        let devices: Vec<ArchiveDevice> = self.attached.iter().map(|disk| self.device(disk)).collect();
        let disks = self.attached.iter().zip(&devices).map(|(disk, device)| DiskToStore {
            name: disk.target.clone(),
            device,
            changed: None,
            notes: notes_of(disk),
        });
        let others = texts
            .into_iter()
            .map(|(name, bytes)| OtherToStore::stream(&name, StreamAfterDisks::new(&self.disks, Cursor::new(bytes))));
        let machine = MachineToStore {
            time: request.time,
            notes,
            disks: disks.collect(),
            others: others.collect(),
            total_bytes: None,
        };
        job.progress.phase(&format!("importing {name}"), Unit::Bytes);
        store_machine(&sink, machine, &RateLimit::new(None, job), job)?;
        let backup = sink.into_report().expect("what was read was stored");
        warn_of_corrections(&self.disks.corrections(), job);
        note_unverified(&self.disks.unverified(), job);
        Ok(ImportReport {
            backup,
            imported: self.imported(&[]),
        })
    }

    /// Plans an import as a snapshot: checks what is known before the disks are read, and changes nothing. Returns the
    /// machine and the name of the snapshots.
    ///
    /// # Errors
    /// The name belongs to another machine.
    pub fn plan_into_repository(
        self,
        repository: &Repository,
        request: ImportRepository,
        job: Job<'_>,
    ) -> Result<(Imported, MachineName)> {
        let name = match request.machine {
            Some(name) => name,
            None => self.listed_name()?,
        };
        let sink = RepositorySink::new(repository, request.snapshot, job);
        sink.begin(&name, Claimant::Archive(self.described.machine.uuid.as_deref()))?;
        Ok((self.look(), name))
    }

    /// Plans an import into a folder: checks what is known before the disks are read, and creates nothing.
    ///
    /// # Errors
    /// The folder exists and is not empty, or cannot be created.
    pub fn plan_into_folder(mut self, request: &ImportFolder, job: Job<'_>) -> Result<Imported> {
        let folder = absolute(&request.folder)?;
        NewFolder::check(&folder)?;
        warn_of_format(request.format, job);
        self.domain_xml(Some(&folder.display().to_string()), request.format);
        let disks = self.attached.iter();
        let paths: Vec<PathBuf> = disks
            .map(|disk| folder.join(format!("{}.{}", disk.target, request.format)))
            .collect();
        Ok(self.imported(&paths))
    }

    /// Imports the machine as images in a new folder. Its configuration is written last: if it exists, the folder is complete.
    ///
    /// # Errors
    /// The archive is damaged or truncated; nothing is left.
    pub fn into_folder(mut self, request: &ImportFolder, environment: &Environment, job: Job<'_>) -> Result<Imported> {
        let folder = absolute(&request.folder)?;
        let mut made = NewFolder::make(&folder)?;
        warn_of_format(request.format, job);
        let xml = self.domain_xml(Some(&folder.display().to_string()), request.format);
        let mut paths = Vec::new();
        for (number, disk) in (1..).zip(&self.attached) {
            job.progress.part(number, self.attached.len());
            let device = self.device(disk);
            let target = made.file(&format!("{}.{}", disk.target, request.format), |target| {
                convert(
                    ConvertSource::Device(&device),
                    &ConvertRequest {
                        open: OpenOptions::default(),
                        target: target.to_owned(),
                        format: request.format,
                        qcow2: Qcow2Options::default(),
                        blocks: BlockOptions::default(),
                        storage: request.storage,
                        overwrite: Overwrite::Refuse,
                        verify: VerifyImage::No,
                    },
                    environment,
                    job,
                )?;
                Ok(target.to_owned())
            })?;
            paths.push(target);
        }
        self.disks.finish()?;
        for document in &self.documents {
            made.file(&kept_name(document), |path| {
                write_file(path, &document.content, environment)
            })?;
        }
        made.file(STREAM_DOMAIN, |path| write_file(path, xml.as_bytes(), environment))?;
        made.keep();
        warn_of_corrections(&self.disks.corrections(), job);
        note_unverified(&self.disks.unverified(), job);
        Ok(self.imported(&paths))
    }

    fn notes(&self) -> BTreeMap<String, String> {
        let mut notes = BTreeMap::from([(NOTE_HYPERVISOR.to_owned(), self.kind.name().to_owned())]);
        if let Some(uuid) = &self.described.machine.uuid {
            notes.insert(NOTE_UUID.to_owned(), uuid.clone());
        }
        notes
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|source| Error::File {
        action: "find",
        path: path.to_owned(),
        source,
    })
}

/// Reports where the documents of an archive contradict its disks.
pub(super) fn warn_of_corrections(corrections: &[String], job: Job<'_>) {
    for correction in corrections {
        job.progress.warning(correction);
    }
}

/// Reports what no checksum in the archive covers: most archives without a manifest are complete, so this is a note, not a warning.
pub(super) fn note_unverified(unverified: &[String], job: Job<'_>) {
    for file in unverified {
        job.progress.note(file);
    }
}

/// Notes of a disk of the archive as a disk of a snapshot.
fn notes_of(disk: &AttachedDisk) -> BTreeMap<String, String> {
    let mut notes = BTreeMap::from([(NOTE_FORMAT.to_owned(), Format::Qcow2.name().to_owned())]);
    if !disk.label.is_empty() {
        notes.insert(NOTE_LABEL.to_owned(), disk.label.clone());
    }
    notes
}
