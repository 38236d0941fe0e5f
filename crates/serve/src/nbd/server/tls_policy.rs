//! Whether connections are encrypted.

use super::handshake::TlsMode;
use crate::tls::TlsServer;

/// Whether connections are encrypted.
#[derive(Debug, Clone, Default)]
pub enum TlsPolicy {
    /// There is no TLS.
    #[default]
    Off,
    /// Clients may request TLS. An attacker on the network can prevent that: use `Required` if that is a risk.
    Allowed(TlsServer),
    /// Clients must start TLS before any other option, including a list of the exports.
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
