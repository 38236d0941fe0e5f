//! Block copy jobs of running machines, which the bindings do not wrap.
#![expect(unsafe_code, reason = "foreign functions; the contract stands beside each use")]

use std::ffi::{CStr, CString};
use std::num::NonZeroU64;
use std::path::Path;

use roxmltree::Document;
use virt::error::Error as VirtError;
use virt::sys;

use super::{Libvirt, LibvirtMachine};
use crate::hypervisor::domain_xml::{DiskPlace, child, disk_element};
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::live_disks::{CopyState, ExecutionState, LiveDisks};

impl LiveDisks for Libvirt {
    fn execution_state(&self, machine: &str) -> Result<ExecutionState> {
        let machine = self.find(machine)?;
        let (mut state, mut reason) = (0, 0);
        // SAFETY: the domain lives as long as its reference; both places are variables of this function and written
        // on success only.
        let code = unsafe { sys::virDomainGetState(machine.domain().as_ptr(), &raw mut state, &raw mut reason, 0) };
        done(code).map_err(|error| machine.refused("describe", &error))?;
        let (state, reason) = (u32::try_from(state), u32::try_from(reason));
        Ok(match state.unwrap_or_default() {
            sys::VIR_DOMAIN_PAUSED if reason == Ok(sys::VIR_DOMAIN_PAUSED_IOERROR) => ExecutionState::StoppedByDisk,
            sys::VIR_DOMAIN_PAUSED => ExecutionState::Paused,
            sys::VIR_DOMAIN_SHUTOFF => ExecutionState::ShutOff,
            _ => ExecutionState::Running,
        })
    }

    fn unpause(&self, machine: &str) -> Result<()> {
        let machine = self.find(machine)?;
        let resumed = machine.domain().resume();
        resumed.map(drop).map_err(|error| machine.refused("resume", &error))
    }

    fn begin_copy(&self, machine: &str, disk: &str, to: &DiskPlace, rate: NonZeroU64) -> Result<()> {
        let machine = self.find(machine)?;
        let element = disk_element(disk, to).map_err(|detail| Error::Configuration {
            machine: machine.name.clone(),
            detail,
        })?;
        let (disk, xml) = (text(disk), text(&element.to_string()));
        // The definition of a persistent machine names the disk, and does not include the job after a restart.
        // libvirt requires a flag that confirms this.
        let flags = sys::VIR_DOMAIN_BLOCK_COPY_REUSE_EXT | sys::VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB;
        let mut limits = [
            parameter(sys::VIR_DOMAIN_BLOCK_COPY_BANDWIDTH, rate.get()),
            parameter(sys::VIR_DOMAIN_BLOCK_COPY_BUF_SIZE, buffer_bytes(rate)),
        ];
        // SAFETY: the domain lives as long as its reference; both texts end in zero, and they and the two parameters
        // outlive the call.
        let code = unsafe {
            sys::virDomainBlockCopy(
                machine.domain().as_ptr(),
                disk.as_ptr(),
                xml.as_ptr(),
                limits.as_mut_ptr(),
                2,
                flags,
            )
        };
        done(code).map_err(|error| machine.refused("copy a disk of", &error))
    }

    fn set_copy_rate(&self, machine: &str, disk: &str, rate: NonZeroU64) -> Result<()> {
        let machine = self.find(machine)?;
        let disk = text(disk);
        let flags = sys::VIR_DOMAIN_BLOCK_JOB_SPEED_BANDWIDTH_BYTES;
        // SAFETY: the domain lives as long as its reference; the name ends in zero and outlives the call.
        let code =
            unsafe { sys::virDomainBlockJobSetSpeed(machine.domain().as_ptr(), disk.as_ptr(), rate.get(), flags) };
        done(code).map_err(|error| machine.refused("change the rate of a copy of", &error))
    }

    fn copy(&self, machine: &str, disk: &str, to: &DiskPlace) -> Result<Option<CopyState>> {
        let machine = self.find(machine)?;
        let Some(job) = block_job(&machine, disk)? else {
            return Ok(None);
        };
        let is_copy = is_of_kind(&job, sys::VIR_DOMAIN_BLOCK_JOB_TYPE_COPY);
        if !is_copy || !is_copied_to(&machine.xml(0)?, disk, &to.path) {
            // The job may have ended between the two calls.
            return busy_unless_ended(&machine, disk);
        }
        Ok(Some(state_of(&job)))
    }

