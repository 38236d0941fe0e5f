//! Repairs images with inconsistent metadata, if the format supports it.
//!
//! A repair is planned in memory ([`Staged`](crate::file::Staged)), and its result is checked before the image is
//! changed: a repair that makes it worse is refused. Formats write in an order in which a crash between any two writes
//! leaves the image no worse than before: data is protected before space is freed, and each step is durable before the
//! next one.
//!
//! Unambiguous damage is repaired in every mode: references to a cluster can be counted, a redundant copy can be
//! restored, a log can be replayed. Ambiguous damage, where a part of the disk is lost or a block has two owners, is
//! repaired by [`RepairMode::All`] only.

use std::path::Path;
use std::sync::Arc;

use crate::chain::deltas::open_named;
use crate::chain::{Content, detect_format, open_data_of, open_single};
use crate::file::{Access, ImageFile, Staged};
use crate::formats::qcow2::header::load_header;
use crate::formats::vmdk::concatenated::Concatenated;
use crate::formats::{ploop, qcow2, vdi, vhd, vhdx, vmdk};
use crate::model::repair_action::{RepairAction, RepairMode};
use crate::{CheckReport, Error, Format, OpenOptions, Result};

#[cfg(test)]
mod tests;

/// Whether the planned repair will be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairIntent {
    /// It will not be executed: the image is opened for reading only.
    Look,
    /// It will be executed: the image is opened for writing, with a lock.
    Repair,
}

/// Maximum number of rounds: repairing overlapping structures may reveal further damage.
const ROUND_COUNT_MAX: usize = 4;

/// A planned repair.
pub struct Repair {
    target: RepairTarget,
    before: CheckReport,
    after: CheckReport,
    actions: Vec<RepairAction>,
}

/// Plans the repair of the image at `path`. Only [`Repair::execute`] writes to it.
///
/// Backing files are not repaired.
///
/// # Errors
/// - [`Error::Locked`] if another process has it open;
/// - [`Error::UnsupportedFormat`] if it has no metadata;
/// - [`Error::Corrupt`] if its damage prevents even examining it.
pub fn plan_repair(path: &Path, options: &OpenOptions, mode: RepairMode, intent: RepairIntent) -> Result<Repair> {
    let access = match intent {
        RepairIntent::Look => Access::Read,
        RepairIntent::Repair => Access::Write,
    };
    Repair::plan(RepairTarget::open(path, options, access)?, mode)
}

impl Repair {
    fn plan(mut target: RepairTarget, mode: RepairMode) -> Result<Self> {
        let (before, was_readable) = target.check_even_damaged()?;
        let mut actions = Vec::new();
        let mut is_done = false;
        for _ in 0..ROUND_COUNT_MAX {
            let found = target.repair(mode)?;
            if found.is_empty() {
                is_done = true;
                break;
            }
            actions.extend(found);
        }
        let (mut after, is_readable) = target.check_even_damaged()?;
        let is_worse = (after.corruption_count, after.leak_count) > (before.corruption_count, before.leak_count)
            || (was_readable && !is_readable)
            || !target.keeps_descriptors()?;
        if is_worse || !is_done || actions.is_empty() {
            // Discard the plan: it changed something without a reason, made the image worse, or did not converge.
            target.discard_changes()?;
            actions.clear();
            after = before.clone();
        }
        Ok(Self {
            target,
            before,
            after,
            actions,
        })
    }

    /// Problems before the repair.
    pub fn before(&self) -> &CheckReport {
        &self.before
    }

    /// Problems after the repair.
    pub fn after(&self) -> &CheckReport {
        &self.after
    }

    /// The actions, in order; empty if nothing can be repaired.
    pub fn actions(&self) -> &[RepairAction] {
        &self.actions
    }

    /// Repairs the image durably, and checks it again. After an interruption the image is no worse than before, and
    /// can be repaired again.
    ///
    /// # Errors
    /// Those of writing. A repair that was planned with [`RepairIntent::Look`] cannot be executed.
    pub fn execute(self) -> Result<CheckReport> {
        for file in &self.target.files {
            if file.is_changed() {
                file.execute()?;
            }
        }
        let mut target = self.target;
        target.discard_changes()?;
        Ok(target.check_even_damaged()?.0)
    }
}

/// An image under repair: its files with their pending changes.
struct RepairTarget {
    image: String,
    format: Format,
    base: Vec<Arc<dyn ImageFile>>,
    files: Vec<Arc<Staged>>,
    /// The external data file of a qcow2, to validate references to it; it is not changed.
    data: Option<Arc<dyn ImageFile>>,
    /// The extents of a VMDK.
    vmdk: Option<vmdk::tables::OpenedVmdk>,
}

