//! Trusted certificates. The hosts of a pool have self-signed certificates, so they are identified by fingerprints,
//! as in ssh.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use ::aws_lc_rs::digest::{SHA256, digest};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::{XapiError, XapiResult};

/// SHA-256 of a certificate, in DER.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a certificate in PEM.
    pub fn of_pem(pem: &str) -> Option<Self> {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
        Some(Self::of_certificate(&certificate))
    }

    pub(super) fn of_certificate(certificate: &CertificateDer<'_>) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, certificate).as_ref());
        Self(bytes)
    }
}

impl FromStr for Fingerprint {
    type Err = XapiError;

    /// Parses the output of `openssl x509 -fingerprint -sha256`, with or without colons and prefix.
    fn from_str(text: &str) -> XapiResult<Self> {
        let wrong = || XapiError::Trust {
            what: format!("the fingerprint {text:?}"),
            detail: "it must be the SHA-256 of a certificate: 64 hexadecimal digits".to_owned(),
        };
        let digits = text.rsplit('=').next().unwrap_or(text);
        let digits: Vec<u8> = digits.bytes().filter(|byte| *byte != b':').collect();
        if digits.len() != 64 {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let pair = std::str::from_utf8(pair).ok();
            let pair = pair.filter(|pair| pair.bytes().all(|digit| digit.is_ascii_hexdigit()));
            *byte = pair
                .and_then(|pair| u8::from_str_radix(pair, 16).ok())
                .ok_or_else(wrong)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, byte) in self.0.iter().enumerate() {
            write!(formatter, "{}{byte:02X}", if place == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}

/// The trusted certificates of hosts.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// Fingerprints of trusted certificates, whatever their issuer and names.
    pub fingerprints: Vec<Fingerprint>,
    /// Authorities (PEM) whose certificates are trusted for the names in them.
    pub authorities: Option<String>,
}

impl Trust {
    /// Adds trusted certificates.
    #[must_use]
    pub fn and(&self, fingerprints: impl IntoIterator<Item = Fingerprint>) -> Self {
        let mut trust = self.clone();
        trust.fingerprints.extend(fingerprints);
        trust
    }

    /// The TLS configuration, which is also used for XenServer's NBD.
    pub fn tls(&self) -> XapiResult<Arc<ClientConfig>> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let signed = self
            .authorities
            .as_deref()
            .map(|pem| verifier(pem, &provider))
            .transpose()?;
        let failed = |error: Error| XapiError::Trust {
            what: "TLS".to_owned(),
            detail: error.to_string(),
        };
        let known = PinnedVerifier {
            fingerprints: self.fingerprints.clone(),
            signed,
            provider: Arc::clone(&provider),
        };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(known))
            .with_no_client_auth();
        Ok(Arc::new(config))
    }
}

fn verifier(pem: &str, provider: &Arc<CryptoProvider>) -> XapiResult<Arc<WebPkiServerVerifier>> {
    let wrong = |detail: String| XapiError::Trust {
        what: "the file of authorities".to_owned(),
        detail,
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
        roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(wrong("it contains no certificate".to_owned()));
    }
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| wrong(error.to_string()))
}

/// Compares certificates with known ones. The proof of the private key is verified as usual.
#[derive(Debug)]
struct PinnedVerifier {
    fingerprints: Vec<Fingerprint>,
    signed: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let fingerprint = Fingerprint::of_certificate(end_entity);
        if self.fingerprints.contains(&fingerprint) {
            return Ok(ServerCertVerified::assertion());
        }
        let reason = match &self.signed {
            Some(signed) => {
                match signed.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
                    Err(Error::InvalidCertificate(reason)) => format!(" ({reason})"),
                    other => return other,
                }
            }
            None => String::new(),
        };
        Err(Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(
            Arc::new(UnknownCertificate { fingerprint, reason }),
        ))))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// An unknown certificate.
#[derive(Debug, thiserror::Error)]
#[error("unknown certificate {fingerprint}{reason}")]
struct UnknownCertificate {
    fingerprint: Fingerprint,
    reason: String,
}

/// The fingerprint of the untrusted certificate in an error of a connection, and why the authorities reject the
/// certificate.
pub(super) fn unknown_certificate(error: &std::io::Error) -> Option<(String, String)> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    match error {
        Error::InvalidCertificate(CertificateError::Other(other)) => {
            let unknown = other.0.downcast_ref::<UnknownCertificate>()?;
            Some((unknown.fingerprint.to_string(), unknown.reason.clone()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::Fingerprint;

    #[test]
    fn fingerprints_are_read_as_openssl_prints_them() {
        let hex = "AB".repeat(32);
        let colons = vec!["AB"; 32].join(":");
        for text in [
            hex.clone(),
            hex.to_lowercase(),
            colons.clone(),
            format!("sha256 Fingerprint={colons}"),
        ] {
            assert_eq!(text.parse::<Fingerprint>().unwrap().to_string(), colons);
        }
        for wrong in [
            "",
            "AB",
            &hex[1..],
            &format!("{}G", &hex[1..]),
            &format!("+{}", &hex[1..]),
        ] {
            assert!(wrong.parse::<Fingerprint>().is_err(), "{wrong}");
        }
    }
}
