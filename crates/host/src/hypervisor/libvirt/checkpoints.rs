//! The number of a machine's checkpoints, which the bindings lack.
#![expect(unsafe_code, reason = "a foreign function; its contract stands beside its use")]

use virt::domain::Domain;
use virt::error::Error;
use virt::sys;

/// The number of a machine's checkpoints, which libvirt has since 5.6.
pub(super) fn count(domain: &Domain) -> Result<u32, Error> {
    // SAFETY: the domain lives as long as its reference; a null list makes the call only count.
    let count = unsafe { sys::virDomainListAllCheckpoints(domain.as_ptr(), std::ptr::null_mut(), 0) };
    u32::try_from(count).map_err(|_| Error::last_error())
}
