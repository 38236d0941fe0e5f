//! TLS between a client and its server.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection};

use super::Stream;
use crate::nbd::tls::{TlsLayer, tls_error};

/// Whom a client trusts, and whom its server has to prove to be.
#[derive(Debug, Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsClient {
    /// A client that trusts whom `config` trusts; the server's certificate is to be that of `name`, a host name or an address.
    ///
    /// # Errors
    /// It is neither.
    pub fn new(config: Arc<ClientConfig>, name: &str) -> crate::Result<Self> {
        let name = ServerName::try_from(name.to_owned()).map_err(tls_error("use the name of the server"))?;
        Ok(Self { config, name })
    }
}

/// A stream inside of which TLS runs.
pub(super) struct TlsStream {
    inner: Arc<dyn Stream>,
    tls: TlsLayer,
    /// Bytes that were encrypted and not sent to the last one: they are reported when they are.
    taken: Mutex<usize>,
}

impl TlsStream {
    pub(super) fn new(inner: Arc<dyn Stream>, client: &TlsClient) -> io::Result<Self> {
        let connection =
            ClientConnection::new(Arc::clone(&client.config), client.name.clone()).map_err(io::Error::other)?;
        Ok(Self {
            inner,
            tls: TlsLayer::new(Connection::Client(connection)),
            taken: Mutex::default(),
        })
    }

    pub(super) fn is_shaking_hands(&self) -> bool {
        self.tls.is_shaking_hands()
    }

    /// One step of the handshake of TLS; what it gives is more than 0, unless the server has gone.
    pub(super) fn shake_hands(&self) -> io::Result<usize> {
        self.tls.shake_hands(
            |buffer| self.read_encrypted(buffer),
            |bytes| self.write_encrypted(bytes),
        )
    }

    fn read_encrypted(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.inner.read_vectored(&mut [IoSliceMut::new(buffer)])
    }

    fn write_encrypted(&self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.write_vectored(&[IoSlice::new(bytes)])
    }
}

impl Stream for TlsStream {
    fn read_vectored(&self, buffers: &mut [IoSliceMut]) -> io::Result<usize> {
        let Some(buffer) = buffers.iter_mut().find(|buffer| !buffer.is_empty()) else {
            return Ok(0);
        };
        self.tls.receive(
            buffer,
            |buffer| self.read_encrypted(buffer),
            |bytes| self.write_encrypted(bytes),
        )
    }

    /// Who loses patience asks again with the same bytes, of which a part may be encrypted already.
    fn write_vectored(&self, buffers: &[IoSlice]) -> io::Result<usize> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if *taken == 0 {
            *taken = self.tls.send(buffers, |bytes| self.write_encrypted(bytes))?;
        }
        self.tls.flush(|bytes| self.write_encrypted(bytes))?;
        Ok(std::mem::take(&mut *taken))
    }

    fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.inner.set_patience(patience)
    }

    fn shutdown(&self) -> io::Result<()> {
        self.tls.say_goodbye();
        // A server that is gone needs no goodbye.
        drop(self.tls.flush_if_free(|bytes| self.write_encrypted(bytes)));
        self.inner.shutdown()
    }
}
