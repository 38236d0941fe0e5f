//! The conformance suite of devices, run over the network protocol.

use std::fs::File;
use std::ops::Range;

use holdfast_block::conformance::Conformance;
use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, Result};
use holdfast_serve::nbd::client::NbdDeviceMut;

use super::peer::Server;
use super::tls;

/// A device together with the server behind it.
struct Served {
    device: NbdDeviceMut,
    _server: Server,
    _file: Option<tempfile::NamedTempFile>,
}

impl BlockDevice for Served {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.device.read_at(buffer, offset)
    }
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }
    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl BlockDeviceMut for Served {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.device.write_at(data, offset)
    }
    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.device.write_zeroes(range)
    }
    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.device.trim(range)
    }
    fn flush(&self) -> Result<()> {
        self.device.flush()
    }
}

/// Serves a device by nbdkit with these options before the plugin, and these parameters after it.
fn over_nbdkit(options: &[&str], parameters: &[&str], size: u64) -> Served {
    let size = size.to_string();
    let server = Server::nbdkit(&[options, &["memory", &size], parameters].concat());
    Served {
        device: server.device_mut(),
        _server: server,
        _file: None,
    }
}

#[test]
fn over_nbdkit_in_memory() {
    Conformance::new().check_mutable(|size| over_nbdkit(&[], &[], size));
}

#[test]
fn over_nbdkit_under_tls() {
    let conformance = Conformance::new().with_sizes(&[0, 4097, 300_001]);
    conformance.check_mutable(|size| {
        let server = tls::nbdkit(&["memory", &size.to_string()]);
        let options = tls::options(&[tls::CA], "localhost");
        Served {
            device: NbdDeviceMut::connect(&server.endpoint(), "", options).unwrap(),
            _server: server,
            _file: None,
        }
    });
}

/// The oldest form of the protocol: without structured replies, extents and zeroing.
#[test]
fn over_nbdkit_in_the_oldest_dialect() {
    let conformance = Conformance::new().with_sizes(&[0, 1, 4097, 300_001]);
    let arguments = ["--no-sr", "--mask-handshake=0", "--filter=nozero", "--filter=noextents"];
    conformance.check_mutable(|size| over_nbdkit(&arguments, &[], size));
}

/// The server refuses unaligned requests: the client converts them to whole blocks.
#[test]
fn over_nbdkit_with_blocks() {
    let conformance = Conformance::new().with_sizes(&[0, 4096, 65_536, 303_104]);
    let parameters = [
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=32768",
        "blocksize-error-policy=error",
    ];
    conformance.check_mutable(|size| {
        let served = over_nbdkit(&["--filter=blocksize-policy"], &parameters, size);
        assert_eq!(served.device.as_read().export().block_sizes().minimum_bytes, 4096);
        served
    });
}

fn over_qemu(format: &str, size: u64) -> Served {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    if format == "raw" {
        File::create(path).unwrap().set_len(size).unwrap();
    } else {
        super::peer::run("qemu-img", &["create", "-q", "-f", format, path, &size.to_string()]);
    }
    let server = Server::qemu_nbd(&["-f", format, "--discard=unmap", path]);
    Served {
        device: server.device_mut(),
        _server: server,
        _file: Some(file),
    }
}

#[test]
fn over_qemu_nbd_with_a_raw_file() {
    // QEMU rounds sizes up to whole sectors.
    Conformance::new()
        .with_sizes(&[512, 4096, 10_240, 65_536, 300_032])
        .check_mutable(|size| over_qemu("raw", size));
}

#[test]
fn over_qemu_nbd_with_qcow2() {
    Conformance::new()
        .with_sizes(&[512, 65_536, 300_032])
        .check_mutable(|size| over_qemu("qcow2", size));
}
