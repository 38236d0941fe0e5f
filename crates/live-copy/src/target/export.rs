//! An export of an NBD server as a target.

use std::sync::Arc;

use holdfast_serve::nbd::client::{Endpoint, Error as NbdError, NbdDevice, NbdDeviceMut, NbdOptions, NbdUri};

use crate::error::{Error, Result};

/// An export of an NBD server that copies are written to. It stays connected between receivers: some servers end with
/// their last connection.
pub struct ExportTarget {
    address: String,
    identity: String,
    device: Arc<NbdDeviceMut>,
}

impl ExportTarget {
    /// Connects to an export. `address` is its address, for people.
    ///
    /// # Errors
    /// [`Error::Export`]: the server cannot be reached, or the export is read-only. [`Error::ExportNotDurable`]: the server
    /// has no flush.
    pub fn connect(address: &str, uri: &NbdUri, options: NbdOptions) -> Result<Self> {
        let device = NbdDeviceMut::new(NbdDevice::connect_to(uri, options)?)?;
        // Without a flush, the journal would name data as durable that a power failure of the server may lose.
        if !device.as_read().export().can_flush() {
            return Err(Error::ExportNotDurable {
                address: address.to_owned(),
            });
        }
        Ok(Self {
            address: address.to_owned(),
            identity: export_identity(uri),
            device: Arc::new(device),
        })
    }

    /// Its address.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// The export, with new connections for those that were lost.
    ///
    /// # Errors
    /// [`Error::Export`]: it cannot be reached now. [`Error::Target`]: another export has its name.
    pub(super) fn reconnected(&self) -> Result<Arc<NbdDeviceMut>> {
        match self.device.as_read().reconnect() {
            Ok(()) => Ok(Arc::clone(&self.device)),
            Err(error @ NbdError::Changed { .. }) => Err(Error::Target {
                reason: error.to_string(),
            }),
            Err(error) => Err(error.into()),
        }
    }
}

/// The server and the name of an export: the same for each way to write its address.
pub fn export_identity(uri: &NbdUri) -> String {
    let server = match &uri.endpoint {
        Endpoint::Unix(path) => path
            .canonicalize()
            .unwrap_or_else(|_| path.clone())
            .display()
            .to_string(),
        other => other.to_string().to_ascii_lowercase(),
    };
    format!("nbd {server} {}", uri.export)
}
