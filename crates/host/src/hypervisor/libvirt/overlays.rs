//! Commits of overlays, which the bindings do not wrap.
#![expect(unsafe_code, reason = "foreign functions; the contract stands beside each use")]

use std::ffi::{CString, c_int};
use std::num::NonZeroU64;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use virt::error::Error as VirtError;
use virt::sys;

use super::{Libvirt, LibvirtMachine};
use crate::hypervisor::domain_xml::{overlays_document, snapshot_sources};
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::overlays::{CommitProgress, Overlays};
use crate::hypervisor::traits::Machine as _;

const COMMIT: &str = "commit an overlay of";
const SNAPSHOT: &str = "put overlays on the disks of";

impl Overlays for Libvirt {
    fn snapshot_files(&self, machine: &str) -> Result<Vec<PathBuf>> {
        let machine = self.find(machine)?;
        let refused = |error| machine.refused("list the snapshots of", &error);
        let mut files = Vec::new();
        for snapshot in machine.domain().list_all_snapshots(0).map_err(refused)? {
            let text = snapshot.xml_desc(0).map_err(refused)?;
            files.extend(snapshot_sources(&text).map_err(|detail| Error::Configuration {
                machine: machine.name.clone(),
                detail,
            })?);
        }
        Ok(files)
    }

    fn begin_overlays(&self, machine: &str, overlays: &[(String, PathBuf)], others: &[String]) -> Result<()> {
        let machine = self.find(machine)?;
        let refused = |reason: String| Error::Refused {
            action: SNAPSHOT,
            machine: machine.name.clone(),
            reason,
        };
        let document = overlays_document(overlays, others).map_err(refused)?;
        let flags = sys::VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
            | sys::VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
            | sys::VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA;
        let created = machine.domain().create_snapshot_xml(&document.to_string(), flags);
        created.map(drop).map_err(|error| machine.refused(SNAPSHOT, &error))
    }

    fn begin_commit(&self, machine: &str, disk: &str, base: &Path, rate: Option<NonZeroU64>) -> Result<()> {
        let machine = self.find(machine)?;
        let (disk, base) = (
            machine.word(disk.as_bytes())?,
            machine.word(base.as_os_str().as_bytes())?,
        );
        // SAFETY: the domain lives as long as its reference; both texts end in zero and outlive the call; no top
        // means the active image.
        let code = unsafe {
            sys::virDomainBlockCommit(
                machine.domain().as_ptr(),
                disk.as_ptr(),
                base.as_ptr(),
                std::ptr::null(),
                rate.map_or(0, NonZeroU64::get),
                sys::VIR_DOMAIN_BLOCK_COMMIT_ACTIVE | sys::VIR_DOMAIN_BLOCK_COMMIT_BANDWIDTH_BYTES,
            )
        };
        machine.outcome(code).map(drop)
    }

    fn unthrottle_commit(&self, machine: &str, disk: &str) -> Result<()> {
        let machine = self.find(machine)?;
        let disk = machine.word(disk.as_bytes())?;
        // SAFETY: the domain lives as long as its reference; `disk` ends in zero and outlives the call; no rate means
        // no limit.
        let code = unsafe { sys::virDomainBlockJobSetSpeed(machine.domain().as_ptr(), disk.as_ptr(), 0, 0) };
        machine.outcome(code).map(drop)
    }

    fn commit_progress(&self, machine: &str, disk: &str) -> Result<Option<CommitProgress>> {
        let machine = self.find(machine)?;
        let disk = machine.word(disk.as_bytes())?;
        let mut info = sys::virDomainBlockJobInfo {
            type_: 0,
            bandwidth: 0,
            cur: 0,
            end: 0,
        };
        // SAFETY: the domain lives as long as its reference; `disk` ends in zero; `info` is a place for the answer.
        let code = unsafe { sys::virDomainGetBlockJobInfo(machine.domain().as_ptr(), disk.as_ptr(), &raw mut info, 0) };
        let is_commit = u32::try_from(info.type_) == Ok(sys::VIR_DOMAIN_BLOCK_JOB_TYPE_ACTIVE_COMMIT);
        let outcome = match machine.outcome(code) {
            // A job ends with its QEMU.
            Err(_) if machine.ended().is_some() => return Ok(None),
            outcome => outcome?,
        };
        Ok((outcome > 0 && is_commit).then_some(CommitProgress {
            done_bytes: info.cur,
            total_bytes: info.end,
        }))
    }

    fn pivot(&self, machine: &str, disk: &str) -> Result<()> {
        self.find(machine)?.end_job(disk, sys::VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT)
    }

    fn abandon_commit(&self, machine: &str, disk: &str) -> Result<()> {
        self.find(machine)?.end_job(disk, 0)
    }
}

impl LibvirtMachine {
    fn end_job(&self, disk: &str, flags: u32) -> Result<()> {
        let disk = self.word(disk.as_bytes())?;
        // SAFETY: the domain lives as long as its reference; `disk` ends in zero and outlives the call.
        let code = unsafe { sys::virDomainBlockJobAbort(self.domain().as_ptr(), disk.as_ptr(), flags) };
        self.outcome(code).map(drop)
    }

    fn outcome(&self, code: c_int) -> Result<c_int> {
        if code < 0 {
            return Err(self.refused(COMMIT, &VirtError::last_error()));
        }
        Ok(code)
    }

    fn word(&self, bytes: &[u8]) -> Result<CString> {
        CString::new(bytes).map_err(|_| Error::Refused {
            action: COMMIT,
            machine: self.name.clone(),
            reason: "a name contains a zero byte".to_owned(),
        })
    }
}
