//! Sockets that systemd has opened for this process (sd_listen_fds(3)).

use std::os::fd::OwnedFd;

use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
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
            // The copy is closed in child processes. It needs a call that units must allow: see `SystemCallFilter=` of
            // holdfast-serve.service.
            let socket = pidfd_getfd(&this, number, PidfdGetfdFlags::empty()).map_err(failed)?;
            // Otherwise the number is none of systemd's, but of a file that this process has opened.
            if socket_acceptconn(&socket) == Ok(true) {
                // Child processes would inherit the original. The number is free in any case.
                nix::unistd::close(number).unwrap_or_default();
            }
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

    /// The socket for other commands.
    ///
    /// # Errors
    /// There are several, or it is not a Unix socket.
    pub fn take_control(&mut self) -> Result<Option<OwnedFd>, Error> {
        only_local(self.take(SocketPurpose::Control))
    }
}

/// The only socket; TCP does not say which user connects.
fn only_local(sockets: Vec<OwnedFd>) -> Result<Option<OwnedFd>, Error> {
    if sockets
        .iter()
        .any(|socket| socket_domain(socket) != Ok(AddressFamily::UNIX))
    {
        return Err(Error::usage(
            "the control socket of systemd is not a Unix socket",
            "give the path of a socket in ListenStream= of the .socket unit",
        ));
    }
    let mut sockets = sockets.into_iter();
    match (sockets.next(), sockets.next()) {
        (Some(_), Some(_)) => Err(Error::usage(
            "systemd has opened several control sockets",
            "give one ListenStream= in one .socket unit",
        )),
        (only, _) => Ok(only),
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
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::{SocketPurpose, only_local, purposes};

    #[test]
    fn there_is_at_most_one_control_socket_and_it_is_local() {
        let (one, two) = UnixStream::pair().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(only_local(Vec::new()).unwrap().is_none());
        assert!(only_local(vec![OwnedFd::from(tcp)]).is_err());
        let pair = vec![OwnedFd::from(one.try_clone().unwrap()), OwnedFd::from(two)];
        assert!(only_local(pair).is_err());
        assert!(only_local(vec![OwnedFd::from(one)]).unwrap().is_some());
    }

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
