//! A server that violates the protocol, and one that uses its rare but legal forms.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, ManualClock, to_usize};
use holdfast_serve::nbd::client::{Endpoint, Error, NbdDevice, NbdDeviceMut, NbdOptions, Stream};

const SIZE_BYTES: u64 = 64 << 20;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const BLOCK_STATUS: u16 = 7;

/// A request as it arrived.
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

    /// A valid handshake: structured replies, one context of number 9.
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

    /// The next request, with what it writes.
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

/// A server that completes the handshake and then runs `serve`, and its endpoint.
fn server(serve: impl FnOnce(&mut Peer) -> Option<()> + Send + 'static) -> (Endpoint, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut peer = Peer(theirs);
        // It ends when the client is gone.
        peer.shake_hands().and_then(|()| serve(&mut peer));
    });
    (Endpoint::connected("wicked", ours), thread)
}

fn options(timeout: Duration) -> NbdOptions {
    NbdOptions {
        connect_timeout: timeout,
        request_timeout: timeout,
        ..NbdOptions::default()
    }
}

/// A timeout that no test reaches, unless something is broken.
const LONG: Duration = Duration::from_secs(100);
const SHORT: Duration = Duration::from_millis(200);

fn reading(serve: impl FnOnce(&mut Peer) -> Option<()> + Send + 'static) -> NbdDevice {
    NbdDevice::connect(&server(serve).0, "", options(LONG)).unwrap()
}

/// The errors of a read, and of a later one, for the given reply.
fn read_error(reply: impl FnOnce(&mut Peer, &Request) -> Option<()> + Send + 'static) -> String {
    let device = reading(|peer| {
        let (request, _) = peer.request()?;
        reply(peer, &request);
        // The connection stays open, so that the client ends it.
        peer.request().map(|_| ())
    });
    let first = device.read_at(&mut [0; 4096], 8192).unwrap_err().to_string();
    let second = device.read_at(&mut [0; 4096], 8192).unwrap_err().to_string();
    assert_eq!(first, second, "the connection must be lost for later requests too");
    first
}

/// Cancellation does not wait for the long timeout of a silent server.
#[test]
fn cancellation_does_not_wait_for_a_reply() {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&is_stopped);
    let (endpoint, _server) = server(move |peer| {
        peer.request()?;
        asked.store(true, Ordering::Release);
        peer.request().map(|_| ())
    });
    let options = NbdOptions {
        is_stopped: Some(Arc::new(move || is_stopped.load(Ordering::Acquire))),
        ..options(LONG)
    };
    let device = NbdDevice::connect(&endpoint, "", options).unwrap();
    let error = device.read_at(&mut [0; 4096], 8192).unwrap_err().to_string();
    assert!(error.contains("cancelled"), "{error}");
}

/// Cancellation for a server that accepts and never greets, and for one that does not accept.
#[test]
fn cancellation_does_not_wait_for_a_greeting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("silent.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let hanging = |_: Duration| -> std::io::Result<Box<dyn Stream>> {
        loop {
            std::thread::park();
        }
    };
    for endpoint in [
        Endpoint::Unix(path),
        Endpoint::Custom("a host that does not answer".to_owned(), Arc::new(hanging)),
    ] {
        let options = NbdOptions {
            is_stopped: Some(Arc::new(|| true)),
            ..options(LONG)
        };
        let error = NbdDevice::connect(&endpoint, "", options).err().unwrap();
        let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        let said: Vec<String> = causes.map(ToString::to_string).collect();
        assert!(said.join(": ").contains("cancelled"), "{said:?}");
    }
    drop(listener);
}

#[test]
fn every_lie_about_a_read_ends_the_connection_with_its_name() {
    type Reply = fn(&mut Peer, &Request) -> Option<()>;
    let lies: [(&str, Reply); 9] = [
        ("not in flight", |peer, request| {
            peer.data(
                1,
                &Request {
                    cookie: request.cookie + 1,
                    ..*request
                },
                8192,
                4096,
            )
        }),
        ("after 0 bytes", |peer, request| peer.chunk(1, 0, request.cookie, &[])),
        ("after 4095 bytes", |peer, request| peer.data(1, request, 8193, 4095)),
        ("4096 bytes at offset 8193 for a request", |peer, request| {
            peer.data(1, request, 8193, 4096)
        }),
        ("512 bytes at offset 8192 twice", |peer, request| {
            peer.data(0, request, 8192, 512)?;
            peer.data(1, request, 8192, 512)
        }),
        ("not in flight", |peer, request| {
            peer.data(0, request, 8192, 4096)?;
            peer.chunk(1, 0, request.cookie, &[])?;
            peer.chunk(1, 0, request.cookie, &[])
        }),
        ("begins with 0x6e6f6e73", |peer, _| {
            peer.send(&[b"nonsense, but enough of it to be a header"])
        }),
        ("with a simple reply", |peer, request| {
            peer.send(&[&0x6744_6698u32.to_be_bytes(), &[0; 4], &request.cookie.to_be_bytes()])
        }),
        ("length of a chunk of data is 4294967295", |peer, request| {
            let magic = 0x668e_33efu32.to_be_bytes();
            peer.send(&[
                &magic,
                &[0, 1, 0, 1],
                &request.cookie.to_be_bytes(),
                &[0xff; 4],
                &[0; 64],
            ])
        }),
    ];
    for (what, reply) in lies.into_iter().filter(|(what, _)| *what != "not in flight") {
        let error = read_error(reply);
        assert!(
            error.contains("breaks the NBD protocol") && error.contains(what),
            "{what}: {error}"
        );
    }
    let (_, foreign_cookie) = lies[0];
    let error = read_error(foreign_cookie);
    assert!(error.contains("not in flight"), "{error}");
    // The connection ends after the first read has its reply: the next one finds it lost.
    let (_, double_end) = lies[5];
    let device = reading(move |peer| {
        let (request, _) = peer.request()?;
        double_end(peer, &request)?;
        peer.request().map(|_| ())
    });
    device.read_at(&mut [0; 4096], 8192).unwrap();
    let error = device.read_at(&mut [0; 4096], 8192).unwrap_err().to_string();
    assert!(error.contains("not in flight"), "{error}");
}

