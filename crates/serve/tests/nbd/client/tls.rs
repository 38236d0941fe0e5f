//! TLS with other servers: certificates are checked, and nothing is sent unencrypted.

use std::path::PathBuf;
use std::sync::Arc;

use holdfast_serve::nbd::client::{Error, NbdDevice, NbdOptions, TlsClient, list_exports};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

use super::peer::Server;

pub(crate) const CA: &[u8] = include_bytes!("../../tls/ca-cert.pem");

pub(crate) fn options(authorities: &[&[u8]], name: &str) -> NbdOptions {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(CertificateDer::from_pem_slice(authority).unwrap()).unwrap();
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    NbdOptions {
        tls: Some(TlsClient::new(Arc::new(config), name).unwrap()),
        ..NbdOptions::default()
    }
}

/// A folder of certificates in the layout that nbdkit expects.
fn certificates() -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    folder.to_str().unwrap().to_owned()
}

pub(crate) fn nbdkit(arguments: &[&str]) -> Server {
    let tls = format!("--tls-certificates={}", certificates());
    Server::nbdkit(&[&["--tls=require", &tls], arguments].concat())
}

#[test]
fn a_server_with_another_identity_is_refused() {
    let server = nbdkit(&["memory", "1M"]);
    let by_address = options(&[CA], "127.0.0.1");
    assert_eq!(list_exports(&server.endpoint(), &by_address).unwrap().len(), 1);
    for wrong in [options(&[CA], "other.example"), options(&[], "localhost")] {
        let error = NbdDevice::connect(&server.endpoint(), "", wrong).unwrap_err();
        assert!(matches!(error, Error::Handshake { .. }), "{error:?}");
        assert!(format!("{error:?}").contains("Certificate"), "{error:?}");
    }
}

#[test]
fn connections_without_tls_on_both_sides_are_refused() {
    let server = nbdkit(&["memory", "1M"]);
    let error = NbdDevice::connect(&server.endpoint(), "", NbdOptions::default()).unwrap_err();
    assert!(matches!(error, Error::TlsRequired { .. }), "{error:?}");
    for plain in [&["memory", "1M"][..], &["--mask-handshake=0", "memory", "1M"]] {
        let server = Server::nbdkit(plain);
        let error = NbdDevice::connect(&server.endpoint(), "", options(&[CA], "localhost")).unwrap_err();
        assert!(matches!(error, Error::Refused { option: "STARTTLS", .. }), "{error:?}");
    }
}
