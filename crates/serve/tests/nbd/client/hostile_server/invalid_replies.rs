//! Replies that violate the protocol, and rare forms that are valid.

use holdfast_block::{BlockDevice, to_usize};
use holdfast_serve::nbd::client::{NbdDevice, NbdOptions};

use super::{BLOCK_STATUS, LONG, Peer, Request, byte_at, options, read_error, reading, server};

#[test]
fn invalid_replies_to_reads_end_the_connection_with_their_errors() {
    type Reply = fn(&mut Peer, &Request) -> Option<()>;
    let invalid: [(&str, Reply); 9] = [
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
    for (what, reply) in invalid.into_iter().filter(|(what, _)| *what != "not in flight") {
        let error = read_error(reply);
        assert!(
            error.contains("breaks the NBD protocol") && error.contains(what),
            "{what}: {error}"
        );
    }
    let (_, foreign_cookie) = invalid[0];
    let error = read_error(foreign_cookie);
    assert!(error.contains("not in flight"), "{error}");
    // The connection ends after the first read has its reply, so the next read fails.
    let (_, double_end) = invalid[5];
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
fn invalid_extents_end_the_connection_with_their_errors() {
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

/// Interleaved chunks of many requests, small and out of order, with holes between them: all of this is valid.
#[test]
fn fragmented_and_reordered_replies_are_assembled() {
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
    // The same pieces, requested by as many threads: data for one thread arrives while another thread reads.
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
