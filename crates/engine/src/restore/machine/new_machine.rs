//! Plans a new machine from a snapshot.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{
    DiskChange, DiskPlace, Emulator, Identity, NewIdentity, Rewrite, Rewritten, rewrite, with_name,
};
use holdfast_host::{MacAddress, Uuid};
use holdfast_image::Format;
use holdfast_repo::{DiskRecord, Manifest};

use super::draft::{Definition, Draft, PlannedMachine, Planner, unfit};
use super::neighbours::Neighbours;
use super::places::{Paths, data_bytes, folder_of, with_extension};
use super::planned_file::{FileContent, FileWay, PlannedFile};
use super::present_image::size_if_writable;
use super::request::{NewMachineIdentity, NewMachineOptions};
use super::stored;
use super::stored::StoredMachine;
use super::tpm;
use crate::files::block_target::{Overwrite, is_block_device};
use crate::job::error::Refusal;
use crate::job::{DiskName, Error, MachineName, Result};
use crate::notes::NOTE_FORMAT;

/// The suffix of a restored machine's name.
const SUFFIX: &str = "restored";
/// Where libvirt keeps firmware variables.
const NVRAM_FOLDER: &str = "/var/lib/libvirt/qemu/nvram";

/// Where libvirt keeps images.
const IMAGE_FOLDER: &str = "/var/lib/libvirt/images";

pub(super) fn draft(planner: &Planner<'_>, snapshot: &Manifest, wish: &NewMachineOptions) -> Result<Draft> {
    let stored = StoredMachine::read(planner.repository, snapshot)?;
    let neighbours = Neighbours::of(planner.hypervisor)?;
    let new = NewMachine {
        planner,
        wish,
        stored: &stored,
        neighbours: &neighbours,
    };
    let identity = new.identity()?;
    let machine = match &identity {
        Identity::New(identity) => PlannedMachine {
            name: identity.name.clone(),
            uuid: identity.uuid.to_string(),
            is_new: true,
        },
        Identity::Keep | Identity::Named(_) => PlannedMachine {
            name: new.name()?,
            uuid: stored.xml.uuid.clone().unwrap_or_default(),
            is_new: true,
        },
    };
    let mut draft = Draft::new(machine);
    let mut paths = Paths::new(&neighbours);
    let mut disks = draft.disks_left_out(&stored, &neighbours);
    disks.extend(new.disks(&mut draft, &mut paths)?);
    let nvram = new.nvram(&mut draft, &mut paths)?;
    draft.tpm = new.tpm(&identity, &mut draft, &mut paths)?;
    let mut wish = Rewrite {
        identity,
        generation: Some(planner.uuid()?),
        disks,
        nvram,
        tpm: draft.tpm.clone(),
        domain_type: new.wish.domain_type.clone(),
        emulator: Emulator::Keep,
    };
    let done = new.rewritten(&mut wish)?;
    draft.notes.extend(done.notes);
    draft.warnings.extend(done.warnings);
    draft.identity = wish.identity.clone();
    tpm::plan(planner, snapshot, &neighbours, &done.text, None, &mut draft)?;
    if wish.identity == Identity::Keep {
        new.warn_of_duplicate_addresses(&mut draft);
    }
    draft.configuration = Some(done.text.clone());
    draft.before = Some(stored.text.clone());
    draft.definition = Some(Definition {
        before: stored.text.clone(),
        text: done.text,
    });
    Ok(draft)
}

struct NewMachine<'a> {
    planner: &'a Planner<'a>,
    wish: &'a NewMachineOptions,
    stored: &'a StoredMachine<'a>,
    neighbours: &'a Neighbours,
}

