//! A server for the NBD client of the kernel, which makes a block device of a disk.
//!
//! The kernel begins after the handshake, so this end does both sides of it, and hands over the socket. The kernel limits
//! requests to the size that it knows, which grows with the disk; the size in the handshake is therefore the largest
//! one that there can be.

use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut, Clock, ExtentList, Result as DeviceResult};

use super::server::{EventSink, Export, FixedExports, Server, ServerOptions, TlsPolicy};
use super::wire::{ClientFlags, GREETING_MAGIC, OPTION_MAGIC};
use crate::server::export_device::ExportDevice;
use crate::server::limits::Limits;
use crate::server::resources::ServerResources;
use crate::stream::Socket;
use crate::{Error, Result};

/// The option that chooses an export and ends the handshake. The empty name is the default export.
const EXPORT_NAME: u32 = 1;
/// The greeting: two numbers and flags. The reply to the option: the size and the flags of the export.
const GREETING_BYTES: usize = 18;
const REPLY_BYTES: usize = 10;
/// A multiple of every block size.
const SIZE_BYTES_MAX: u64 = i64::MAX.cast_unsigned() & !0xffff;

/// A server of one disk for the kernel of this host.
pub struct KernelServer {
    server: Server,
}

/// A connection for the kernel, after the handshake.
pub struct KernelConnection {
    /// The end of the kernel.
    pub socket: OwnedFd,
    /// The transmission flags of the export.
    pub flags: u16,
}

impl KernelServer {
    /// A server of `disk` without a connection.
    pub fn new(disk: Arc<dyn BlockDeviceMut>, clock: Arc<dyn Clock>, events: Arc<dyn EventSink>) -> Self {
        let device = ExportDevice::Writable(Arc::new(GrowingDisk(disk)));
        Self {
            server: Server::new(ServerOptions {
                exports: Arc::new(FixedExports::new([Export::new("", device)])),
                resources: ServerResources::new(Limits::default()),
                tls: TlsPolicy::default(),
                clock,
                events,
            }),
        }
    }

    /// Makes a connection for the kernel.
    ///
    /// # Errors
    /// The system lacks a resource.
    pub fn connect(&self) -> Result<KernelConnection> {
        let failed = |source| Error::Socket { source };
        let (theirs, ours) = UnixStream::pair().map_err(failed)?;
        self.server.serve(Socket::Unix(ours))?;
        let flags = shake_hands(&theirs).map_err(failed)?;
        Ok(KernelConnection {
            socket: theirs.into(),
            flags,
        })
    }

    /// Whether a connection exists, or requests of one that has ended are still executed.
    pub fn is_busy(&self) -> bool {
        self.server.connection_count() > 0
    }
}

/// Chooses the default export. Returns its flags.
fn shake_hands(mut stream: &UnixStream) -> std::io::Result<u16> {
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting)?;
    let magic = [GREETING_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat();
    if !greeting.starts_with(&magic) {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut answer = (ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES)
        .0
        .to_be_bytes()
        .to_vec();
    answer.extend(OPTION_MAGIC.to_be_bytes());
    answer.extend(EXPORT_NAME.to_be_bytes());
    answer.extend(0_u32.to_be_bytes());
    stream.write_all(&answer)?;
    let mut reply = [0; REPLY_BYTES];
    stream.read_exact(&mut reply)?;
    let [.., high, low] = reply;
    Ok(u16::from_be_bytes([high, low]))
}

/// A disk that reports the largest size. It refuses requests after its end itself.
struct GrowingDisk(Arc<dyn BlockDeviceMut>);

impl BlockDevice for GrowingDisk {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES_MAX
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        self.0.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
        self.0.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.0.block_size_bytes()
    }
}

impl BlockDeviceMut for GrowingDisk {
    fn write_at(&self, data: &[u8], offset: u64) -> DeviceResult<()> {
        self.0.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> DeviceResult<()> {
        self.0.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> DeviceResult<()> {
        self.0.trim(range)
    }

    fn flush(&self) -> DeviceResult<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, MemoryDevice, SystemClock};

    use super::KernelServer;
    use crate::nbd::Event;
    use crate::nbd::wire::{ExportFlags, REQUEST_MAGIC};

    const READ: u16 = 0;
    const WRITE: u16 = 1;
    const DISCONNECT: u16 = 2;

    fn request(kind: u16, offset: u64, length: u32) -> Vec<u8> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(kind.to_be_bytes());
        bytes.extend([7; 8]);
        bytes.extend(offset.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes
    }

    /// The error of a simple reply.
    fn reply(stream: &mut UnixStream) -> u32 {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        assert_eq!(header[8..], [7; 8]);
        u32::from_be_bytes(header[4..8].try_into().unwrap())
    }

    #[test]
    fn the_kernel_gets_a_connection_of_simple_replies() {
        let device = Arc::new(MemoryDevice::new(1 << 20));
        let disk = Arc::clone(&device);
        let server = KernelServer::new(disk, Arc::new(SystemClock::new()), Arc::new(|_: &Event<'_>| ()));
        assert!(!server.is_busy());
        let connection = server.connect().unwrap();
        let flags = ExportFlags(connection.flags);
        assert!(flags.has(ExportFlags::HAS_FLAGS | ExportFlags::FLUSH | ExportFlags::FUA | ExportFlags::TRIM));
        assert!(!flags.has(ExportFlags::READ_ONLY));
        let mut stream = UnixStream::from(connection.socket);
        stream
            .write_all(&[request(WRITE, 4096, 512), vec![9; 512]].concat())
            .unwrap();
        assert_eq!(reply(&mut stream), 0);
        stream.write_all(&request(READ, 4096, 512)).unwrap();
        assert_eq!(reply(&mut stream), 0);
        let mut data = [0; 512];
        stream.read_exact(&mut data).unwrap();
        assert_eq!(data, [9; 512]);
        device.read_at(&mut data, 4096).unwrap();
        assert_eq!(data, [9; 512]);
        device.flush().unwrap();
        // Bytes after the end are refused by the disk.
        stream.write_all(&request(READ, 1 << 20, 512)).unwrap();
        assert_ne!(reply(&mut stream), 0);
        stream.write_all(&request(DISCONNECT, 0, 0)).unwrap();
        assert_eq!(stream.read(&mut data).unwrap(), 0);
        while server.is_busy() {
            std::thread::yield_now();
        }
        // The next connection.
        server.connect().unwrap();
    }
}