    fn finish_copy(&self, machine: &str, disk: &str) -> Result<()> {
        let machine = self.find(machine)?;
        let disk = text(disk);
        let flags = sys::VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT;
        // SAFETY: the domain lives as long as its reference; the name ends in zero and outlives the call.
        let code = unsafe { sys::virDomainBlockJobAbort(machine.domain().as_ptr(), disk.as_ptr(), flags) };
        done(code).map_err(|error| machine.refused("finish a copy of a disk of", &error))
    }

    fn begin_pull(&self, machine: &str, disk: &str) -> Result<()> {
        let machine = self.find(machine)?;
        let disk = text(disk);
        // SAFETY: the domain lives as long as its reference; the name ends in zero and outlives the call.
        let code = unsafe { sys::virDomainBlockPull(machine.domain().as_ptr(), disk.as_ptr(), 0, 0) };
        done(code).map_err(|error| machine.refused("pull a disk of", &error))
    }

    fn pull(&self, machine: &str, disk: &str) -> Result<Option<CopyState>> {
        let machine = self.find(machine)?;
        match block_job(&machine, disk)? {
            Some(job) if is_of_kind(&job, sys::VIR_DOMAIN_BLOCK_JOB_TYPE_PULL) => Ok(Some(state_of(&job))),
            Some(_) => busy_unless_ended(&machine, disk),
            None => Ok(None),
        }
    }

    fn current_configuration(&self, machine: &str) -> Result<String> {
        self.find(machine)?.xml(0)
    }

    fn user_of_machines(&self) -> Result<Option<(u32, u32)>> {
        let capabilities = self.connection().capabilities().map_err(|error| self.lost(error))?;
        Ok(user_in(&capabilities))
    }
}

/// The job on a disk; none if there is none.
fn block_job(machine: &LibvirtMachine, disk: &str) -> Result<Option<sys::virDomainBlockJobInfo>> {
    let disk = text(disk);
    let mut info = sys::virDomainBlockJobInfo {
        type_: 0,
        bandwidth: 0,
        cur: 0,
        end: 0,
    };
    // SAFETY: the domain lives as long as its reference; the name ends in zero and outlives the call; `info` is a local
    // variable.
    let code = unsafe { sys::virDomainGetBlockJobInfo(machine.domain().as_ptr(), disk.as_ptr(), &raw mut info, 0) };
    done(code).map_err(|error| machine.refused("query a job on a disk of", &error))?;
    Ok((code != 0).then_some(info))
}

fn is_of_kind(job: &sys::virDomainBlockJobInfo, kind: sys::virDomainBlockJobType) -> bool {
    sys::virDomainBlockJobType::try_from(job.type_) == Ok(kind)
}

fn state_of(job: &sys::virDomainBlockJobInfo) -> CopyState {
    CopyState {
        done_bytes: job.cur,
        total_bytes: job.end,
        // libvirt reports different values until QEMU reports that the copy is complete.
        is_complete: job.end > 0 && job.cur == job.end,
    }
}

/// After a job of another client was found: none if it has ended since.
fn busy_unless_ended(machine: &LibvirtMachine, disk: &str) -> Result<Option<CopyState>> {
    match block_job(machine, disk)? {
        None => Ok(None),
        Some(_) => Err(Error::Busy {
            machine: machine.name.clone(),
            holder: format!("a job of another client on disk {disk}"),
        }),
    }
}

/// QEMU's default buffer of a copy.
const COPY_BUFFER_BYTES_MAX: u64 = 10 << 20;
/// The size of the largest request of a copy.
const COPY_BUFFER_BYTES_MIN: u64 = 1 << 20;

/// The buffer of a copy: what QEMU copies in one second, within bounds.
///
/// QEMU fills the buffer before it waits for the rate, and again each time that the disk is drained, for example when
/// the guest resets its controller. With the default buffer, a slow copy would exceed its rate many times over.
fn buffer_bytes(rate: NonZeroU64) -> u64 {
    rate.get().clamp(COPY_BUFFER_BYTES_MIN, COPY_BUFFER_BYTES_MAX)
}