#[test]
fn lies_about_extents_end_the_connection_with_their_names() {
    fn of(payload: Vec<u8>) -> String {
        let device = reading(move |peer| {
            let (request, _) = peer.request()?;
            assert_eq!(request.kind, BLOCK_STATUS);
            peer.chunk(1, 5, request.cookie, &payload)?;
            peer.request().map(|_| ())
        });
        device.extents(0..1 << 20, 10).unwrap_err().to_string()
    }
    let words = |numbers: &[u32]| -> Vec<u8> { numbers.iter().flat_map(|number| number.to_be_bytes()).collect() };
    assert!(of(words(&[9, 0, 0])).contains("an extent of no bytes"));
    assert!(of(words(&[9, 1 << 20, 0, 1, 0])).contains("past the end of the query"));
    assert!(of(words(&[8, 4096, 0])).contains("was not granted"));
    assert!(of(words(&[9])).contains("length of its block status is 4"));
    let forgotten = reading(|peer| {
        let (request, _) = peer.request()?;
        peer.chunk(1, 0, request.cookie, &[])?;
        peer.request().map(|_| ())
    });
    let error = forgotten.extents(0..1 << 20, 10).unwrap_err().to_string();
    assert!(
        error.contains("omits the metadata context \"base:allocation\""),
        "{error}"
    );
}

/// Interleaved chunks of many requests, small and out of order, with holes between them: all of that is legal.
#[test]
fn replies_in_pieces_and_out_of_order_are_put_together() {
    const COUNT: u64 = 8;
    const PIECE_BYTES: u64 = 64 << 10;
    let (endpoint, thread) = server(|peer| {
        loop {
            let mut requests = Vec::new();
            for _ in 0..COUNT {
                requests.push(peer.request()?.0);
            }
            for step in (0..4).rev() {
                for request in requests.iter().rev() {
                    let part = request.length / 4;
                    peer.data(0, request, request.offset + step * part, part)?;
                }
            }
            for request in &requests {
                peer.chunk(1, 0, request.cookie, &[])?;
            }
        }
    });
    let options = NbdOptions {
        piece_bytes: 64 << 10,
        in_flight_bytes: COUNT * PIECE_BYTES,
        ..options(LONG)
    };
    let device = NbdDevice::connect(&endpoint, "", options).unwrap();
    let mut buffer = vec![0; to_usize(COUNT * PIECE_BYTES)];
    device.read_at(&mut buffer, 4096).unwrap();
    assert!((4096..).zip(&buffer).all(|(offset, byte)| *byte == byte_at(offset)));
    // The same pieces for as many threads: data of each come while another one reads.
    std::thread::scope(|scope| {
        for number in 0..COUNT {
            let device = &device;
            scope.spawn(move || {
                let offset = number << 20;
                let mut buffer = vec![0; to_usize(PIECE_BYTES)];
                device.read_at(&mut buffer, offset).unwrap();
                assert!((offset..).zip(&buffer).all(|(offset, byte)| *byte == byte_at(offset)));
            });
        }
    });
    drop(device);
    thread.join().unwrap();
}

