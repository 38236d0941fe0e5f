//! Permanent mounts of host snapshots on a folder that the user chooses.
//!
//! The method depends on the file system: a read-only bind mount of the snapshot's folder, `mount -t zfs` of a
//! snapshot, or a read-only clone if ZFS has no kernel module (zfs-fuse).

use std::path::Path;

use holdfast_block::Clock;

use super::folder::SNAPSHOT_FOLDER;
use super::zfs::{Zfs, full};
use super::{HostSnapshotName, Mounts, Provider, ProviderError, ProviderKind, ProviderResult};
use crate::storage::retries::retry_while_in_use;
use crate::system::process::Tools;

const MOUNT: &str = "mount";
/// Mount options. The content may have come from another host, so its programs and devices are disabled.
const OPTIONS: &str = "ro,nosuid,nodev,noexec";
const UNMOUNT: &str = "umount";

/// Mounts a host snapshot on a folder: read-only, with programs and devices disabled. The mount is kept until
/// [`unmount`].
pub fn mount(
    tools: &dyn Tools,
    provider: &dyn Provider,
    zfs: &Zfs,
    snapshot: &HostSnapshotName,
    folder: &Path,
) -> ProviderResult<()> {
    let shown = snapshot.to_string();
    let point = folder.display().to_string();
    if provider.kind() == ProviderKind::Zfs {
        if provider.dataset(&snapshot.dataset.name)?.is_volume {
            return Err(refused(
                "mount",
                &shown,
                "it is the snapshot of a volume; holdfast host clone makes a device of it",
            ));
        }
        let full = full(snapshot)?;
        let has_module = Path::new("/sys/module/zfs").exists();
        if !has_module {
            zfs.mount_clone(&full, folder)?;
            // zfs-fuse permits writes although the property is set.
            return ask(
                tools,
                "mount",
                &shown,
                MOUNT,
                &["-o", &format!("remount,bind,{OPTIONS}"), &point],
            );
        }
        return ask(
            tools,
            "mount",
            &shown,
            MOUNT,
            &["-t", "zfs", "-o", OPTIONS, &full, &point],
        );
    }
    if provider.kind() == ProviderKind::Lvm {
        return Err(refused(
            "mount",
            &shown,
            "it is the snapshot of a volume; holdfast host clone makes a device of it",
        ));
    }
    // For these providers, the view is the folder of the snapshot itself.
    let view = provider.view(snapshot, "mount")?;
    let from = view.path().display().to_string();
    ask(tools, "mount", &shown, MOUNT, &["--bind", "-o", OPTIONS, &from, &point])
}

/// Unmounts a host snapshot; other mounts are refused.
pub fn unmount(tools: &dyn Tools, zfs: &Zfs, clock: &dyn Clock, folder: &Path) -> ProviderResult<()> {
    let point = folder.display().to_string();
    let mounts = Mounts::read()?;
    let found = mounts.of_path(folder).filter(|mount| mount.point == folder);
    let no_snapshot = || refused("unmount", &point, "no snapshot is mounted there");
    let mount = found.ok_or_else(no_snapshot)?;
    if mount.is_zfs() && !mount.source.contains('@') {
        return zfs.unmount_clone(&mount.source);
    }
    let is_snapshot = mount.source.contains('@') && mount.is_zfs();
    let is_view = mount.root.components().any(|part| part.as_os_str() == SNAPSHOT_FOLDER);
    if !is_snapshot && !is_view {
        return Err(no_snapshot());
    }
    let is_busy =
        |error: &ProviderError| matches!(error, ProviderError::Refused { reason, .. } if reason.contains("busy"));
    let unmount = || ask(tools, "unmount", &point, UNMOUNT, &["--", &point]);
    retry_while_in_use(clock, is_busy, unmount)
}

fn ask(tools: &dyn Tools, action: &'static str, what: &str, program: &str, arguments: &[&str]) -> ProviderResult<()> {
    let answer = tools.ask(program, arguments)?;
    if answer.is_success {
        return Ok(());
    }
    Err(refused(action, what, answer.stderr.trim()))
}

fn refused(action: &'static str, what: &str, reason: &str) -> ProviderError {
    ProviderError::Refused {
        action,
        what: what.to_owned(),
        reason: reason.to_owned(),
    }
}
