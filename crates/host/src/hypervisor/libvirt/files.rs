//! A monitor command that passes open files, which the bindings do not wrap.
#![expect(unsafe_code, reason = "a foreign function; its contract stands beside each use")]

use std::ffi::{CStr, CString, c_char};
use std::os::fd::OwnedFd;

use virt::domain::Domain;
use virt::error::Error;
use virt::sys;

/// Sends a line to the monitor with files for QEMU, and returns the text of the answer. libvirt has the call since 8.2.
pub(super) fn monitor_command(domain: &Domain, line: &str, files: &[OwnedFd]) -> Result<String, Error> {
    let line = CString::new(line).expect("JSON has no zero bytes");
    let mut numbers: Vec<i32> = files.iter().map(rustix::fd::AsRawFd::as_raw_fd).collect();
    let count = u32::try_from(numbers.len()).expect("a handful of files");
    let mut answer: *mut c_char = std::ptr::null_mut();
    // SAFETY: the domain lives as long as its reference; `numbers` holds `count` open files, which the library copies
    // and does not close; no files are requested in return, so both places for them may be null; `answer` is written
    // on success only.
    let code = unsafe {
        sys::virDomainQemuMonitorCommandWithFiles(
            domain.as_ptr(),
            line.as_ptr(),
            count,
            numbers.as_mut_ptr(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &raw mut answer,
            0,
        )
    };
    if code < 0 || answer.is_null() {
        return Err(Error::last_error());
    }
    // SAFETY: on success `answer` is a string that ends in zero, allocated by malloc, and owned by this function.
    unsafe {
        let text = CStr::from_ptr(answer).to_string_lossy().into_owned();
        libc::free(answer.cast());
        Ok(text)
    }
}