/// A server that does one thing at a time, and does not read while it writes: readers and writers must not deadlock.
#[test]
fn readers_and_writers_do_not_stop_each_other_on_a_serial_server() {
    let (endpoint, thread) = server(|peer| {
        loop {
            let (request, _) = peer.request()?;
            match request.kind {
                READ => peer.data(1, &request, request.offset, request.length)?,
                _ => peer.chunk(1, 0, request.cookie, &[])?,
            }
        }
    });
    let options = NbdOptions {
        piece_bytes: 512 << 10,
        ..options(LONG)
    };
    let device = NbdDeviceMut::connect(&endpoint, "", options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let device = &device;
            scope.spawn(move || {
                let mut buffer = vec![0; 3 << 20];
                for round in 0..3 {
                    let offset = (thread * 3 + round) << 20;
                    if (thread + round) % 2 == 0 {
                        device.read_at(&mut buffer, offset).unwrap();
                        assert!(
                            (offset..)
                                .zip(&buffer)
                                .step_by(509)
                                .all(|(offset, byte)| *byte == byte_at(offset))
                        );
                    } else {
                        device.write_at(&buffer, offset).unwrap();
                    }
                }
            });
        }
    });
    drop(device);
    thread.join().unwrap();
}

#[test]
fn a_server_that_stops_answering_is_given_up_by_all() {
    let (endpoint, thread) = server(|peer| {
        while peer.request().is_some() {}
        None
    });
    let device = NbdDevice::connect(&endpoint, "", options(SHORT)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..6 {
            let device = &device;
            scope.spawn(move || {
                let error = device.read_at(&mut vec![0; 100_000], 8192).unwrap_err().to_string();
                let expected = "the server did not answer a read of 100000 bytes at offset 8192 for";
                assert!(error.contains(expected), "{error}");
            });
        }
    });
    drop(device);
    thread.join().unwrap();
}

#[test]
fn a_server_that_takes_nothing_is_given_up() {
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let (endpoint, thread) = server(move |_| wait.recv().ok());
    let device = NbdDeviceMut::connect(&endpoint, "", options(SHORT)).unwrap();
    let error = device.write_at(&vec![1; 32 << 20], 0).unwrap_err().to_string();
    assert!(
        error.contains("accepted no byte of a write of 262144 bytes at offset"),
        "{error}"
    );
    drop(release);
    thread.join().unwrap();
}

/// An occasional byte does not keep a connection alive for ever: the time for one request is bounded by the bytes in
/// flight.
#[test]
fn a_server_that_trickles_is_given_up() {
    let clock = Arc::new(ManualClock::new());
    let servers_clock = clock.clone();
    let (endpoint, thread) = server(move |peer| {
        let (request, _) = peer.request()?;
        let offset = request.offset.to_be_bytes();
        let magic = 0x668e_33efu32.to_be_bytes();
        peer.send(&[
            &magic,
            &[0, 1, 0, 1],
            &request.cookie.to_be_bytes(),
            &4104u32.to_be_bytes(),
            &offset,
        ])?;
        for _ in 0..4000 {
            servers_clock.advance(LONG / 3);
            peer.send(&[&[7]])?;
            // The next byte only when this one was seen: the clock must not run ahead of the reader.
            std::thread::yield_now();
        }
        None
    });
    let options = NbdOptions { clock, ..options(LONG) };
    let device = NbdDevice::connect(&endpoint, "", options).unwrap();
    let error = device.read_at(&mut [0; 4096], 0).unwrap_err().to_string();
    assert!(error.contains("did not answer"), "{error}");
    drop(device);
    thread.join().unwrap();
}

#[test]
fn silence_before_the_first_request_is_given_up_too() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let error = NbdDevice::connect(&Endpoint::connected("mute", ours), "", options(SHORT)).unwrap_err();
    assert!(matches!(error, Error::HandshakeTimeout { .. }), "{error}");
    drop(theirs);
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let error = NbdDevice::connect(&Endpoint::connected("gone", ours), "", options(LONG)).unwrap_err();
    assert!(matches!(error, Error::Handshake { .. }), "{error}");
    let error = NbdDevice::connect(&Endpoint::Unix("/nonexistent/socket".into()), "", options(LONG)).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
}

/// A socket whose queue is full: connecting must time out.
#[test]
fn a_listener_that_never_accepts_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let filled = path.clone();
    // Ends when the listener does.
    let filler = std::thread::spawn(move || while UnixStream::connect(&filled).is_ok() {});
    let error = loop {
        match NbdDevice::connect(&Endpoint::Unix(path.clone()), "", options(SHORT)).unwrap_err() {
            Error::HandshakeTimeout { .. } => {}
            other => break other,
        }
    };
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    drop(listener);
    filler.join().unwrap();
}

#[test]
fn a_server_that_shuts_down_is_taken_at_its_word() {
    let device = reading(|peer| {
        let (request, _) = peer.request()?;
        peer.chunk(1, 0x8001, request.cookie, &[0, 0, 0, 108, 0, 3, b'b', b'y', b'e'])?;
        peer.request().map(|_| ())
    });
    let error = device.read_at(&mut [0; 512], 0).unwrap_err().to_string();
    assert!(error.contains("ESHUTDOWN") && error.contains("bye"), "{error}");
    let error = device.read_at(&mut [0; 512], 0).unwrap_err().to_string();
    assert!(error.contains("is lost: the server is shutting down"), "{error}");
}
