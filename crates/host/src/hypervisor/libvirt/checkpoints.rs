//! A machine's checkpoints, which the bindings lack; libvirt has them since 5.6.
#![expect(unsafe_code, reason = "foreign functions; the contract stands beside each use")]

use std::ffi::{CStr, CString};

use virt::domain::Domain;
use virt::error::Error;
use virt::sys;

/// The number of a machine's checkpoints.
pub(super) fn count(domain: &Domain) -> Result<u32, Error> {
    // SAFETY: the domain lives as long as its reference; a null list makes the call only count.
    let count = unsafe { sys::virDomainListAllCheckpoints(domain.as_ptr(), std::ptr::null_mut(), 0) };
    u32::try_from(count).map_err(|_| Error::last_error())
}

/// A checkpoint of a machine.
pub(super) struct Checkpoint(sys::virDomainCheckpointPtr);

impl Drop for Checkpoint {
    fn drop(&mut self) {
        // SAFETY: libvirt returned the pointer, and it is used here for the last time.
        unsafe { sys::virDomainCheckpointFree(self.0) };
    }
}

/// The checkpoints of a machine, each after its parent.
pub(super) fn list(domain: &Domain) -> Result<Vec<Checkpoint>, Error> {
    let mut found: *mut sys::virDomainCheckpointPtr = std::ptr::null_mut();
    let flags = sys::VIR_DOMAIN_CHECKPOINT_LIST_TOPOLOGICAL;
    // SAFETY: the domain lives as long as its reference; `found` is valid for the pointer to the list.
    let count = unsafe { sys::virDomainListAllCheckpoints(domain.as_ptr(), &raw mut found, flags) };
    let count = usize::try_from(count).map_err(|_| Error::last_error())?;
    // SAFETY: libvirt has written so many pointers, which belong to the caller.
    let checkpoints = (0..count).map(|at| Checkpoint(unsafe { *found.add(at) })).collect();
    // SAFETY: libvirt allocated the list by malloc; its elements were copied.
    unsafe { libc::free(found.cast()) };
    Ok(checkpoints)
}

/// Stores the description of a checkpoint whose bitmaps are in the images already.
pub(super) fn redefine(domain: &Domain, text: &str) -> Result<(), Error> {
    let text = CString::new(text).unwrap_or_default();
    let flags = sys::VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE;
    // SAFETY: the domain lives as long as its reference; the text ends in zero and outlives the call.
    let made = unsafe { sys::virDomainCheckpointCreateXML(domain.as_ptr(), text.as_ptr(), flags) };
    if made.is_null() {
        return Err(Error::last_error());
    }
    drop(Checkpoint(made));
    Ok(())
}

impl Checkpoint {
    pub(super) fn description(&self) -> Result<String, Error> {
        let flags = sys::VIR_DOMAIN_CHECKPOINT_XML_SECURE;
        // SAFETY: the pointer is valid until `self` is dropped.
        let text = unsafe { sys::virDomainCheckpointGetXMLDesc(self.0, flags) };
        if text.is_null() {
            return Err(Error::last_error());
        }
        // SAFETY: libvirt returned a text that ends in zero.
        let description = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: libvirt allocated the text by malloc; it was copied.
        unsafe { libc::free(text.cast()) };
        Ok(description)
    }

    /// Deletes the description. The bitmaps in the images are kept.
    pub(super) fn forget(&self) -> Result<(), Error> {
        let flags = sys::VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY;
        // SAFETY: the pointer is valid until `self` is dropped.
        match unsafe { sys::virDomainCheckpointDelete(self.0, flags) } {
            0 => Ok(()),
            _ => Err(Error::last_error()),
        }
    }
}
