//! Servers that do not answer, answer too slowly, or shut down.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, ManualClock};
use holdfast_serve::nbd::client::{Endpoint, Error, NbdDevice, NbdDeviceMut, NbdOptions, Stream};

use super::{LONG, READ, SHORT, byte_at, options, reading, server};

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

/// A server that accepts a connection but sends no greeting, and a server that does not accept.
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
        let text: Vec<String> = causes.map(ToString::to_string).collect();
        assert!(text.join(": ").contains("cancelled"), "{text:?}");
    }
    drop(listener);
}

/// The server does one thing at a time, and does not read while it writes: readers and writers must not deadlock.
#[test]
fn readers_and_writers_do_not_deadlock_on_a_serial_server() {
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
fn all_requests_time_out_when_a_server_stops_answering() {
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
fn writes_time_out_when_a_server_reads_nothing() {
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

/// Occasional bytes do not keep a connection alive forever: the bytes in flight limit the time of one request.
#[test]
fn requests_time_out_when_a_server_sends_single_bytes() {
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
            // Advance the clock only after the client received this byte.
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
fn servers_that_are_silent_closed_or_missing_are_errors() {
    let (client_end, server_end) = UnixStream::pair().unwrap();
    let error = NbdDevice::connect(&Endpoint::connected("mute", client_end), "", options(SHORT)).unwrap_err();
    assert!(matches!(error, Error::HandshakeTimeout { .. }), "{error}");
    drop(server_end);
    let (client_end, server_end) = UnixStream::pair().unwrap();
    drop(server_end);
    let error = NbdDevice::connect(&Endpoint::connected("gone", client_end), "", options(LONG)).unwrap_err();
    assert!(matches!(error, Error::Handshake { .. }), "{error}");
    let error = NbdDevice::connect(&Endpoint::Unix("/nonexistent/socket".into()), "", options(LONG)).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
}

/// A socket whose queue is full: connecting must time out.
#[test]
fn connecting_times_out_when_the_listener_never_accepts() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let filled = path.clone();
    // Ends when the listener is closed.
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
fn shutdown_of_the_client_ends_the_connection() {
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
