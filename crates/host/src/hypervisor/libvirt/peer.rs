//! The user of the libvirt daemon at the other end of a connection.
#![expect(
    unsafe_code,
    reason = "a socket of libvirt's library is looked at; the contract stands beside the use"
)]

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, RawFd};

use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;
use virt::connect::Connect;

use super::library;
use crate::hypervisor::error::{Error, Result};
use crate::system::rights::Rights;
use crate::system::waits::Wait;

/// Connects to `uri`. On this host, the rights are those of the daemon that answers. The address is not sufficient,
/// since any user can create a socket. A connection to another host has the rights of this process, since that host
/// does not open files of this host.
pub(super) fn open(uri: &str) -> Result<(Connect, Rights)> {
    let _wait = Wait::for_answer(super::LIBVIRT);
    library::load().map_err(|reason| Error::Unreachable {
        address: uri.to_owned(),
        source: format!(
            "libvirt's library cannot be loaded: {reason}; install libvirt0 (Debian) or libvirt-libs (Fedora)"
        )
        .into(),
    })?;
    let before = sockets();
    let connection = Connect::open(Some(uri)).map_err(|source| Error::Unreachable {
        address: uri.to_owned(),
        source: Box::new(source),
    })?;
    let now = sockets();
    let peers = now.difference(&before).filter_map(|(number, _)| peer(*number));
    // Sockets that other threads have opened in the meantime can only reduce the rights.
    let rights = peers.max_by_key(|rights| rights.other_user().is_some());
    Ok((connection, rights.unwrap_or_default()))
}

/// Connects to `uri` again. The daemon must belong to the same user as before: files that its machines name are
/// opened with `rights`, which were determined at the first connection.
pub(super) fn open_again(uri: &str, rights: &Rights) -> Result<Connect> {
    let (connection, now) = open(uri)?;
    if is_of_same_user(&now, rights) {
        return Ok(connection);
    }
    Err(Error::Unreachable {
        address: uri.to_owned(),
        source: "a process of another user answers now".into(),
    })
}

fn is_of_same_user(now: &Rights, before: &Rights) -> bool {
    now.other_user() == before.other_user()
}

/// The open sockets of this process: file descriptor and inode.
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
    // SAFETY: the kernel is only queried about the socket of this number. If the number is closed in the meantime,
    // the answer is an error, and no memory is accessed.
    let socket = unsafe { BorrowedFd::borrow_raw(number) };
    let is_local = socket_domain(socket).ok()? == AddressFamily::UNIX;
    is_local.then(|| Rights::of_peer(&socket).ok())?
}

/// Whether an address has no host: "qemu:///system", not "qemu+ssh://host/system".
pub(crate) fn is_local(uri: &str) -> bool {
    let host = uri
        .split_once("://")
        .map(|(_, rest)| rest.split('/').next().unwrap_or_default());
    matches!(host, Some("" | "localhost"))
}

#[cfg(test)]
mod tests {
    use super::open_again;
    use crate::system::processes::UserIdentity;
    use crate::system::rights::Rights;

    /// libvirt's own test driver runs in this process, so its rights are those of this process.
    #[test]
    fn a_reconnect_to_the_libvirt_of_another_user_is_refused() {
        let uri = "test:///default";
        open_again(uri, &Rights::Own).unwrap();
        let other = Rights::Of(UserIdentity {
            user: 65_534,
            group: 65_534,
            groups: Vec::new(),
        });
        let error = open_again(uri, &other).map(drop).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("another user answers now"), "{source}");
    }
}
