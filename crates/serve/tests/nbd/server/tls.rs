//! TLS: other clients with and without certificates, and clients that do not use TLS.

#![allow(clippy::disallowed_methods, reason = "tests run the peers")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use holdfast_block::{MemoryDevice, SeededRandom};
use holdfast_serve::nbd::{ClientTrust, Export, ExportDevice, FixedExports, TlsPolicy, TlsServer};

use crate::raw::{Raw, info_query};
use crate::servers::{OurServer, run, text};

const CA: &[u8] = include_bytes!("../../tls/ca-cert.pem");
const CERTIFICATE: &[u8] = include_bytes!("../../tls/server-cert.pem");
const KEY: &[u8] = include_bytes!("../../tls/server-key.pem");
const TLS_REQUIRED: u32 = 0x8000_0005;

fn identity(clients: ClientTrust<'_>) -> TlsServer {
    TlsServer::from_pem(CERTIFICATE, KEY, clients).unwrap()
}

fn start(tls: TlsPolicy) -> (Arc<MemoryDevice>, OurServer) {
    let bytes = SeededRandom::new(3).bytes(5_000_001);
    let device = Arc::new(MemoryDevice::from_bytes(&bytes));
    let export = Export::new("disk", ExportDevice::Writable(Arc::clone(&device) as _));
    (device, OurServer::start_tls(FixedExports::new([export]), tls))
}

/// A folder of certificates in the layout of GnuTLS, with or without a client certificate.
fn folder(with_client: bool) -> tempfile::TempDir {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    let folder = tempfile::tempdir().unwrap();
    let names: &[&str] = if with_client {
        &["ca-cert.pem", "client-cert.pem", "client-key.pem"]
    } else {
        &["ca-cert.pem"]
    };
    for name in names {
        std::fs::copy(source.join(name), folder.path().join(name)).unwrap();
    }
    folder
}

fn uri(server: &OurServer, certificates: &Path) -> String {
    let socket = server.socket();
    format!(
        "nbds+unix://localhost/disk?socket={}&tls-certificates={}",
        socket.display(),
        certificates.display()
    )
}

fn fails(program: &str, arguments: &[&str]) -> bool {
    !Command::new(program).args(arguments).output().unwrap().status.success()
}

#[test]
fn libnbd_copies_both_ways_under_tls() {
    let certificates = folder(false);
    for tls in [TlsPolicy::Allowed, TlsPolicy::Required] {
        let (device, server) = start(tls(identity(ClientTrust::Anyone)));
        let uri = uri(&server, certificates.path());
        assert!(run("nbdinfo", &[&uri]).contains("with TLS"));
        let target = tempfile::tempdir().unwrap();
        let file = target.path().join("copy");
        run("nbdcopy", &[&uri, text(&file)]);
        assert!(std::fs::read(&file).unwrap() == device.to_bytes());
        let other = SeededRandom::new(4).bytes(5_000_001);
        std::fs::write(&file, &other).unwrap();
        run("nbdcopy", &["--flush", text(&file), &uri]);
        assert!(device.to_bytes() == other);
    }
}

#[test]
fn qemu_compares_under_tls() {
    let certificates = folder(true);
    let (device, server) = start(TlsPolicy::Required(identity(ClientTrust::SignedBy(CA))));
    let target = tempfile::tempdir().unwrap();
    let file = target.path().join("copy");
    std::fs::write(&file, device.to_bytes()).unwrap();
    let credentials = format!(
        "tls-creds-x509,id=t,endpoint=client,dir={}",
        certificates.path().display()
    );
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},export=disk,tls-creds=t,tls-hostname=localhost",
        server.socket().display()
    );
    let file = format!("driver=raw,file.driver=file,file.filename={}", file.display());
    let arguments = ["compare", "--object", &credentials, "--image-opts", &image, &file];
    assert!(run("qemu-img", &arguments).contains("identical"));
}

#[test]
fn options_are_refused_without_required_tls() {
    let (_, server) = start(TlsPolicy::Required(identity(ClientTrust::Anyone)));
    assert!(fails("nbdinfo", &[&server.uri("disk")]));
    let mut raw = Raw::connect(&server.socket());
    raw.say(&3_u32.to_be_bytes());
    for (option, data) in [(3, vec![]), (6, info_query("disk", &[])), (8, vec![]), (99, vec![1])] {
        let kinds: Vec<u32> = raw.option(option, &data).unwrap().iter().map(|reply| reply.0).collect();
        assert_eq!(kinds, [TLS_REQUIRED], "option {option}");
    }
    assert_eq!(raw.option(2, &[]).unwrap()[0].0, 1, "goodbye is always possible");
    let mut by_name = Raw::connect(&server.socket());
    by_name.say(&3_u32.to_be_bytes());
    assert_eq!(by_name.option(1, b"disk"), None);
}

#[test]
fn a_client_without_a_required_certificate_is_refused() {
    let (_, server) = start(TlsPolicy::Required(identity(ClientTrust::SignedBy(CA))));
    let (with, without) = (folder(true), folder(false));
    assert!(run("nbdinfo", &[&uri(&server, with.path())]).contains("with TLS"));
    assert!(fails("nbdinfo", &[&uri(&server, without.path())]));
    server.wait_for_event(&["Disconnected", "InvalidData"]);
}

#[test]
fn options_before_tls_are_discarded() {
    let (_, server) = start(TlsPolicy::Allowed(identity(ClientTrust::Anyone)));
    let mut raw = Raw::connect(&server.socket());
    // A client injects an option after its request for TLS, which the server must not treat as encrypted.
    let start_tls = crate::raw::option_bytes(5, &[]);
    let list = crate::raw::option_bytes(3, &[]);
    raw.say(&[3_u32.to_be_bytes().as_slice(), &start_tls, &list].concat());
    assert_eq!(raw.option_replies(5).unwrap()[0].0, 1);
    assert_eq!(raw.take(1), None);
    server.wait_for_event(&["Disconnected", "plain bytes"]);
}

#[test]
fn invalid_certificates_are_refused() {
    for (certificate, key) in [
        (&b"nonsense"[..], KEY),
        (CERTIFICATE, b"nonsense"),
        (KEY, KEY),
        (CERTIFICATE, CA),
    ] {
        assert!(TlsServer::from_pem(certificate, key, ClientTrust::Anyone).is_err());
    }
    assert!(TlsServer::from_pem(CERTIFICATE, KEY, ClientTrust::SignedBy(b"")).is_err());
}