impl NewMachine<'_> {
    /// The configuration for its new place. If the path of its QEMU does not exist, as on a host of another
    /// distribution, it gets the QEMU of this hypervisor.
    fn rewritten(&self, wish: &mut Rewrite) -> Result<Rewritten> {
        let unfit = |detail| unfit(self.stored.name(), detail);
        let done = rewrite(&self.stored.text, wish).map_err(unfit)?;
        let emulator = self.stored.xml.emulator.as_deref();
        if emulator.is_none_or(Path::exists) || matches!(self.planner.hypervisor.check(&done.text), Ok(None)) {
            return Ok(done);
        }
        wish.emulator = Emulator::OfHypervisor;
        rewrite(&self.stored.text, wish).map_err(unfit)
    }

    fn identity(&self) -> Result<Identity> {
        let name = self.name()?;
        if let NewMachineIdentity::Keep = self.wish.identity {
            let uuid = self.stored.xml.uuid.as_deref().unwrap_or_default();
            if let Some(there) = self.neighbours.with_uuid(uuid) {
                return Err(exists(&there.name, &there.uuid));
            }
            return Ok(if name == self.stored.name() {
                Identity::Keep
            } else {
                Identity::Named(name)
            });
        }
        let mut taken = self.neighbours.macs();
        let mut macs = Vec::new();
        while macs.len() < self.stored.xml.macs.len() {
            let mac = MacAddress::from_random(self.planner.random()?);
            if taken.insert(mac.to_string()) {
                macs.push(mac);
            }
        }
        Ok(Identity::New(NewIdentity {
            name,
            uuid: self.free_uuid()?,
            macs: Some(macs),
        }))
    }

    fn free_uuid(&self) -> Result<Uuid> {
        loop {
            let uuid = self.planner.uuid()?;
            if self.neighbours.with_uuid(&uuid.to_string()).is_none() {
                return Ok(uuid);
            }
        }
    }

    /// The requested name, or one that no machine has.
    fn name(&self) -> Result<String> {
        let old = self.stored.name();
        // File names contain the machine's name.
        if old.contains('/') {
            return Err(unfit(old, format!("no machine can be called {old:?}")));
        }
        let wanted = match (&self.wish.name, self.wish.identity) {
            (Some(name), _) => name.as_str(),
            (None, NewMachineIdentity::Keep) => old,
            (None, NewMachineIdentity::New) => {
                // The name in the repository, which may differ from the one in the configuration. libvirt allows names
                // under which a snapshot cannot be listed; such a name would prevent backups of the new machine.
                let listed = [&self.stored.snapshot.machine[..], old];
                let fit = listed.into_iter().find_map(|name| MachineName::new(name).ok());
                let base = fit.unwrap_or_else(|| MachineName::near(old));
                let numbered = (2_u64..).map(|number| format!("{base}-{SUFFIX}-{number}"));
                let mut names = std::iter::once(format!("{base}-{SUFFIX}")).chain(numbered);
                let name = names.find(|name| self.neighbours.named(name).is_none());
                let name = name.expect("numbers do not end");
                return Ok(MachineName::new(name)?.to_string());
            }
        };
        // File names contain the machine's name.
        if wanted.contains('/') {
            return Err(unfit(old, format!("no machine can be called {wanted:?}")));
        }
        match self.neighbours.named(wanted) {
            None => Ok(wanted.to_owned()),
            Some(there) => Err(exists(&there.name, &there.uuid)),
        }
    }

    /// A place for every disk of the snapshot that the configuration has.
    fn disks(&self, draft: &mut Draft, paths: &mut Paths<'_>) -> Result<BTreeMap<String, DiskChange>> {
        let records: Vec<&DiskRecord> = stored::disks(self.stored.snapshot).collect();
        let present = || records.iter().map(|record| record.name.clone()).collect::<Vec<_>>();
        let mut named = self.wish.places.keys();
        if let Some(disk) = named.find(|name| records.iter().all(|record| record.name != **name)) {
            return Err(Refusal::UnknownDisk {
                disk: disk.clone(),
                present: present(),
            }
            .into());
        }
        let mut changes = BTreeMap::new();
        // Places that the user chose come first, so that automatically chosen ones do not conflict with them.
        let is_named = |record: &&&DiskRecord| self.wish.places.contains_key(&record.name);
        let named = records.iter().filter(is_named);
        for record in named.chain(records.iter().filter(|record| !is_named(record))) {
            if self.stored.xml.disks.iter().all(|disk| disk.target != record.name) {
                draft.warnings.push(format!(
                    "disk {} is in the snapshot and not in the configuration, so it is not restored: it was attached only \
                     as long as the machine ran; restore it to a file by itself",
                    record.name
                ));
                continue;
            }
            let named = self.wish.places.get(&record.name);
            let file = match (named, self.planner.contents.cloned(record)) {
                (Some(path), _) => self.named_place(record, &absolute(path)?, paths)?,
                (None, Some(path)) => self.planned(record, path.to_owned(), self.format(record), FileWay::Cloned)?,
                (None, None) => self.found_place(record, draft, paths)?,
            };
            let place = DiskPlace {
                path: file.to.clone(),
                medium: file.medium(),
                format: file.format.qemu_name().to_owned(),
            };
            changes.insert(record.name.clone(), DiskChange::Place(place));
            draft.files.push(file);
        }
        let order = |file: &PlannedFile| {
            let is_it = |record: &&DiskRecord| file.content == FileContent::Disk(record.name.clone());
            records.iter().position(is_it)
        };
        draft.files.sort_by_key(order);
        Ok(changes)
    }

    fn planned(&self, record: &DiskRecord, to: PathBuf, format: Format, way: FileWay) -> Result<PlannedFile> {
        Ok(PlannedFile {
            content: FileContent::Disk(record.name.clone()),
            from: stored::path_of(record),
            to,
            format,
            way,
            kept_at: None,
            size_bytes: record.size_bytes,
            data_bytes: data_bytes(self.planner.contents, record)?,
        })
    }

    /// The format of a new file: the requested one, the original one, or one that can be written.
    fn format(&self, record: &DiskRecord) -> Format {
        let before = record.notes.get(NOTE_FORMAT).and_then(|name| Format::from_name(name));
        match (self.wish.format, before) {
            (Some(format), _) => format,
            (None, Some(format)) if Format::RUN.contains(&format) => format,
            (None, Some(_)) => Format::Qcow2,
            (None, None) => Format::Raw,
        }
    }

    /// A file or block device that the user chose.
    fn named_place(&self, record: &DiskRecord, path: &Path, paths: &mut Paths<'_>) -> Result<PlannedFile> {
        if !is_block_device(path) {
            folder_of(path)?;
            let replaces = self.wish.overwrite == Overwrite::Replace && path.is_file();
            let way = if replaces {
                paths.replaced(path)?;
                FileWay::Replace
            } else {
                paths.exactly(path)?;
                FileWay::NewFile
            };
            let format = if let Some(format) = self.wish.format {
                format
            } else {
                let named = Format::of_new_file(path)?;
                let extension = path.extension().and_then(std::ffi::OsStr::to_str);
                let is_said = extension.is_some_and(|name| name.eq_ignore_ascii_case(named.name()));
                if is_said && Format::RUN.contains(&named) {
                    named
                } else {
                    self.format(record)
                }
            };
            return self.planned(record, path.to_owned(), format, way);
        }
        paths.unused(path)?;
        if self.wish.overwrite == Overwrite::Refuse {
            return Err(Error::DeviceExists { path: path.to_owned() });
        }
        let target_bytes = size_if_writable(path, Format::Raw)?;
        if target_bytes < record.size_bytes {
            return Err(Error::TargetTooSmall {
                path: path.to_owned(),
                target_bytes,
                disk_bytes: record.size_bytes,
            });
        }
        self.planned(record, path.to_owned(), Format::Raw, FileWay::BlockDevice)
    }

    /// A new file in the storage folder, or beside the original.
    fn found_place(&self, record: &DiskRecord, draft: &mut Draft, paths: &mut Paths<'_>) -> Result<PlannedFile> {
        let format = self.format(record);
        let before = stored::path_of(record).filter(|path| path.is_absolute() && !path.starts_with("/dev"));
        let default = match (&self.wish.storage, &before) {
            (None, None) => self.default_folder(),
            _ => None,
        };
        let folder = match (self.wish.storage.as_deref().or(default.as_deref()), &before) {
            (Some(folder), _) => folder,
            (None, Some(path)) => path.parent().unwrap_or(Path::new("/")),
            (None, None) => {
                return Err(Refusal::NoPlace {
                    disk: record.name.clone(),
                    place: stored::path_of(record).map_or("no file".to_owned(), |path| path.display().to_string()),
                }
                .into());
            }
        };
        // The snapshot's writer chose the name: it must not point outside the folder.
        let disk = DiskName::new(record.name.as_str())?;
        let name = draft.machine.name.clone();
        let own_name = format!("{name}-{disk}.{format}");
        let file_name = before.as_deref().and_then(|path| self.file_name(path, &name));
        let path = absolute(&with_extension(&folder.join(file_name.unwrap_or(own_name)), format))?;
        folder_of(&path)?;
        let free = paths.free(&path);
        report_other_path(draft, &path, &free);
        let folder = free.parent().unwrap_or(Path::new("/"));
        let way = if self.wish.format.is_none() && self.planner.contents.can_share(record, folder) {
            FileWay::Shared
        } else {
            FileWay::NewFile
        };
        self.planned(record, free, format, way)
    }

    /// The hypervisor's default folder for images without an original path: those of machines from an archive or from
    /// another hypervisor.
    fn default_folder(&self) -> Option<PathBuf> {
        let folder = self.planner.hypervisor.image_folder();
        folder
            .or_else(|| Some(IMAGE_FOLDER.into()))
            .filter(|folder| folder.is_dir())
    }

    /// The original file name with the machine's new name in it; none if that does not distinguish the new
    /// machine's file from the original one.
    fn file_name(&self, path: &Path, name: &str) -> Option<String> {
        let before = path.file_name()?.to_str()?;
        let after = with_name(before, self.stored.name(), name);
        let is_own = after != before || name == self.stored.name() || self.wish.identity == NewMachineIdentity::Keep;
        is_own.then_some(after)
    }

    /// The path of the firmware variables; none if the machine has none.
    fn nvram(&self, draft: &mut Draft, paths: &mut Paths<'_>) -> Result<Option<PathBuf>> {
        let record = stored::nvram(self.stored.snapshot);
        let name = draft.machine.name.clone();
        let (before, record) = match (&self.stored.nvram_path, record) {
            (None, None) => return Ok(None),
            (before, record) => (before.clone(), record),
        };
        let fallback = || Path::new(NVRAM_FOLDER).join(format!("{name}_VARS.fd"));
        let path = before.clone().unwrap_or_else(fallback);
        let file_name = self
            .file_name(&path, &name)
            .unwrap_or_else(|| format!("{name}_VARS.fd"));
        let mut path = path.with_file_name(file_name);
        if let (Err(error), Some(_)) = (folder_of(&path), record) {
            let storage = self.wish.storage.as_ref().ok_or(error)?;
            path = storage.join(path.file_name().unwrap_or_default());
            folder_of(&path)?;
        }
        let wanted = absolute(&path)?;
        let path = paths.free(&wanted);
        report_other_path(draft, &wanted, &path);
        match record {
            None => draft
                .notes
                .push("the snapshot has no variables of its firmware: it starts with fresh ones".to_owned()),
            Some(record) => draft.files.push(PlannedFile {
                content: FileContent::FirmwareVariables,
                from: before,
                to: path.clone(),
                format: Format::Raw,
                way: FileWay::NewFile,
                kept_at: None,
                size_bytes: record.size_bytes,
                data_bytes: record.size_bytes,
            }),
        }
        Ok(Some(path))
    }

    /// The path of its TPM's state, if its configuration names one; otherwise its hypervisor has a path for each UUID.
    fn tpm(&self, identity: &Identity, draft: &mut Draft, paths: &mut Paths<'_>) -> Result<Option<PathBuf>> {
        let source = self.stored.xml.tpm.as_ref().and_then(|tpm| tpm.source.as_ref());
        let Some((_, before)) = source else {
            return Ok(None);
        };
        let Identity::New(new) = identity else {
            paths.unused(before)?;
            return Ok(Some(before.clone()));
        };
        let file_name = self.file_name(before, &new.name);
        let mut path = before.with_file_name(file_name.unwrap_or_else(|| format!("{}-tpm", new.name)));
        if let Err(error) = folder_of(&path) {
            let storage = self.wish.storage.as_ref().ok_or(error)?;
            path = storage.join(path.file_name().unwrap_or_default());
            folder_of(&path)?;
        }
        let wanted = absolute(&path)?;
        let path = paths.free(&wanted);
        report_other_path(draft, &wanted, &path);
        Ok(Some(path))
    }

    /// Warns if a machine keeps its MAC addresses and another machine has the same.
    fn warn_of_duplicate_addresses(&self, draft: &mut Draft) {
        let taken = self.neighbours.macs();
        for mac in &self.stored.xml.macs {
            if taken.contains(&mac.to_ascii_lowercase()) {
                draft
                    .warnings
                    .push(format!("another machine has a network card with the address {mac} too"));
            }
        }
    }
}

fn exists(name: &str, uuid: &str) -> Error {
    Refusal::MachineExists {
        name: name.to_owned(),
        uuid: uuid.to_owned(),
    }
    .into()
}

fn report_other_path(draft: &mut Draft, wanted: &Path, free: &Path) {
    if wanted != free {
        draft.notes.push(format!(
            "{} is there already, or belongs to a machine: it goes to {}",
            wanted.display(),
            free.display()
        ));
    }
}

/// The absolute path: libvirt does not share the working directory of this process.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|source| Error::File {
        action: "find",
        path: path.to_owned(),
        source,
    })
}
