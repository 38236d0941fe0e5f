//! Which disks QEMU's NBD server must not serve.

use super::{Danger, DiskContext, QemuDisk, QemuVersion};
use crate::qmp::{Monitor, Result};

/// Why a disk must not be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotServed {
    /// The QEMU.
    pub version: QemuVersion,
    /// Where the disk is worked at.
    pub context: DiskContext,
}

impl NotServed {
    /// Asks QEMU for each of these disks whether it must not be served.
    pub fn query(monitor: &dyn Monitor, disks: &[&QemuDisk]) -> Result<Vec<Option<Self>>> {
        let version = QemuVersion::query(monitor)?;
        let dangers = [Danger::NbdClientOfIothread, Danger::NodeOnBusyIothread];
        if dangers.iter().all(|danger| version.defect(*danger).is_none()) {
            return Ok(vec![None; disks.len()]);
        }
        let ask = |disk: &&QemuDisk| {
            let context = DiskContext::query(monitor, &disk.device)?;
            Ok((!context.is_main_loop()).then_some(Self { version, context }))
        };
        disks.iter().map(ask).collect()
    }
}

impl std::fmt::Display for NotServed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let version = self.version;
        match &self.context {
            DiskContext::Iothread(path) => {
                let name = path.rsplit('/').next().unwrap_or(path);
                write!(formatter, "it is in the iothread {name}")?;
            }
            DiskContext::Unknown | DiskContext::MainLoop => write!(formatter, "it may be in an iothread")?,
        }
        write!(
            formatter,
            ", from which QEMU {version} must not serve it: it might crash"
        )
    }
}
