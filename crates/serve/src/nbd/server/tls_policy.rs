//! Whether clients talk in the clear or encrypted.

use super::handshake::TlsMode;
use crate::nbd::tls::TlsServer;

/// Whether clients talk in the clear or encrypted.
#[derive(Debug, Clone, Default)]
pub enum TlsPolicy {
    /// There is no TLS.
    #[default]
    Off,
    /// Clients may ask for TLS. Whoever can change bytes on the way can keep them from it: where that matters, require it.
    Allowed(TlsServer),
    /// Clients get nothing, not even a list, before TLS has begun.
    Required(TlsServer),
}

impl TlsPolicy {
    pub(crate) fn mode(&self) -> TlsMode {
        match self {
            Self::Off => TlsMode::Off,
            Self::Allowed(_) => TlsMode::Allowed,
            Self::Required(_) => TlsMode::Required,
        }
    }

    pub(crate) fn server(&self) -> Option<&TlsServer> {
        match self {
            Self::Off => None,
            Self::Allowed(server) | Self::Required(server) => Some(server),
        }
    }
}