/// A parameter of a copy.
fn parameter(name: &CStr, value: u64) -> sys::virTypedParameter {
    let mut field = [0; sys::VIR_TYPED_PARAM_FIELD_LENGTH as usize];
    for (place, letter) in field.iter_mut().zip(name.to_bytes()) {
        *place = letter.cast_signed();
    }
    sys::virTypedParameter {
        field,
        type_: sys::VIR_TYPED_PARAM_ULLONG.cast_signed(),
        value: sys::_virTypedParameter__bindgen_ty_1 { ul: value },
    }
}

/// `<secmodel><model>dac</model><baselabel type='kvm'>+64055:+994</baselabel></secmodel>`
fn user_in(capabilities: &str) -> Option<(u32, u32)> {
    let document = Document::parse(capabilities).ok()?;
    let text = |node: roxmltree::Node<'_, '_>| node.text().unwrap_or_default().trim().to_owned();
    let mut models = document.descendants().filter(|node| node.has_tag_name("secmodel"));
    let dac = models.find(|model| {
        let mut names = model.children().filter(|node| node.has_tag_name("model"));
        names.any(|name| text(name) == "dac")
    })?;
    let label = dac.children().find(|node| node.has_tag_name("baselabel"))?;
    let label = text(label);
    let (user, group) = label.split_once(':')?;
    let number = |word: &str| word.trim_start_matches('+').parse().ok();
    Some((number(user)?, number(group)?))
}

/// Whether the configuration of a running machine contains a copy of a disk to `path`.
///
/// `<disk><mirror type='file' job='copy'><source file='/i'/></mirror><target dev='vda'/></disk>`
fn is_copied_to(configuration: &str, disk: &str, path: &Path) -> bool {
    let Ok(document) = Document::parse(configuration) else {
        return false;
    };
    let mut disks = document.descendants().filter(|node| node.has_tag_name("disk"));
    let found = disks.find(|found| child(*found, "target").and_then(|target| target.attribute("dev")) == Some(disk));
    let source = found
        .and_then(|found| child(found, "mirror"))
        .and_then(|mirror| child(mirror, "source"));
    let place = source.and_then(|source| source.attribute("file").or_else(|| source.attribute("dev")));
    place.map(Path::new) == Some(path)
}

fn text(text: &str) -> CString {
    CString::new(text).expect("XML has no zero bytes")
}

fn done(code: i32) -> std::result::Result<(), VirtError> {
    if code < 0 { Err(VirtError::last_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::{buffer_bytes, is_copied_to, user_in};

    #[test]
    fn a_slow_copy_has_a_small_buffer() {
        let of_rate = |rate| buffer_bytes(NonZeroU64::new(rate).unwrap());
        assert_eq!(of_rate(51_200), 1 << 20);
        assert_eq!(of_rate(3 << 20), 3 << 20);
        assert_eq!(of_rate(64 << 20), 10 << 20);
    }

    #[test]
    fn a_copy_goes_where_the_running_configuration_says() {
        let disk = |name: &str, mirror: &str| format!("<disk><source file='/s'/>{mirror}<target dev='{name}'/></disk>");
        let mirror = "<mirror type='file' job='copy'><source file='/i'/></mirror>";
        let text = format!(
            "<domain><devices>{}{}</devices></domain>",
            disk("vda", mirror),
            disk("vdb", "")
        );
        assert!(is_copied_to(&text, "vda", "/i".as_ref()));
        assert!(!is_copied_to(&text, "vda", "/s".as_ref()));
        assert!(!is_copied_to(&text, "vdb", "/i".as_ref()));
        assert!(!is_copied_to(&text, "vdz", "/i".as_ref()));
        assert!(!is_copied_to("nonsense", "vda", "/i".as_ref()));
        let device = text.replace("file='/i'", "dev='/i'");
        assert!(is_copied_to(&device, "vda", "/i".as_ref()));
    }

    #[test]
    fn the_user_of_machines_is_read_from_the_dac_model() {
        let model = |name: &str, label: &str| {
            format!("<secmodel><model>{name}</model><baselabel type='kvm'>{label}</baselabel></secmodel>")
        };
        let text = |models: &str| format!("<capabilities><host>{models}</host></capabilities>");
        let both = text(&(model("apparmor", "libvirt") + &model("dac", "+64055:+994")));
        assert_eq!(user_in(&both), Some((64055, 994)));
        assert_eq!(user_in(&text(&model("apparmor", "a:b"))), None);
        assert_eq!(user_in("nonsense"), None);
    }
}
