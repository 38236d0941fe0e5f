//! Sockets that systemd has opened for this process (sd_listen_fds(3)).

use std::os::fd::OwnedFd;

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use super::Context;
use crate::errors::Error;
use crate::process::environment;

/// The number of the first socket.
const FIRST: i32 = 3;
/// More sockets than a server needs.
const COUNT_MAX: i32 = 64;

/// The use of a socket, by its name (`FileDescriptorName=`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketPurpose {
    /// `nbd`: NBD clients connect.
    Nbd,
    /// `iscsi`: initiators connect.
    Iscsi,
    /// `control`: other commands connect.
    Control,
}

impl SocketPurpose {
    const ALL: [Self; 3] = [Self::Nbd, Self::Iscsi, Self::Control];

    const fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::Iscsi => "iscsi",
            Self::Control => "control",
        }
    }
}

/// The sockets of this process.
#[derive(Debug, Default)]
pub struct ActivatedSockets {
    sockets: Vec<(SocketPurpose, OwnedFd)>,
}

impl ActivatedSockets {
    /// Takes the sockets that the environment describes; none if it describes those of another process.
    ///
    /// # Errors
    /// A socket has no known name, or cannot be used.
    pub fn of(context: &Context) -> Result<Self, Error> {
        let number = |name| context.variable(name)?.to_str()?.parse::<i32>().ok();
        if number(environment::LISTEN_PID) != Some(getpid().as_raw_nonzero().get()) {
            return Ok(Self::default());
        }
        let count = number(environment::LISTEN_FDS).unwrap_or(0).clamp(0, COUNT_MAX);
        let names = context.variable(environment::LISTEN_FDNAMES).unwrap_or_default();
        let purposes = purposes(&names.to_string_lossy(), count)?;
        let failed = |errno: rustix::io::Errno| Error::File {
            action: "take a socket of systemd from",
            path: "/proc/self/fd".into(),
            source: errno.into(),
        };
        let this = pidfd_open(getpid(), PidfdFlags::empty()).map_err(failed)?;
        let sockets = (FIRST..).zip(purposes).map(|(number, purpose)| {
            let socket = pidfd_getfd(&this, number, PidfdGetfdFlags::empty()).map_err(failed)?;
            Ok((purpose, socket))
        });
        Ok(Self {
            sockets: sockets.collect::<Result<_, Error>>()?,
        })
    }

    /// The sockets for a purpose, which are then no longer here.
    pub fn take(&mut self, purpose: SocketPurpose) -> Vec<OwnedFd> {
        let taken = self.sockets.extract_if(.., |(other, _)| *other == purpose);
        taken.map(|(_, socket)| socket).collect()
    }
}

fn purposes(names: &str, count: i32) -> Result<Vec<SocketPurpose>, Error> {
    let mut names = names.split(':');
    let purpose = |_| {
        let name = names.next().unwrap_or_default();
        let found = SocketPurpose::ALL.into_iter().find(|purpose| purpose.name() == name);
        found.ok_or_else(|| {
            Error::usage(
                format!("a socket of systemd is named {name:?}"),
                "name it nbd, iscsi or control with FileDescriptorName= in the .socket unit",
            )
        })
    };
    (0..count).map(purpose).collect()
}

#[cfg(test)]
mod tests {
    use super::{SocketPurpose, purposes};

    #[test]
    fn sockets_are_told_apart_by_their_names() {
        let found = purposes("iscsi:nbd:nbd", 3).unwrap();
        assert_eq!(found, [SocketPurpose::Iscsi, SocketPurpose::Nbd, SocketPurpose::Nbd]);
        assert!(purposes("", 0).unwrap().is_empty());
        for (names, count) in [("", 1), ("nbd", 2), ("holdfast.socket", 1)] {
            assert!(purposes(names, count).is_err(), "{names}");
        }
    }
}
