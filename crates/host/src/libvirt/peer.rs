//! Whose the libvirt at the other end of a connection is.
#![expect(
    unsafe_code,
    reason = "a socket of libvirt's library is looked at; the contract stands beside the use"
)]

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, RawFd};

use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;
use virt::connect::Connect;

use crate::error::{Error, Result};
use crate::rights::Rights;
use crate::waits::Wait;

/// Connects to `uri`. The rights are those of the daemon that answers on this host: it is not enough to look at the address, since a socket
/// may be anybody's. A connection to another host has our own: files of this host are none of its business.
pub(super) fn open(uri: &str) -> Result<(Connect, Rights)> {
    let _wait = Wait::for_answer(super::LIBVIRT);
    let before = sockets();
    let connection = Connect::open(Some(uri)).map_err(|source| Error::Unreachable {
        address: uri.to_owned(),
        source: Box::new(source),
    })?;
    let now = sockets();
    let peers = now.difference(&before).filter_map(|(number, _)| peer(*number));
    // Sockets that other threads have opened meanwhile can only take rights away.
    let rights = peers.max_by_key(|rights| rights.other_user().is_some());
    Ok((connection, rights.unwrap_or_default()))
}

/// The sockets that this process has open: number and inode.
fn sockets() -> BTreeSet<(RawFd, String)> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let target = target.to_str()?.to_owned();
        let number = entry.file_name().to_str()?.parse().ok()?;
        target.starts_with("socket:").then_some((number, target))
    });
    named.collect()
}

fn peer(number: RawFd) -> Option<Rights> {
    // SAFETY: the kernel is only asked about the socket of this number. If the number is closed meanwhile the answer is an error, and no
    // memory is touched by it.
    let socket = unsafe { BorrowedFd::borrow_raw(number) };
    let is_local = socket_domain(socket).ok()? == AddressFamily::UNIX;
    is_local.then(|| Rights::of_peer(&socket).ok())?
}
