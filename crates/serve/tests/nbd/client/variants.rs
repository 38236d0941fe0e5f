//! Every variant of the protocol that other servers implement, and the properties that they report.

use std::time::Duration;

use holdfast_block::conformance::Conformance;
use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentKind};
use holdfast_serve::nbd::client::{
    ALLOCATION, Endpoint, Error, NbdDevice, NbdDeviceMut, NbdOptions, NbdUri, describe_export, list_exports,
};

use super::peer::{Server, run};

const SIZE_BYTES: u64 = 5 << 20;

/// A file with `SIZE_BYTES` of data and zeroes.
fn patterned() -> (tempfile::NamedTempFile, Vec<u8>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes = Conformance::new().pattern(SIZE_BYTES);
    std::io::Write::write_all(&mut file, &bytes).unwrap();
    (file, bytes)
}

#[test]
fn every_dialect_of_nbdkit_reads_the_same() {
    let (file, bytes) = patterned();
    let path = file.path().to_str().unwrap();
    let dialects: [&[&str]; 7] = [
        &[],
        &["--no-sr"],
        &["--mask-handshake=0"],
        &["--mask-handshake=1"],
        &["--mask-handshake=2", "--no-sr"],
        &["--filter=noextents"],
        &["--filter=noparallel", "--filter=nocache", "--threads=1"],
    ];
    for dialect in dialects {
        let server = Server::nbdkit(&[dialect, &["-r", "file", path]].concat());
        let device = server.device();
        Conformance::new()
            .with_operation_count(40)
            .check_read_only(&device, &bytes);
        let knows_contexts = !dialect.contains(&"--no-sr") && !dialect.contains(&"--mask-handshake=0");
        assert_eq!(
            device.context_names().any(|name| name == ALLOCATION),
            knows_contexts && dialect != ["--mask-handshake=2", "--no-sr"]
        );
        assert!(matches!(NbdDeviceMut::new(device), Err(Error::ReadOnly { .. })));
    }
}

#[test]
fn qemu_nbd_reads_the_same_over_several_connections() {
    let (file, bytes) = patterned();
    let path = file.path().to_str().unwrap();
    let server = Server::qemu_nbd(&["-f", "raw", "--read-only", path]);
    let device = server.device();
    assert!(device.export().is_multi_connection());
    assert_eq!(device.connection_count(), 4);
    Conformance::new().check_read_only(&device, &bytes);
    let qcow2 = tempfile::NamedTempFile::new().unwrap();
    let image = qcow2.path().to_str().unwrap();
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", path, image]);
    let server = Server::qemu_nbd(&["-f", "qcow2", "--read-only", image]);
    Conformance::new().check_read_only(&server.device(), &bytes);
}

#[test]
fn exports_are_listed_and_described() {
    let (file, _) = patterned();
    let path = file.path().to_str().unwrap();
    let server = Server::qemu_nbd(&["-f", "raw", "-x", "sda", "-D", "the first disk", path]);
    let options = NbdOptions::default();
    let listed = list_exports(&server.endpoint(), &options).unwrap();
    assert_eq!(
        (listed[0].name.as_str(), listed[0].description.as_str()),
        ("sda", "the first disk")
    );
    let (info, contexts) = describe_export(&server.endpoint(), "sda", &options).unwrap();
    assert_eq!((info.size_bytes(), info.description()), (SIZE_BYTES, "the first disk"));
    assert_eq!(contexts, [ALLOCATION]);
    let uri: NbdUri = format!("nbd+unix:///sda?socket={}", server.socket().display())
        .parse()
        .unwrap();
    assert_eq!(
        NbdDevice::connect_to(&uri, options.clone()).unwrap().size_bytes(),
        SIZE_BYTES
    );
    let error = NbdDevice::connect(&server.endpoint(), "sdb", options.clone()).unwrap_err();
    assert!(matches!(error, Error::NoSuchExport { .. }), "{error}");
    let tls: NbdUri = format!("nbds+unix:///sda?socket={}", server.socket().display())
        .parse()
        .unwrap();
    assert!(matches!(
        NbdDevice::connect_to(&tls, options),
        Err(Error::Unsupported { .. })
    ));
}

#[test]
fn a_server_that_requires_tls_is_detected() {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::OpenOptions::new()
        .append(true)
        .open(keys.path())
        .and_then(|mut file| std::io::Write::write_all(&mut file, b"someone:0123456789abcdef0123456789abcdef\n"))
        .unwrap();
    let psk = format!("--tls-psk={}", keys.path().display());
    let server = Server::nbdkit(&["--tls=require", &psk, "memory", "1M"]);
    let error = NbdDevice::connect(&server.endpoint(), "", NbdOptions::default()).unwrap_err();
    assert!(matches!(error, Error::TlsRequired { .. }), "{error}");
}