impl RepairTarget {
    fn open(path: &Path, options: &OpenOptions, access: Access) -> Result<Self> {
        let (path_found, file) = open_named(path, options.format, access)?;
        let image = path_found.display().to_string();
        let format = match options.format {
            Some(format) => format,
            None => detect_format::guess(&file, &path_found)?.to_write(&path_found)?,
        };
        format.require_supported(&image)?;
        match format {
            Format::Vmdk | Format::Parallels => {
                // The extents may be separate files. Each is opened once at a time: its lock also excludes other opens
                // by this process.
                drop(file);
                let opened = open_single(path, options, access)?;
                let (base, vmdk) = match opened.content {
                    Content::Vmdk(vmdk) => (vmdk.opened.files.files.clone(), Some(vmdk.opened)),
                    _ => (vec![opened.file], None),
                };
                Self::new(opened.path.display().to_string(), opened.info.format, base, vmdk)
            }
            Format::Qcow2 => {
                let data = open_data_of(&file, &path_found, options)?;
                let mut target = Self::new(image, format, vec![Arc::new(file)], None)?;
                target.data = data;
                Ok(target)
            }
            Format::Vdi | Format::Vhd | Format::Vhdx => Self::new(image, format, vec![Arc::new(file)], None),
            _ => Err(Error::UnsupportedFormat {
                image,
                format: format.name(),
                detail: "it has no metadata to repair",
            }),
        }
    }

    fn new(
        image: String,
        format: Format,
        base: Vec<Arc<dyn ImageFile>>,
        vmdk: Option<vmdk::tables::OpenedVmdk>,
    ) -> Result<Self> {
        let mut target = Self {
            image,
            format,
            base,
            files: Vec::new(),
            data: None,
            vmdk,
        };
        target.discard_changes()?;
        Ok(target)
    }

    /// Discards all changes.
    fn discard_changes(&mut self) -> Result<()> {
        self.files.clear();
        for base in &self.base {
            self.files.push(Arc::new(Staged::new(Arc::clone(base))?));
        }
        if let Some(opened) = &mut self.vmdk {
            let files = self.files.iter().map(|file| Arc::clone(file) as Arc<dyn ImageFile>);
            opened.files = Arc::new(Concatenated { files: files.collect() });
            // Headers may have been read from discarded changes.
            opened.reload(&self.image)?;
        }
        Ok(())
    }

    fn file(&self) -> Arc<dyn ImageFile> {
        Arc::clone(&self.files[0]) as Arc<dyn ImageFile>
    }

    fn check(&self) -> Result<CheckReport> {
        let (file, image) = (self.file(), &*self.image);
        match self.format {
            Format::Qcow2 => qcow2::check::check(&file, &load_header(&*file, image)?, image, self.data.as_deref()),
            Format::Vdi => vdi::check::check(&*file, &vdi::header::VdiHeader::load(&*file, image)?),
            Format::Vhd => vhd::check::check(&*file, &vhd::header::VhdHeader::load(&*file, image)?),
            Format::Vhdx => vhdx::check::check(&vhdx::opened::OpenedVhdx::load(file, Access::Read, image)?),
            Format::Vmdk => match &self.vmdk {
                Some(opened) => vmdk::check::check(opened),
                None => Ok(CheckReport::default()),
            },
            _ => ploop::check::check(&*file, &ploop::header::PloopHeader::load(&*file, image)?),
        }
    }

    /// Like `check`, with damage that prevents opening reported as a problem. Also returns whether it can be opened.
    fn check_even_damaged(&self) -> Result<(CheckReport, bool)> {
        match self.check() {
            Err(error) if error.is_corrupt() => Ok((CheckReport::of_damage(&error), false)),
            other => Ok((other?, true)),
        }
    }

    /// Whether the descriptors embedded in the extents of a VMDK are unchanged: tables that overlap them must not be
    /// repaired.
    fn keeps_descriptors(&self) -> Result<bool> {
        if self.format != Format::Vmdk {
            return Ok(true);
        }
        for (base, file) in self.base.iter().zip(&self.files) {
            if file.is_changed() && vmdk::extent::descriptor_of(&**base)? != vmdk::extent::descriptor_of(&**file)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Repairs what can be repaired, in memory.
    fn repair(&mut self, mode: RepairMode) -> Result<Vec<RepairAction>> {
        let mut actions = Vec::new();
        let file = self.file();
        let image = &*self.image;
        let repaired = match self.format {
            Format::Qcow2 => qcow2::repair::repair(&*file, self.data.as_deref(), image, mode, &mut actions),
            Format::Vdi => vdi::repair::repair(&*file, image, mode, &mut actions),
            Format::Vhd => vhd::repair::repair(&*file, image, mode, &mut actions),
            Format::Vhdx => vhdx::repair::repair(&file, image, mode, &mut actions),
            Format::Vmdk => match &mut self.vmdk {
                Some(opened) => {
                    let repaired = vmdk::repair::repair(opened, mode, &mut actions);
                    repaired.and_then(|()| opened.reload(image))
                }
                None => Ok(()),
            },
            _ => ploop::repair::repair(&*file, image, mode, &mut actions),
        };
        match repaired {
            Ok(()) => Ok(actions),
            // Leave unrecoverable damage alone; the check reports it.
            Err(error) if error.is_corrupt() => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}
