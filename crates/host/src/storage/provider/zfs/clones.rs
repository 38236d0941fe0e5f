//! Temporary clones of host snapshots: for viewing one, and for a machine that is being created.
//!
//! Each clone is marked by a property that contains its creator. The clones of a killed process are found by that
//! property.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::Clock;

use super::super::folder::check_name;
use super::super::{DatasetState, HostSnapshotName, Provider as _, ProviderError, ProviderResult, View};
use super::{ZFS, Zfs, full, full_name, table, volume_device};
use crate::storage::retries::retry_while_in_use;
use crate::system::process::Tools;

/// The property of a clone for viewing: the name of the snapshot.
const VIEW: &str = "holdfast:view";
/// The property of a clone for a machine that is being created: the name of the machine.
const UNFINISHED: &str = "holdfast:unfinished";
/// The property of both kinds: the process that created the clone.
const MAKER: &str = "holdfast:maker";
/// Prefix of the names of clones for viewing, in the root of their pool.
const VIEW_PREFIX: &str = "holdfast-view-";
/// Snapshots may have come from another host, so set-user-id programs, devices and execution are disabled.
const WITHOUT_RIGHTS: [&str; 6] = ["-o", "setuid=off", "-o", "devices=off", "-o", "exec=off"];
/// The label of a clone that a user has mounted permanently.
const MOUNTED: &str = "mount";

/// An existing temporary clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemporaryClone {
    /// The name.
    pub name: String,
    /// The purpose.
    pub kind: TemporaryCloneKind,
    /// The recorded creator; empty if none is recorded.
    pub maker: String,
}

/// The purpose of a clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemporaryCloneKind {
    /// Viewing a host snapshot.
    View,
    /// A machine to be created from it.
    Machine(String),
}

impl Zfs {
    /// The temporary clones in a pool, whether or not their creators still run.
    pub fn temporary_clones(&self, pool: &str) -> ProviderResult<Vec<TemporaryClone>> {
        full_name(pool, "check")?;
        let marked = |property| self.datasets_with(property, pool);
        let (views, unfinished) = (marked(VIEW)?, marked(UNFINISHED)?);
        if views.is_empty() && unfinished.is_empty() {
            return Ok(Vec::new());
        }
        let makers = marked(MAKER)?;
        let clone = |name: &String, kind| TemporaryClone {
            name: name.clone(),
            kind,
            maker: makers.get(name).cloned().unwrap_or_default(),
        };
        let is_view = |(name, label): &(&String, &String)| is_view_name(name) && *label != MOUNTED;
        let views = views.iter().filter(is_view);
        let views = views.map(|(name, _)| clone(name, TemporaryCloneKind::View));
        let machines = unfinished
            .iter()
            .map(|(name, machine)| clone(name, TemporaryCloneKind::Machine(machine.clone())));
        Ok(views.chain(machines).collect())
    }

    /// The datasets of a pool for which this property of Holdfast is set directly, not inherited.
    fn datasets_with(&self, property: &str, pool: &str) -> ProviderResult<BTreeMap<String, String>> {
        let mut arguments = vec!["get", "-Hp", "-r", "-o", "name,value,source"];
        if self.is_newer()? {
            arguments.extend(["-s", "local,received", "-t", "filesystem,volume"]);
        }
        arguments.extend([property, pool]);
        let mut found = table::records(&self.ask("list the clones in", pool, &arguments)?);
        found.retain(|name, _| !name.contains('@'));
        Ok(found)
    }

    /// Destroys a temporary clone, if it still is one, has no snapshots, and no process has files in it open.
    pub fn destroy_temporary(&self, left: &TemporaryClone) -> ProviderResult<()> {
        full_name(&left.name, "check")?;
        let pool = left.name.split('/').next().unwrap_or_default();
        let is_temporary = self.temporary_clones(pool)?.contains(left);
        if !is_temporary || self.dataset(&left.name)?.origin.is_none() {
            return Err(ProviderError::NotFound {
                what: format!("temporary clone {}", left.name),
            });
        }
        self.destroy_with_retries("destroy", &left.name)
    }

    fn destroy_with_retries(&self, action: &'static str, clone: &str) -> ProviderResult<()> {
        let is_held = |error: &ProviderError| matches!(error, ProviderError::Held { .. });
        let destroy = || self.ask(action, clone, &["destroy", clone]);
        retry_while_in_use(&*self.clock, is_held, destroy).map(drop)
    }

    /// Destroys a dataset that was [cloned](Self::clone_for_machine) from a host snapshot and has no snapshots
    /// itself.
    pub fn destroy_clone(&self, name: &str, of: &HostSnapshotName) -> ProviderResult<()> {
        let origin = full(of)?;
        let state = self.dataset(name)?;
        if state.origin.as_deref() != Some(&origin) {
            return Err(ProviderError::Refused {
                action: "destroy",
                what: name.to_owned(),
                reason: format!("it is not a clone of {origin}"),
            });
        }
        self.destroy_with_retries("destroy", name)
    }

