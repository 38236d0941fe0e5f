//! TLS over a socket on which one thread receives while others send.
//!
//! Both directions use one TLS state. Its lock is held while bytes are encrypted or decrypted, and never while a thread
//! waits for the peer. Encrypted bytes must be sent in order: a second lock ensures that.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{Connection, RootCertStore, ServerConfig, ServerConnection};

use crate::{Error, Result};

/// Number of bytes to receive at once: a few records of 16 KiB.
const RECEIVE_BYTES: usize = 64 << 10;

/// The certificate of a server, and the certificate authorities of its clients.
#[derive(Debug, Clone)]
pub struct TlsServer {
    config: Arc<ServerConfig>,
}

/// Which client certificates a server requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientTrust<'a> {
    /// None: any client is served.
    Anyone,
    /// A certificate that is signed by one of these authorities, in PEM; other clients are refused.
    SignedBy(&'a [u8]),
}

impl TlsServer {
    /// A server with a certificate chain and the key of its first certificate, in PEM.
    pub fn from_pem(certificates: &[u8], key: &[u8], clients: ClientTrust<'_>) -> Result<Self> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(tls_error("choose versions of TLS"))?;
        let builder = match clients {
            ClientTrust::Anyone => builder.with_no_client_auth(),
            ClientTrust::SignedBy(authorities) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates_of(authorities, "read the authorities of clients")? {
                    roots
                        .add(certificate)
                        .map_err(tls_error("use the authorities of clients"))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .build()
                    .map_err(tls_error("use the authorities of clients"))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let chain = certificates_of(certificates, "read the server's certificate")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(tls_error("read the server's key"))?;
        let config = builder
            .with_single_cert(chain, key)
            .map_err(tls_error("use the server's certificate"))?;
        Ok(Self {
            config: Arc::new(config),
        })
    }

    pub(crate) fn begin(&self) -> io::Result<Connection> {
        let connection = ServerConnection::new(Arc::clone(&self.config)).map_err(io::Error::other)?;
        Ok(Connection::Server(connection))
    }
}

fn certificates_of(pem: &[u8], action: &'static str) -> Result<Vec<CertificateDer<'static>>> {
    let certificates: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(tls_error(action))?;
    if certificates.is_empty() {
        return Err(tls_error(action)(rustls::Error::NoCertificatesPresented));
    }
    Ok(certificates)
}

pub(crate) fn tls_error<E: std::error::Error + Send + Sync + 'static>(action: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::Tls {
        action,
        source: Box::new(source),
    }
}

/// The TLS state of one connection.
pub(crate) struct TlsLayer {
    connection: Mutex<Connection>,
    /// Encrypted bytes that must be sent before later encrypted bytes.
    outgoing: Mutex<Vec<u8>>,
    incoming: Mutex<Incoming>,
}

/// Received bytes that are not decrypted yet.
struct Incoming {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TlsLayer {
    pub(crate) fn new(connection: Connection) -> Self {
        Self {
            connection: Mutex::new(connection),
            outgoing: Mutex::default(),
            incoming: Mutex::new(Incoming {
                bytes: vec![0; RECEIVE_BYTES],
                start: 0,
                end: 0,
            }),
        }
    }

    /// Receives at least one decrypted byte; 0 when the peer has closed the connection.
    ///
    /// `receive` and `send` move encrypted bytes. The TLS handshake takes place here if it is not complete.
    pub(crate) fn receive(
        &self,
        buffer: &mut [u8],
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut incoming = lock(&self.incoming);
        loop {
            match lock(&self.connection).reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The connection was closed without a TLS close message; the caller knows whether it was in the middle
                // of a message.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
            if incoming.start == incoming.end {
                let length = receive(&mut incoming.bytes)?;
                if length == 0 {
                    return Ok(0);
                }
                incoming.start = 0;
                incoming.end = length;
            }
            let processed = self.decrypt(&mut incoming);
            // Messages of TLS itself: handshake, key updates, alerts. A thread that is sending may wait until this side
            // receives, so these messages are sent with its next data.
            match self.flush_if_free(&mut send) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                flushed => flushed?,
            }
            processed?;
        }
    }

    fn decrypt(&self, incoming: &mut Incoming) -> io::Result<()> {
        let mut connection = lock(&self.connection);
        let Incoming { bytes, start, end } = incoming;
        let mut rest = &bytes[*start..*end];
        let length = connection.read_tls(&mut rest)?;
        *start += length;
        connection
            .process_new_packets()
            .map(drop)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Encrypts a prefix of `pieces`, returns its length, and sends what `send` accepts. The rest is sent by
    /// [`flush`](Self::flush), or before later encrypted bytes.
    pub(crate) fn send(
        &self,
        pieces: &[IoSlice<'_>],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut outgoing = lock(&self.outgoing);
        send_out(&mut outgoing, &mut send)?;
        let mut connection = lock(&self.connection);
        let length = connection.writer().write_vectored(pieces)?;
        while connection.wants_write() {
            connection.write_tls(&mut *outgoing)?;
        }
        drop(connection);
        match send_out(&mut outgoing, &mut send) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(length),
        }
    }

    /// Sends encrypted bytes that were not sent yet.
    pub(crate) fn flush(&self, send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        self.flush_to(lock(&self.outgoing), send)
    }

    /// Like [`flush`](Self::flush), but does nothing while another thread is sending.
    pub(crate) fn flush_if_free(&self, send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        match self.outgoing.try_lock() {
            Ok(outgoing) => self.flush_to(outgoing, send),
            Err(TryLockError::Poisoned(poisoned)) => self.flush_to(poisoned.into_inner(), send),
            Err(TryLockError::WouldBlock) => Ok(()),
        }
    }

    fn flush_to(
        &self,
        mut outgoing: MutexGuard<'_, Vec<u8>>,
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut connection = lock(&self.connection);
        while connection.wants_write() {
            connection.write_tls(&mut *outgoing)?;
        }
        drop(connection);
        send_out(&mut outgoing, &mut send)
    }

    /// Whether the TLS handshake is in progress.
    pub(crate) fn is_shaking_hands(&self) -> bool {
        lock(&self.connection).is_handshaking()
    }

    /// Executes one step of the TLS handshake: sends pending messages, and receives; returns 0 when the peer has closed
    /// the connection.
    pub(crate) fn handshake_step(
        &self,
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.flush(&mut send)?;
        if !self.is_shaking_hands() {
            return Ok(1);
        }
        let mut incoming = lock(&self.incoming);
        if incoming.start == incoming.end {
            let length = receive(&mut incoming.bytes)?;
            (incoming.start, incoming.end) = (0, length);
            if length == 0 {
                return Ok(0);
            }
        }
        let processed = self.decrypt(&mut incoming);
        // Sends the last message of the handshake, or the alert.
        self.flush(&mut send)?;
        processed.map(|()| 1)
    }

    /// Encrypts a close message, which the next flush sends.
    pub(crate) fn send_close_notify(&self) {
        lock(&self.connection).send_close_notify();
    }
}

impl std::fmt::Debug for TlsLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsLayer").finish_non_exhaustive()
    }
}

fn send_out(outgoing: &mut Vec<u8>, send: &mut impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
    let mut sent = 0;
    let result = loop {
        if sent == outgoing.len() {
            break Ok(());
        }
        match send(&outgoing[sent..]) {
            Ok(length) => sent += length,
            Err(error) => break Err(error),
        }
    };
    outgoing.drain(..sent);
    result
}
