//! The NBD servers of a pool's disks.

use serde_json::json;

use super::http::connect;
use super::trust::{Fingerprint, Trust};
use super::{Pool, Reference, XapiError, XapiRecord, XapiResult};

/// The NBD server of a disk. The export name contains the session, so it is a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct NbdAddress {
    /// The host.
    pub address: String,
    /// The port.
    pub port: u16,
    /// The export name.
    pub export: String,
    /// The server name in its certificate.
    pub name: String,
    /// The expected certificate; none without TLS.
    pub fingerprint: Option<Fingerprint>,
}

impl std::fmt::Debug for NbdAddress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "NbdPlace({}:{})", self.address, self.port)
    }
}

impl NbdAddress {
    /// The certificates to trust for this server.
    pub fn trust(&self) -> Option<Trust> {
        self.fingerprint.map(|fingerprint| Trust {
            fingerprints: vec![fingerprint],
            authorities: None,
        })
    }
}

impl Pool {
    /// Checks that a server listens at an NBD address.
    ///
    /// # Errors
    /// No server listens, or a firewall blocks the connection.
    pub fn reach_nbd(&self, place: &NbdAddress) -> std::io::Result<()> {
        connect(&place.address, place.port, &*self.retry_context.is_stopped).map(drop)
    }

    /// The NBD servers of a disk; empty if no network of the pool has the NBD purpose.
    pub fn nbd_addresses(&self, disk: &Reference) -> XapiResult<Vec<NbdAddress>> {
        const METHOD: &str = "VDI.get_nbd_info";
        let answer = self.call(METHOD, &[json!(disk.0)])?;
        let list = answer.as_array().cloned().unwrap_or_default();
        let place = |value| {
            let record = XapiRecord::new("NBD", disk.clone(), value);
            let port = record.number("port")?;
            let certificate = record.text("cert");
            let fingerprint = Fingerprint::of_pem(certificate);
            if fingerprint.is_none() && !certificate.is_empty() {
                return Err(self.invalid_answer(METHOD, "its certificate is invalid"));
            }
            Ok(NbdAddress {
                address: record.text("address").to_owned(),
                port: u16::try_from(port).map_err(|_| XapiError::Record {
                    class: "NBD",
                    reference: disk.to_string(),
                    field: "port",
                })?,
                export: record.text("exportname").to_owned(),
                name: record.text("subject").to_owned(),
                fingerprint,
            })
        };
        list.into_iter().map(place).collect()
    }
}
