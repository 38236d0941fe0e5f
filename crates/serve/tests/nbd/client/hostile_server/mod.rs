//! A server that violates the protocol, and one that uses rare but valid forms.

mod invalid_replies;
mod silence;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::{BlockDevice, to_usize};
use holdfast_serve::nbd::client::{Endpoint, NbdDevice, NbdOptions};

const SIZE_BYTES: u64 = 64 << 20;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const BLOCK_STATUS: u16 = 7;

/// A received request.
#[derive(Debug, Clone, Copy)]
struct Request {
    kind: u16,
    cookie: u64,
    offset: u64,
    length: u64,
}

/// The server's end of a connection.
struct Peer(UnixStream);

impl Peer {
    fn receive(&mut self, count: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).ok().map(|()| bytes)
    }

    fn send(&mut self, parts: &[&[u8]]) -> Option<()> {
        self.0.write_all(&parts.concat()).ok()
    }

    fn option_reply(&mut self, option: &[u8], kind: u32, data: &[u8]) -> Option<()> {
        let length = u32::try_from(data.len()).unwrap();
        let magic = 0x0003_e889_0455_65a9u64;
        self.send(&[
            &magic.to_be_bytes(),
            option,
            &kind.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ])
    }

    /// Executes a valid handshake: structured replies, and one context with the number 9.
    fn shake_hands(&mut self) -> Option<()> {
        self.send(&[b"NBDMAGICIHAVEOPT", &[0, 3]])?;
        self.receive(4)?;
        loop {
            let header = self.receive(16)?;
            let data = self.receive(to_usize(u64::from(u32::from_be_bytes(
                header[12..].try_into().unwrap(),
            ))))?;
            let option = &header[8..12];
            match option[3] {
                8 => self.option_reply(option, 1, &[])?,
                10 => {
                    self.option_reply(option, 4, b"\0\0\0\x09base:allocation")?;
                    self.option_reply(option, 1, &[])?;
                }
                7 => {
                    assert!(data.len() >= 6);
                    let info = [&[0, 0][..], &SIZE_BYTES.to_be_bytes(), &[0, 0x05]].concat();
                    self.option_reply(option, 3, &info)?;
                    return self.option_reply(option, 1, &[]);
                }
                _ => self.option_reply(option, 0x8000_0001, &[])?,
            }
        }
    }

    /// The next request, with its payload if it is a write.
    fn request(&mut self) -> Option<(Request, Vec<u8>)> {
        let header = self.receive(28)?;
        let number = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap());
        let request = Request {
            kind: u16::from_be_bytes([header[6], header[7]]),
            cookie: number(8),
            offset: number(16),
            length: u64::from(u32::from_be_bytes(header[24..].try_into().unwrap())),
        };
        let data = if request.kind == WRITE {
            self.receive(to_usize(request.length))?
        } else {
            Vec::new()
        };
        (request.kind != DISCONNECT).then_some((request, data))
    }

    fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Option<()> {
        let length = u32::try_from(payload.len()).unwrap();
        let magic = 0x668e_33efu32.to_be_bytes();
        self.send(&[
            &magic,
            &flags.to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &length.to_be_bytes(),
            payload,
        ])
    }

    fn data(&mut self, flags: u16, request: &Request, offset: u64, length: u64) -> Option<()> {
        let bytes: Vec<u8> = (offset..offset + length).map(byte_at).collect();
        self.chunk(flags, 1, request.cookie, &[&offset.to_be_bytes()[..], &bytes].concat())
    }
}

/// The content of the export.
fn byte_at(offset: u64) -> u8 {
    (offset / 512 * 31 + offset % 512).to_le_bytes()[0]
}

/// Starts a server that completes the handshake and then runs `serve`; returns its endpoint.
fn server(serve: impl FnOnce(&mut Peer) -> Option<()> + Send + 'static) -> (Endpoint, JoinHandle<()>) {
    let (client_end, server_end) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut peer = Peer(server_end);
        // The thread ends when the client has disconnected.
        peer.shake_hands().and_then(|()| serve(&mut peer));
    });
    (Endpoint::connected("wicked", client_end), thread)
}

fn options(timeout: Duration) -> NbdOptions {
    NbdOptions {
        connect_timeout: timeout,
        request_timeout: timeout,
        ..NbdOptions::default()
    }
}

/// A timeout that no test reaches unless there is a defect.
const LONG: Duration = Duration::from_secs(100);
const SHORT: Duration = Duration::from_millis(200);

fn reading(serve: impl FnOnce(&mut Peer) -> Option<()> + Send + 'static) -> NbdDevice {
    NbdDevice::connect(&server(serve).0, "", options(LONG)).unwrap()
}

/// Reads twice with a server that sends the given reply; returns both errors.
fn read_error(reply: impl FnOnce(&mut Peer, &Request) -> Option<()> + Send + 'static) -> String {
    let device = reading(|peer| {
        let (request, _) = peer.request()?;
        reply(peer, &request);
        // The server keeps the connection open, so that the client has to close it.
        peer.request().map(|_| ())
    });
    let first = device.read_at(&mut [0; 4096], 8192).unwrap_err().to_string();
    let second = device.read_at(&mut [0; 4096], 8192).unwrap_err().to_string();
    assert_eq!(first, second, "the connection must be lost for later requests too");
    first
}
