//! Block devices of the kernel's NBD client, whose server is a process of this program.
//!
//! A device is set up through generic netlink. It keeps its requests while its server is away, and sends them to the
//! next one. Sources: `include/uapi/linux/nbd-netlink.h`, `drivers/block/nbd.c` and `Documentation/netlink` of Linux.

#![deny(clippy::indexing_slicing, reason = "the kernel's messages are parsed")]

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};

const BLOCK_DEVICES: &str = "/sys/block";
/// Sizes of the headers of netlink and of generic netlink.
const NETLINK_HEADER_BYTES: usize = 16;
const GENERIC_HEADER_BYTES: usize = 4;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Answers of the kernel are shorter.
const ANSWER_BYTES_MAX: usize = 16 << 10;
/// An answer and its acknowledgement, and some that are not awaited.
const ANSWER_COUNT_MAX: usize = 16;
const FLAG_REQUEST: u16 = 1;
const FLAG_ACKNOWLEDGE: u16 = 4;
const MESSAGE_ERROR: u16 = 2;
const VERSION: u8 = 1;

/// The family that knows the numbers of all families.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;

const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT_S: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const CLIENT_FLAGS: u16 = 6;
const SOCKETS: u16 = 7;
const DEAD_CONNECTION_TIMEOUT_S: u16 = 8;
const BACKEND: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_FILE: u16 = 1;

/// The device is released when its last user closes it, such as a file system that is unmounted.
const DISCONNECT_ON_CLOSE: u64 = 2;

/// A device to set up.
pub struct NbdRequest<'a> {
    /// Names what the device shows; a later [`find_nbd_device`] finds the device by it.
    pub backend: &'a str,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Size of its sectors.
    pub sector_bytes: u32,
    /// Transmission flags of the export.
    pub flags: u16,
    /// A connection to the server, after the handshake.
    pub connection: &'a OwnedFd,
    /// A request that the server does not answer in time is sent again, through a new connection.
    pub request_timeout: Duration,
    /// Requests fail when the server is away for longer.
    pub absence_timeout: Duration,
}

/// Checks that the kernel has an NBD client and the user may use it.
///
/// # Errors
/// It has none.
pub fn check_nbd() -> Result<()> {
    NbdControl::open().map(drop)
}

/// Sets up a free device. Returns its path.
///
/// # Errors
/// The user is not root, or the kernel has no NBD client or no free device.
pub fn connect_nbd(request: &NbdRequest<'_>) -> Result<PathBuf> {
    let mut message = NetlinkAttributes::default();
    message.number(SIZE_BYTES, request.size_bytes);
    message.number(BLOCK_SIZE_BYTES, u64::from(request.sector_bytes));
    message.number(TIMEOUT_S, request.request_timeout.as_secs());
    message.number(DEAD_CONNECTION_TIMEOUT_S, request.absence_timeout.as_secs());
    message.number(SERVER_FLAGS, u64::from(request.flags));
    message.connection(request.connection);
    message.text(BACKEND, request.backend);
    let answer = NbdControl::open()?.request(CONNECT, &message)?;
    let index = answer.and_then(|answer| find_attribute(&answer, INDEX).and_then(u32_of));
    let index = index.ok_or_else(|| invalid("the kernel names no device"))?;
    Ok(PathBuf::from(format!("/dev/nbd{index}")))
}

/// Connects a device to the next server. The device must have lost its connection.
///
/// # Errors
/// The device is not set up any more, or still has a connection.
pub fn reconnect_nbd(device: &Path, backend: &str, connection: &OwnedFd) -> Result<()> {
    let mut message = attributes_of(device, backend)?;
    message.connection(connection);
    NbdControl::open()?.request(RECONFIGURE, &message).map(drop)
}

/// Lets the kernel release a device when its last user closes it. Something must use it already.
///
/// # Errors
/// The device is not set up any more.
pub fn release_nbd_on_close(device: &Path, backend: &str) -> Result<()> {
    let mut message = attributes_of(device, backend)?;
    message.number(CLIENT_FLAGS, DISCONNECT_ON_CLOSE);
    NbdControl::open()?.request(RECONFIGURE, &message)?;
    // If its last user has closed it just before, this close counts.
    drop(File::open(device));
    Ok(())
}