    /// Clones a host snapshot to a writable dataset for a machine. It is marked as unfinished until
    /// [`finish_clone`](Self::finish_clone).
    pub fn clone_for_machine(
        &self,
        snapshot: &HostSnapshotName,
        name: &str,
        machine: &str,
    ) -> ProviderResult<DatasetState> {
        let full = full(snapshot)?;
        full_name(name, "check")?;
        let (mark, maker) = (format!("{UNFINISHED}={machine}"), self.maker_property());
        let mut arguments = vec!["clone", "-o", &mark];
        if let Some(maker) = &maker {
            arguments.extend(["-o", maker]);
        }
        arguments.extend([&full[..], name]);
        self.ask("clone", &full, &arguments)?;
        self.cloned(name, snapshot)
    }

    /// The state of a new clone, once it is usable.
    pub(super) fn cloned(&self, name: &str, of: &HostSnapshotName) -> ProviderResult<DatasetState> {
        let state = self.dataset(name)?;
        if state.is_volume
            && let Err(error) = self.wait_for_device(name)
        {
            // An unusable clone is removed. The error has the reason.
            self.destroy_clone(name, of).ok();
            return Err(error);
        }
        Ok(state)
    }

    /// Removes the mark of an unfinished clone, after the machine was created.
    pub fn finish_clone(&self, name: &str) -> ProviderResult<()> {
        full_name(name, "check")?;
        for property in [UNFINISHED, MAKER] {
            self.ask("remove the mark of", name, &["inherit", property, name])?;
        }
        Ok(())
    }

    fn maker_property(&self) -> Option<String> {
        self.maker.as_ref().map(|maker| format!("{MAKER}={maker}"))
    }

    /// The datasets that were cloned from a host snapshot.
    pub(super) fn clones_of(&self, snapshot: &HostSnapshotName) -> ProviderResult<Vec<String>> {
        check_name(&snapshot.name)?;
        let full = full(snapshot)?;
        let all = self.datasets()?.into_iter();
        let of_it = all.filter(|state| state.origin.as_deref() == Some(&full));
        Ok(of_it.map(|state| state.dataset.name).collect())
    }

    /// Mounts a snapshot at `folder`, as a permanent clone.
    pub(in crate::storage::provider) fn mount_clone(&self, snapshot: &str, folder: &Path) -> ProviderResult<()> {
        let pool = snapshot.split(['/', '@']).next().unwrap_or_default();
        // A different label for each folder.
        let label: String = folder
            .display()
            .to_string()
            .chars()
            .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' })
            .collect();
        let clone = format!("{pool}/{VIEW_PREFIX}at{label}");
        let mark = format!("{VIEW}={MOUNTED}");
        let mountpoint = format!("mountpoint={}", folder.display());
        let mut arguments = vec!["clone", "-o", "readonly=on", "-o", &mark, "-o", &mountpoint];
        arguments.extend(WITHOUT_RIGHTS);
        arguments.extend([snapshot, &clone]);
        self.ask("mount", snapshot, &arguments).map(drop)
    }

    /// Unmounts and destroys a permanent clone.
    pub(in crate::storage::provider) fn unmount_clone(&self, clone: &str) -> ProviderResult<()> {
        if !is_view_name(clone) || self.dataset(clone)?.origin.is_none() {
            return Err(ProviderError::Refused {
                action: "unmount",
                what: clone.to_owned(),
                reason: "no snapshot is mounted there".to_owned(),
            });
        }
        self.destroy_with_retries("unmount", clone)
    }

    /// Clones a snapshot for viewing; dropping the view destroys the clone.
    pub(super) fn clone_for_view(&self, snapshot: &str, label: &str) -> ProviderResult<View> {
        let pool = snapshot.split(['/', '@']).next().unwrap_or_default();
        let clone = format!("{pool}/{VIEW_PREFIX}{label}");
        let is_volume = {
            let of = snapshot.split('@').next().unwrap_or_default();
            self.dataset(of)?.is_volume
        };
        let folder = self.views.join(label);
        let (mark, maker) = (format!("{VIEW}={label}"), self.maker_property());
        let mountpoint = format!("mountpoint={}", folder.display());
        let mut arguments = vec!["clone", "-o", "readonly=on", "-o", &mark];
        if let Some(maker) = &maker {
            arguments.extend(["-o", maker]);
        }
        if !is_volume {
            arguments.extend(["-o", &mountpoint]);
            arguments.extend(WITHOUT_RIGHTS);
        }
        arguments.extend([snapshot, &clone]);
        self.ask("view", snapshot, &arguments)?;
        let (tools, clock, gone) = (Arc::clone(&self.tools), Arc::clone(&self.clock), folder.clone());
        let path: PathBuf = if is_volume { volume_device(&clone) } else { folder };
        let name = clone.clone();
        let view = View {
            folder: path,
            cleanup: Some(Box::new(move || {
                remove_view(&*tools, &*clock, &clone);
                drop(std::fs::remove_dir(gone));
            })),
        };
        if is_volume {
            self.wait_for_device(&name)?;
        }
        Ok(view)
    }
}

fn is_view_name(name: &str) -> bool {
    let last = name.rsplit('/').next();
    last.is_some_and(|name| name.starts_with(VIEW_PREFIX))
}

/// Destroys a clone. A leftover is found by its property.
fn remove_view(tools: &dyn Tools, clock: &dyn Clock, clone: &str) {
    let destroy = || match tools.ask(ZFS, &["destroy", clone]) {
        Ok(answer) if !answer.is_success => Err(answer.stderr),
        _ => Ok(()),
    };
    retry_while_in_use(clock, |reason| reason.contains("busy"), destroy).ok();
}
