//! Repairs images whose metadata contradicts itself, where the format has a repair.
//!
//! A repair is planned on a copy in memory of what it changes ([`Staged`](crate::file::Staged)), and the result is checked before the
//! image is touched: a repair that would make it worse is refused. Formats write in an order in which a crash between any two writes leaves the
//! image no worse than it was: what protects data is written before room is given back, and each step is durable before the next one.
//!
//! What is certain is repaired in every mode: uses of a cluster can be counted, a copy can be taken from its twin, a log can be replayed.
//! What is not certain, because a part of the disk is lost or a block has two owners, is repaired by [`RepairMode::All`] only.

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

/// Whether a repair is only planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairIntent {
    /// It will not be executed: the image is opened for reading only.
    Look,
    /// The image is opened for writing, with a lock.
    Repair,
}

/// How often repair is repeated: repairing overlapping structures may reveal other damage.
const ROUND_COUNT_MAX: usize = 4;

/// A planned repair.
pub struct Repair {
    target: RepairTarget,
    before: CheckReport,
    after: CheckReport,
    actions: Vec<RepairAction>,
}

/// Plans the repair of the image at `path`. Nothing is written, but by [`Repair::execute`].
///
/// Only the image itself is repaired, not its backing files.
///
/// # Errors
/// - [`Error::Locked`] where another process has it open;
/// - [`Error::UnsupportedFormat`] where it has no metadata;
/// - [`Error::Corrupt`] where it is damaged in a way that cannot even be looked at.
pub fn plan_repair(path: &Path, options: &OpenOptions, mode: RepairMode, intent: RepairIntent) -> Result<Repair> {
    let access = match intent {
        RepairIntent::Look => Access::Read,
        RepairIntent::Repair => Access::Write,
    };
    Repair::plan(RepairTarget::open(path, options, access)?, mode)
}

impl Repair {
    fn plan(mut target: RepairTarget, mode: RepairMode) -> Result<Self> {
        let (before, was_readable) = target.check_or_tell()?;
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
        let (mut after, is_readable) = target.check_or_tell()?;
        let is_worse = (after.corruption_count, after.leak_count) > (before.corruption_count, before.leak_count)
            || (was_readable && !is_readable)
            || !target.keeps_descriptors()?;
        if is_worse || !is_done || actions.is_empty() {
            // Whatever was tried is forgotten: no change without its reason, none for the worse, and none that never comes to an end.
            target.forget()?;
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

    /// What is wrong with the image as it is.
    pub fn before(&self) -> &CheckReport {
        &self.before
    }

    /// What will be wrong with it afterwards.
    pub fn after(&self) -> &CheckReport {
        &self.after
    }

    /// What is going to be done, in this order; nothing where nothing can be.
    pub fn actions(&self) -> &[RepairAction] {
        &self.actions
    }

    /// Mends the image, durably, and checks it again. Where this is cut short, the image is no worse than it was, and can be repaired again.
    ///
    /// # Errors
    /// As of writing. A repair that was only to be looked at cannot be executed.
    pub fn execute(self) -> Result<CheckReport> {
        for file in &self.target.files {
            if file.is_changed() {
                file.execute()?;
            }
        }
        let mut target = self.target;
        target.forget()?;
        Ok(target.check_or_tell()?.0)
    }
}

/// An image that is mended: its files, each with the changes that it will get.
struct RepairTarget {
    image: String,
    format: Format,
    base: Vec<Arc<dyn ImageFile>>,
    files: Vec<Arc<Staged>>,
    /// The file of the data of a qcow2, where that is another one: what leads there is held against it, and it is not changed.
    data: Option<Arc<dyn ImageFile>>,
    /// The parts of a VMDK.
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
                // They may be made of other files. One opening at a time: the end of any ends the lock of all.
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
                detail: "it has no metadata that could be repaired",
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
        target.forget()?;
        Ok(target)
    }

    /// Forgets all changes.
    fn forget(&mut self) -> Result<()> {
        self.files.clear();
        for base in &self.base {
            self.files.push(Arc::new(Staged::new(Arc::clone(base))?));
        }
        if let Some(opened) = &mut self.vmdk {
            let files = self.files.iter().map(|file| Arc::clone(file) as Arc<dyn ImageFile>);
            opened.files = Arc::new(Concatenated { files: files.collect() });
            // What was read of the files may be what is forgotten.
            opened.reload(&self.image)?;
        }
        Ok(())
    }

    fn file(&self) -> Arc<dyn ImageFile> {
        Arc::clone(&self.files[0]) as Arc<dyn ImageFile>
    }

    /// Checks the image with its changes.
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

    /// The same; damage that keeps it from being opened is a problem like any other. With whether it can be.
    fn check_or_tell(&self) -> Result<(CheckReport, bool)> {
        match self.check() {
            Err(error) if error.is_corrupt() => Ok((CheckReport::of_damage(&error), false)),
            other => Ok((other?, true)),
        }
    }

    /// Whether what describes a VMDK in its extents is as it was: tables that lie over it must not be mended.
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

    /// Mends what there is to mend, in memory.
    fn repair(&mut self, mode: RepairMode) -> Result<Vec<RepairAction>> {
        let mut actions = Vec::new();
        let file = self.file();
        let image = &*self.image;
        let mended = match self.format {
            Format::Qcow2 => qcow2::repair::repair(&*file, self.data.as_deref(), image, mode, &mut actions),
            Format::Vdi => vdi::repair::repair(&*file, image, mode, &mut actions),
            Format::Vhd => vhd::repair::repair(&*file, image, mode, &mut actions),
            Format::Vhdx => vhdx::repair::repair(&file, image, mode, &mut actions),
            Format::Vmdk => match &mut self.vmdk {
                Some(opened) => {
                    let mended = vmdk::repair::repair(opened, mode, &mut actions);
                    mended.and_then(|()| opened.reload(image))
                }
                None => Ok(()),
            },
            _ => ploop::repair::repair(&*file, image, mode, &mut actions),
        };
        match mended {
            Ok(()) => Ok(actions),
            // What is damaged beyond knowledge stays as it is, and is told of by the check.
            Err(error) if error.is_corrupt() => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}
