//! Many threads on few connections, and their errors when the server dies.

use std::sync::Barrier;

use holdfast_block::conformance::{Conformance, test_seed};
use holdfast_block::{BlockDevice, BlockDeviceMut, SeededRandom, to_usize};
use holdfast_serve::nbd::client::{Error, NbdDevice, NbdDeviceMut, NbdOptions};

use super::peer::Server;

const THREAD_COUNT: u64 = 24;

/// Small pieces, so that every thread has several requests in flight.
fn options(connection_count_max: usize) -> NbdOptions {
    NbdOptions {
        connection_count_max,
        piece_bytes: 64 << 10,
        in_flight_bytes: 512 << 10,
        ..NbdOptions::default()
    }
}

/// Every thread writes and reads its own part, in requests from tiny to many pieces.
fn use_concurrently(device: &NbdDeviceMut, part_bytes: u64, operation_count: u64) {
    let seed = test_seed();
    std::thread::scope(|scope| {
        for thread in 0..THREAD_COUNT {
            scope.spawn(move || {
                let mut random = SeededRandom::new(seed ^ thread);
                let base = thread * part_bytes;
                let mut model = vec![0; to_usize(part_bytes)];
                for _ in 0..operation_count {
                    let length_max = if random.one_in(3) { part_bytes } else { 5000 };
                    let range = random.range_within(part_bytes, length_max);
                    let part = &mut model[to_usize(range.start)..to_usize(range.end)];
                    if random.one_in(3) {
                        random.fill(part);
                        device.write_at(part, base + range.start).unwrap();
                    }
                    let mut buffer = vec![0xEE; part.len()];
                    device.read_at(&mut buffer, base + range.start).unwrap();
                    assert!(buffer == part, "thread {thread} reads other data at {range:?}");
                }
            });
        }
    });
    device.flush().unwrap();
}

#[test]
fn many_threads_share_one_connection() {
    const PART_BYTES: u64 = 1 << 20;
    let size = (THREAD_COUNT * PART_BYTES).to_string();
    let server = Server::nbdkit(&["memory", &size]);
    use_concurrently(
        &NbdDeviceMut::connect(&server.endpoint(), "", options(1)).unwrap(),
        PART_BYTES,
        40,
    );
}

#[test]
fn many_threads_share_several_connections() {
    const PART_BYTES: u64 = 1 << 20;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(THREAD_COUNT * PART_BYTES).unwrap();
    let server = Server::qemu_nbd(&["-f", "raw", file.path().to_str().unwrap()]);
    let device = NbdDeviceMut::connect(&server.endpoint(), "", options(3)).unwrap();
    assert_eq!(device.as_read().connection_count(), 3);
    use_concurrently(&device, PART_BYTES, 40);
}

/// Waiting and later requests fail because the connection is lost, until the device reconnects.
#[test]
fn all_requests_fail_when_the_server_dies() {
    let mut server = Server::nbdkit(&["--filter=delay", "pattern", "1G", "rdelay=30"]);
    let device = NbdDevice::connect(&server.endpoint(), "", options(1)).unwrap();
    let barrier = Barrier::new(9);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (device, barrier) = (&device, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let error = device.read_at(&mut vec![0; 200_000], thread << 24).unwrap_err();
                assert_lost(&error);
            });
        }
        barrier.wait();
        server.kill();
    });
    assert_lost(&device.read_at(&mut [0; 512], 0).unwrap_err());
    assert_lost(&device.extents(0..1 << 20, 10).unwrap_err());
    assert!(matches!(device.reconnect(), Err(Error::Connect { .. })));
    assert_lost(&device.read_at(&mut [0; 512], 0).unwrap_err());
}

fn assert_lost(error: &holdfast_block::Error) {
    let text = error.to_string();
    assert!(text.contains("the connection to") && text.contains("is lost"), "{text}");
}

/// The connection to one server ends; after a reconnect the device uses another server at the same address.
#[test]
fn a_new_server_takes_over_on_request() {
    let bytes = Conformance::new().pattern(1 << 20);
    let servers: Vec<Server> = [1, 1, 2]
        .iter()
        .map(|size| Server::nbdkit(&["pattern", &format!("{size}M")]))
        .collect();
    let sockets = std::sync::Mutex::new(
        servers
            .iter()
            .map(Server::socket)
            .collect::<std::collections::VecDeque<_>>(),
    );
    let connect = move |_| {
        let socket = sockets.lock().unwrap().pop_front().unwrap();
        let stream = std::os::unix::net::UnixStream::connect(socket)?;
        Ok(Box::new(stream) as Box<dyn holdfast_serve::nbd::client::Stream>)
    };
    let endpoint =
        holdfast_serve::nbd::client::Endpoint::Custom("three servers".to_owned(), std::sync::Arc::new(connect));
    let mut servers = servers.into_iter();
    let device = NbdDevice::connect(&endpoint, "", options(1)).unwrap();
    let mut buffer = vec![0; bytes.len()];
    device.read_at(&mut buffer, 0).unwrap();
    device.reconnect().unwrap();
    drop(servers.next());
    assert_lost(&device.read_at(&mut [0; 512], 0).unwrap_err());
    device.reconnect().unwrap();
    let mut again = vec![0; bytes.len()];
    device.read_at(&mut again, 0).unwrap();
    assert!(again == buffer, "the second server has the same pattern");
    drop(servers.next());
    assert_lost(&device.read_at(&mut [0; 512], 0).unwrap_err());
    let error = device.reconnect().unwrap_err();
    assert!(matches!(&error, Error::Changed { what: "the size", .. }), "{error}");
}

/// A server that answers in an hour: waiting requests are cancelled.
#[test]
fn a_stopped_device_cancels_waiting_requests() {
    let server = Server::nbdkit(&["--filter=delay", "memory", "1M", "delay-read=3600"]);
    let device = NbdDevice::connect(&server.endpoint(), "", options(2)).unwrap();
    let stopper = device.stopper();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| device.read_at(&mut [0; 4096], 0));
        // The request may be waiting, or about to be sent: it is cancelled in both cases.
        std::thread::yield_now();
        stopper.stop();
        assert!(reader.join().unwrap().is_err());
    });
    assert!(device.read_at(&mut [0; 4096], 0).is_err());
}
