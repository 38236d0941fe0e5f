//! The identity of a host: a self-signed certificate, which each host of a pool gets at its installation.

use std::io;
use std::sync::Arc;

use aws_lc_rs::digest::{self, SHA256};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::base64;

/// A certificate and its key.
pub(crate) struct Identity {
    /// The name that the certificate is for.
    pub(crate) name: String,
    certificate: Vec<u8>,
    key: Vec<u8>,
    /// The TLS configuration with this identity.
    pub(crate) config: Arc<ServerConfig>,
}

impl Identity {
    /// Creates a key and a certificate for `name` and `address`.
    pub(crate) fn new(name: &str, address: [u8; 4]) -> io::Result<Self> {
        let failed = |_| io::Error::other("cannot make a key");
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).map_err(failed)?;
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key.as_ref()).map_err(io::Error::other)?;
        let mut serial = [0; 8];
        aws_lc_rs::rand::fill(&mut serial).map_err(failed)?;
        // A serial number must be positive and not zero.
        serial[0] = serial[0] & 0x7F | 0x40;
        let body = to_be_signed(name, address, serial, pair.public_key().as_ref());
        let signature = pair.sign(&random, &body).map_err(failed)?;
        let certificate = sequence(&[body, sequence(&[ecdsa_with_sha256()]), bit_string(signature.as_ref())]);
        let key = key.as_ref().to_vec();
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from(certificate.clone())],
                PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.clone())),
            )
            .map_err(io::Error::other)?;
        Ok(Self {
            name: name.to_owned(),
            certificate,
            key,
            config: Arc::new(config),
        })
    }

    pub(crate) fn certificate_pem(&self) -> String {
        pem("CERTIFICATE", &self.certificate)
    }

    pub(crate) fn key_pem(&self) -> String {
        pem("PRIVATE KEY", &self.key)
    }

    /// SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` prints it.
    pub(crate) fn fingerprint(&self) -> String {
        let digest = digest::digest(&SHA256, &self.certificate);
        let pairs: Vec<String> = digest.as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
        pairs.join(":")
    }
}

fn pem(label: &str, bytes: &[u8]) -> String {
    let text = base64::encode(bytes);
    let lines: Vec<&str> = (0..text.len())
        .step_by(64)
        .map(|start| &text[start..text.len().min(start + 64)])
        .collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// The content of the certificate: RFC 5280, 4.1.
fn to_be_signed(name: &str, address: [u8; 4], serial: [u8; 8], public_key: &[u8]) -> Vec<u8> {
    let version_3 = tagged(0xA0, &element(0x02, &[2]));
    let validity = sequence(&[element(0x17, b"200101000000Z"), element(0x17, b"491231235959Z")]);
    let key = sequence(&[
        sequence(&[
            object(&[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x02, 0x01]), // id-ecPublicKey
            object(&[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x03, 0x01, 0x07]), // prime256v1
        ]),
        bit_string(public_key),
    ]);
    let alternatives = sequence(&[element(0x82, name.as_bytes()), element(0x87, &address)]);
    let extensions = sequence(&[
        extension(&[0x55, 0x1D, 0x11], &alternatives), // subjectAltName
        extension(&[0x55, 0x1D, 0x13], &sequence(&[element(0x01, &[0xFF])])), // basicConstraints: a CA, because it signs itself
    ]);
    sequence(&[
        version_3,
        element(0x02, &serial),
        sequence(&[ecdsa_with_sha256()]),
        common_name(name),
        validity,
        common_name(name),
        key,
        tagged(0xA3, &extensions),
    ])
}

fn ecdsa_with_sha256() -> Vec<u8> {
    object(&[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x04, 0x03, 0x02])
}

fn common_name(name: &str) -> Vec<u8> {
    let attribute = sequence(&[object(&[0x55, 0x04, 0x03]), element(0x0C, name.as_bytes())]);
    sequence(&[element(0x31, &attribute)])
}

fn extension(identifier: &[u8], value: &[u8]) -> Vec<u8> {
    sequence(&[object(identifier), element(0x04, value)])
}

fn sequence(parts: &[Vec<u8>]) -> Vec<u8> {
    element(0x30, &parts.concat())
}

fn object(identifier: &[u8]) -> Vec<u8> {
    element(0x06, identifier)
}

fn tagged(tag: u8, content: &[u8]) -> Vec<u8> {
    element(tag, content)
}

fn bit_string(bytes: &[u8]) -> Vec<u8> {
    element(0x03, &[&[0], bytes].concat())
}

/// Encodes tag, length and content in DER.
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let short = u8::try_from(content.len()).ok().filter(|length| *length < 0x80);
    let mut bytes = vec![tag];
    if let Some(length) = short {
        bytes.push(length);
    } else {
        let significant: Vec<u8> = length.iter().copied().skip_while(|byte| *byte == 0).collect();
        bytes.push(0x80 | u8::try_from(significant.len()).unwrap_or(8));
        bytes.extend(significant);
    }
    bytes.extend_from_slice(content);
    bytes
}