/// Lets a device adopt the size of its disk.
///
/// # Errors
/// The device is not set up any more.
pub fn resize_nbd(device: &Path, backend: &str, size_bytes: u64) -> Result<()> {
    let mut message = attributes_of(device, backend)?;
    message.number(SIZE_BYTES, size_bytes);
    NbdControl::open()?.request(RECONFIGURE, &message).map(drop)
}

/// Ends the connection of a device. Its requests fail from then on.
///
/// # Errors
/// The device is not set up any more.
pub fn disconnect_nbd(device: &Path) -> Result<()> {
    let mut message = NetlinkAttributes::default();
    message.index(device)?;
    NbdControl::open()?.request(DISCONNECT, &message).map(drop)
}

/// The device that shows `backend`.
pub fn find_nbd_device(backend: &str) -> Option<PathBuf> {
    let mut devices = nbd_devices().into_iter();
    devices.find_map(|(device, shown)| (shown == backend).then_some(device))
}

/// All devices that are set up, and what they show.
pub fn nbd_devices() -> Vec<(PathBuf, String)> {
    let entries = std::fs::read_dir(BLOCK_DEVICES).into_iter().flatten().flatten();
    let device_of = |entry: std::fs::DirEntry| {
        let backend = std::fs::read(entry.path().join("backend")).ok()?;
        let is_nbd = entry.file_name().as_bytes().starts_with(b"nbd");
        let backend = String::from_utf8(backend.strip_suffix(b"\n")?.to_owned()).ok()?;
        is_nbd.then(|| (Path::new("/dev").join(entry.file_name()), backend))
    };
    entries.filter_map(device_of).collect()
}

/// The partitions of a device, if it was opened before: their paths and the offsets of their first bytes.
pub fn nbd_partitions(device: &Path) -> Vec<(PathBuf, u64)> {
    let Some(name) = device.file_name() else {
        return Vec::new();
    };
    let entries = std::fs::read_dir(Path::new(BLOCK_DEVICES).join(name));
    let entries = entries.into_iter().flatten().flatten();
    let partition_of = |entry: std::fs::DirEntry| {
        let start = std::fs::read_to_string(entry.path().join("start")).ok()?;
        let start_bytes = start.trim().parse::<u64>().ok()?.checked_mul(512)?;
        Some((Path::new("/dev").join(entry.file_name()), start_bytes))
    };
    entries.filter_map(partition_of).collect()
}

fn invalid(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, reason)
}

/// The attributes that choose a device. The kernel refuses a device that shows something else meanwhile.
fn attributes_of(device: &Path, backend: &str) -> Result<NetlinkAttributes> {
    let mut message = NetlinkAttributes::default();
    message.index(device)?;
    message.text(BACKEND, backend);
    Ok(message)
}

/// The attributes of a message: each has a length, a type and a value, padded to 4 bytes.
#[derive(Default)]
struct NetlinkAttributes(Vec<u8>);

impl NetlinkAttributes {
    fn push(&mut self, kind: u16, value: &[u8]) {
        let length = ATTRIBUTE_HEADER_BYTES + value.len();
        let length = u16::try_from(length).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn number(&mut self, kind: u16, value: u64) {
        self.push(kind, &value.to_ne_bytes());
    }

    fn text(&mut self, kind: u16, value: &str) {
        self.push(kind, &[value.as_bytes(), &[0]].concat());
    }

    fn index(&mut self, device: &Path) -> Result<()> {
        let number = device.to_str().and_then(|path| path.strip_prefix("/dev/nbd"));
        let number: u32 = number
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, "not an NBD device"))?;
        self.push(INDEX, &number.to_ne_bytes());
        Ok(())
    }

    fn connection(&mut self, connection: &OwnedFd) {
        let (mut item, mut list) = (Self::default(), Self::default());
        item.push(SOCKET_FILE, &connection.as_raw_fd().cast_unsigned().to_ne_bytes());
        list.push(SOCKET_ITEM, &item.0);
        self.push(SOCKETS, &list.0);
    }
}

/// The way to the kernel's NBD client.
struct NbdControl {
    socket: OwnedFd,
    family: u16,
}

