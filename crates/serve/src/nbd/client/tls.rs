//! TLS of a client.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection};

use super::Stream;
use crate::tls::{TlsLayer, tls_error};

/// The certificate authorities that a client trusts, and the name that the server's certificate must have.
#[derive(Debug, Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsClient {
    /// A client that trusts the authorities in `config`. The server's certificate must be for `name`, a host name or an
    /// address.
    ///
    /// # Errors
    /// `name` is neither a host name nor an address.
    pub fn new(config: Arc<ClientConfig>, name: &str) -> crate::Result<Self> {
        let name = ServerName::try_from(name.to_owned()).map_err(tls_error("use the name of the server"))?;
        Ok(Self { config, name })
    }
}

/// A TLS stream over another stream.
pub(super) struct TlsStream {
    inner: Arc<dyn Stream>,
    tls: TlsLayer,
    /// Bytes of the last call that were encrypted but not sent entirely. They are reported as written when they are
    /// sent.
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

    /// Executes one step of the TLS handshake; returns 0 only if the server has closed the connection.
    pub(super) fn handshake_step(&self) -> io::Result<usize> {
        self.tls.handshake_step(
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

    /// After a timeout the caller retries with the same bytes, some of which may already be encrypted.
    fn write_vectored(&self, buffers: &[IoSlice]) -> io::Result<usize> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if *taken == 0 {
            *taken = self.tls.send(buffers, |bytes| self.write_encrypted(bytes))?;
        }
        self.tls.flush(|bytes| self.write_encrypted(bytes))?;
        Ok(std::mem::take(&mut *taken))
    }

    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.inner.set_timeout(timeout)
    }

    fn shutdown(&self) -> io::Result<()> {
        self.tls.send_close_notify();
        // If the server has closed the connection, it needs no close message.
        drop(self.tls.flush_if_free(|bytes| self.write_encrypted(bytes)));
        self.inner.shutdown()
    }
}
