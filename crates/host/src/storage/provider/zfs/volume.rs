//! Devices of volumes.

use std::fs::File;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::{HostSnapshotScope, ProviderError, ProviderResult};
use super::Zfs;

/// How long udev may take to create the device node of a volume: seconds, on a busy host.
const DEVICE_TIME_OUT: Duration = Duration::from_secs(60);
const DEVICE_INTERVAL: Duration = Duration::from_millis(50);

/// The device of a volume, by udev's link.
pub fn volume_device(name: &str) -> PathBuf {
    Path::new("/dev/zvol").join(name)
}

/// Flushes the kernel's block cache of a volume, or of all volumes in a tree. Cached data has not reached ZFS, and
/// would be missing in a snapshot. The guest's flushes have the same effect, unless they are ignored
/// (`cache=unsafe`).
pub(super) fn write_out(scope: &HostSnapshotScope) -> ProviderResult<()> {
    if scope.is_tree {
        write_out_tree(&scope.dataset.name)
    } else {
        write_out_volume(&scope.dataset.name)
    }
}

fn write_out_tree(name: &str) -> ProviderResult<()> {
    let device = volume_device(name);
    if !device.is_dir() {
        return write_out_volume(name);
    }
    let names = device.read_dir().into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    // Snapshots may have devices, too, but are never written.
    for below in names.filter(|name| !name.contains('@')) {
        write_out_tree(&format!("{name}/{below}"))?;
    }
    Ok(())
}

/// Flushes the cache of a volume. Does nothing for other datasets.
fn write_out_volume(name: &str) -> ProviderResult<()> {
    let device = volume_device(name);
    let is_device = device.metadata().is_ok_and(|found| found.file_type().is_block_device());
    if !is_device {
        return Ok(());
    }
    let synced = File::open(&device).and_then(|opened| opened.sync_all());
    synced.map_err(|source| ProviderError::File {
        action: "write out",
        path: device,
        source,
    })
}

impl Zfs {
    /// Waits for the device of a new volume: `zfs` returns before udev has created it.
    pub(super) fn wait_for_device(&self, name: &str) -> ProviderResult<()> {
        let device = volume_device(name);
        let exists = || {
            let found = device.metadata();
            found.is_ok_and(|metadata| metadata.file_type().is_block_device())
        };
        let start = self.clock.now();
        while !exists() {
            if self.clock.now().saturating_sub(start) >= DEVICE_TIME_OUT {
                return Err(ProviderError::Refused {
                    action: "use",
                    what: name.to_owned(),
                    reason: format!(
                        "its device {} did not appear within {} s: udev creates it, unless the property volmode of the volume is none",
                        device.display(),
                        DEVICE_TIME_OUT.as_secs()
                    ),
                });
            }
            self.clock.sleep(DEVICE_INTERVAL);
        }
        Ok(())
    }
}