impl NbdControl {
    fn open() -> Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::GENERIC))?;
        let mut message = NetlinkAttributes::default();
        message.text(FAMILY_NAME, "nbd");
        let answer = exchange(&socket, CONTROL, GET_FAMILY, &message).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(
                ErrorKind::Unsupported,
                "the kernel has no NBD client, or it is not loaded",
            ),
            _ => error,
        })?;
        let family = answer.and_then(|answer| find_attribute(&answer, FAMILY_ID).and_then(u16_of));
        let family = family.ok_or_else(|| invalid("the kernel does not name its NBD client"))?;
        Ok(Self { socket, family })
    }

    /// Sends a request. Returns the attributes of the answer, if there is one.
    fn request(&self, command: u8, message: &NetlinkAttributes) -> Result<Option<Vec<u8>>> {
        exchange(&self.socket, self.family, command, message)
    }
}

fn exchange(socket: impl AsFd, family: u16, command: u8, message: &NetlinkAttributes) -> Result<Option<Vec<u8>>> {
    let length = NETLINK_HEADER_BYTES + GENERIC_HEADER_BYTES + message.0.len();
    let length = u32::try_from(length).map_err(|_| invalid("the request is too long"))?;
    let mut request = length.to_ne_bytes().to_vec();
    request.extend(family.to_ne_bytes());
    request.extend((FLAG_REQUEST | FLAG_ACKNOWLEDGE).to_ne_bytes());
    // A number of the request, and the port of the sender, which the kernel knows.
    request.extend([0; 8]);
    request.extend([command, VERSION, 0, 0]);
    request.extend(&message.0);
    send(&socket, &request, SendFlags::empty())?;
    let mut answer = None;
    for _ in 0..ANSWER_COUNT_MAX {
        let mut buffer = vec![0; ANSWER_BYTES_MAX];
        let (_, received) = recv(&socket, &mut *buffer, RecvFlags::empty())?;
        let mut rest = buffer.get(..received).unwrap_or_default();
        while let Some(found) = next_message(&mut rest) {
            if found.kind == MESSAGE_ERROR {
                let code = found.body.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
                return match code {
                    Some(0) => Ok(answer),
                    Some(code) => Err(Error::from_raw_os_error(code.saturating_neg())),
                    None => Err(invalid("a message of the kernel is too short")),
                };
            }
            if found.kind == family {
                answer = found.body.get(GENERIC_HEADER_BYTES..).map(<[u8]>::to_vec);
            }
        }
    }
    Err(invalid("the kernel does not acknowledge the request"))
}

/// A netlink message without its header.
struct NetlinkMessage<'a> {
    kind: u16,
    body: &'a [u8],
}

fn next_message<'a>(rest: &mut &'a [u8]) -> Option<NetlinkMessage<'a>> {
    let length = usize::try_from(u32_of(rest)?).ok()?;
    let kind = u16_of(rest.get(4..)?)?;
    let body = rest.get(NETLINK_HEADER_BYTES..length)?;
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some(NetlinkMessage { kind, body })
}

fn find_attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16_of(attributes)?);
        let kind = u16_of(attributes.get(2..)?)?;
        let value = attributes.get(ATTRIBUTE_HEADER_BYTES..length)?;
        if kind == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

fn u16_of(bytes: &[u8]) -> Option<u16> {
    bytes.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn u32_of(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::{INDEX, NetlinkAttributes, SERVER_FLAGS, find_attribute, next_message, u32_of};

    #[test]
    fn attributes_are_found_behind_padded_ones() {
        let mut message = NetlinkAttributes::default();
        message.text(10, "web1");
        message.number(SERVER_FLAGS, 7);
        message.index("/dev/nbd12".as_ref()).unwrap();
        assert_eq!(message.0.len() % 4, 0);
        assert_eq!(find_attribute(&message.0, INDEX).and_then(u32_of), Some(12));
        assert_eq!(find_attribute(&message.0, 10), Some(&b"web1\0"[..]));
        assert_eq!(find_attribute(&message.0, 99), None);
        for path in ["/dev/sda", "/dev/nbd", "/dev/nbd1p1"] {
            message.index(path.as_ref()).unwrap_err();
        }
    }

    #[test]
    fn cut_and_absurd_messages_end_the_search() {
        let mut message = NetlinkAttributes::default();
        message.number(INDEX, 5);
        for length in 0..message.0.len() {
            assert_eq!(find_attribute(&message.0[..length], 99), None);
        }
        for length in [0_u16, 3, 200] {
            let mut bytes = message.0.clone();
            bytes[..2].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(find_attribute(&bytes, 99), None);
        }
        for length in [0_u32, 15, 17, u32::MAX] {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            assert!(next_message(&mut &bytes[..]).is_none());
        }
    }
}
