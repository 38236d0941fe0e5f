//! Disks that come while the machine runs here: overlays over exports of the source, which QEMU pulls.

use std::path::Path;

use holdfast_block::error_text;
use holdfast_engine::is_disk_socket;
use holdfast_host::ExecutionState;
use holdfast_host::domain_xml::{PulledDisk, pulled_disks, with_own_policies};

use super::overlay_files::{create_overlay, is_unused_overlay};
use super::serve::{Answered, FarTools};
use super::{FarAnswer, FarState, OverlayDisk, PullingDisk};

impl FarTools<'_> {
    pub(super) fn make_overlays(&self, disks: &[OverlayDisk]) -> Answered {
        for disk in disks {
            if !is_disk_socket(&disk.socket) {
                return Err(format!("{} is not a socket of a migration", disk.socket.display()));
            }
            if disk.path.symlink_metadata().is_ok() {
                self.delete_overlay(&disk.path)?;
            }
            create_overlay(disk).map_err(|error| error_text(&error))?;
        }
        Ok(FarAnswer::Done {})
    }

    /// Deletes an overlay of a migration that has failed.
    pub(super) fn delete_overlay(&self, path: &Path) -> Result<(), String> {
        self.wait_for_release(path);
        if path.symlink_metadata().is_ok() && !is_unused_overlay(path) {
            return Err(format!("{} is kept: it has data", path.display()));
        }
        self.delete_obsolete(path)
    }

    /// The disks of the machine that depend on the source.
    pub(super) fn pull_state(&self, uuid: &str) -> Answered {
        let state = self.state(uuid)?;
        let mut disks = Vec::new();
        if state != FarState::Absent {
            for disk in self.pulled(uuid)? {
                let job = match state {
                    FarState::Running | FarState::Paused => self.hypervisor.pull(uuid, &disk.target),
                    _ => Ok(None),
                };
                let job = job.map_err(|error| error_text(&error))?;
                disks.push(PullingDisk {
                    disk: disk.target,
                    path: disk.path,
                    socket: disk.socket,
                    export: disk.export,
                    done_bytes: job.map_or(0, |job| job.done_bytes),
                    total_bytes: job.map_or(0, |job| job.total_bytes),
                });
            }
        }
        Ok(FarAnswer::Pulling {
            state,
            disks,
            problem: None,
        })
    }

    /// Pulls what is missing. A machine that is paused because it could not read is resumed.
    pub(super) fn pull(&self, uuid: &str) -> Answered {
        let problem = match self.state(uuid)? {
            FarState::Running | FarState::Paused => self.continue_pull(uuid).err(),
            FarState::Absent | FarState::ShutOff => None,
        };
        let FarAnswer::Pulling { state, disks, .. } = self.pull_state(uuid)? else {
            return Err("the disks of the machine are not known".to_owned());
        };
        Ok(FarAnswer::Pulling { state, disks, problem })
    }

    fn continue_pull(&self, uuid: &str) -> Result<(), String> {
        let text = |error| error_text(&error);
        for disk in self.pulled(uuid)? {
            if self.hypervisor.pull(uuid, &disk.target).map_err(text)?.is_none() {
                self.hypervisor.begin_pull(uuid, &disk.target).map_err(text)?;
            }
        }
        if self.hypervisor.execution_state(uuid).map_err(text)? == ExecutionState::StoppedByDisk {
            self.hypervisor.unpause(uuid).map_err(text)?;
        }
        Ok(())
    }

    pub(super) fn end_pull(&self, uuid: &str, own: &str) -> Result<(), String> {
        if !self.pulled(uuid)?.is_empty() {
            return Err("its disks are not complete".to_owned());
        }
        let kept = self.hypervisor.kept_configuration(uuid);
        let kept = kept.map_err(|error| error_text(&error))?;
        let changed = with_own_policies(&kept, own)?;
        if changed != kept {
            self.hypervisor.define(&changed).map_err(|error| error_text(&error))?;
        }
        Ok(())
    }

    fn pulled(&self, uuid: &str) -> Result<Vec<PulledDisk>, String> {
        let text = self.hypervisor.current_configuration(uuid);
        let mut disks = pulled_disks(&text.map_err(|error| error_text(&error))?)?;
        disks.retain(|disk| is_disk_socket(&disk.socket));
        Ok(disks)
    }
}