/// Connects over TCP, and over a socket that is already connected.
#[test]
fn connections_over_tcp_and_connected_sockets_work() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let forwarded = port.to_string();
    let server = Server::nbdkit(&["memory", "1M"]);
    let relay = super::peer::relay_tcp(port, server.socket());
    let options = NbdOptions::default();
    let device = NbdDeviceMut::connect(&Endpoint::Tcp("127.0.0.1".to_owned(), port), "", options.clone()).unwrap();
    device.write_at(b"over the wire", 1000).unwrap();
    let uri: NbdUri = format!("nbd://127.0.0.1:{forwarded}/").parse().unwrap();
    let again = NbdDevice::connect_to(&uri, options.clone()).unwrap();
    let stream = std::os::unix::net::UnixStream::connect(server.socket()).unwrap();
    let given = NbdDevice::connect(&Endpoint::connected("given", stream), "", options).unwrap();
    assert_eq!(given.connection_count(), 1);
    for device in [&again, &given] {
        let mut buffer = [0; 13];
        device.read_at(&mut buffer, 1000).unwrap();
        assert_eq!(&buffer, b"over the wire");
    }
    drop((device, again, relay));
}

#[test]
fn errors_of_the_server_are_returned_and_the_connection_continues() {
    let trigger = tempfile::NamedTempFile::new().unwrap();
    let file = format!("error-file={}", trigger.path().display());
    let server = Server::nbdkit(&[
        "--filter=error",
        "memory",
        "1M",
        "error=ENOSPC",
        "error-rate=100%",
        &file,
    ]);
    let device = server.device_mut();
    let error = device.write_at(&[1; 4096], 8192).unwrap_err();
    assert!(error.is_no_space(), "{error:?}");
    let error = device.read_at(&mut [0; 512], 1024).unwrap_err();
    assert!(error.is_no_space(), "{error:?}");
    drop(trigger);
    device.write_at(&[1; 4096], 8192).unwrap();
    let mut buffer = [0; 4096];
    device.read_at(&mut buffer, 8192).unwrap();
    assert_eq!(buffer, [1; 4096]);
}

/// A server may not support flushing, or a kind of zeroing.
#[test]
fn missing_server_features_have_a_fallback_or_an_error() {
    let server = Server::nbdkit(&["--filter=error", "memory", "1M", "error=EINVAL", "error-zero-rate=100%"]);
    let device = server.device_mut();
    device.write_at(&vec![1; 70_000], 0).unwrap();
    device.write_zeroes(1000..68_000).unwrap();
    device.trim(0..70_000).unwrap();
    let mut buffer = vec![2; 70_000];
    device.read_at(&mut buffer, 0).unwrap();
    assert!(buffer[1000..68_000].iter().all(|byte| *byte == 0));
    let server = Server::nbdkit(&[
        "eval",
        "get_size=echo 1M",
        "can_write=exit 0",
        "pwrite=cat >/dev/null",
        "pread=dd if=/dev/zero count=$3 iflag=count_bytes",
    ]);
    let device = server.device_mut();
    device.write_at(&[1; 512], 0).unwrap();
    let error = device.flush().unwrap_err().to_string();
    assert!(error.contains("does not offer flush"), "{error}");
}

/// A file that shrinks, and a device that reports no extents: everything is data.
#[test]
fn without_contexts_everything_is_data() {
    let server = Server::nbdkit(&["--no-sr", "memory", "1M"]);
    let list = server.device().extents(0..1 << 20, 10).unwrap();
    assert_eq!(list.as_slice().len(), 1);
    assert_eq!(list.as_slice()[0].kind, ExtentKind::Data);
    let mut options = NbdOptions::default();
    options.contexts.push("qemu:dirty-bitmap:gone".to_owned());
    options.connect_timeout = Duration::from_secs(10);
    for arguments in [&["--no-sr", "memory", "1M"][..], &["memory", "1M"]] {
        let server = Server::nbdkit(arguments);
        let error = NbdDevice::connect(&server.endpoint(), "", options.clone()).unwrap_err();
        assert!(matches!(&error, Error::ContextMissing { context, .. } if context == "qemu:dirty-bitmap:gone"));
    }
}
