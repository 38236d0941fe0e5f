//! Limits: clients that are slow, idle, too many or too greedy do not block the others.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use holdfast_block::MemoryDevice;
use holdfast_serve::nbd::{FixedExports, Limits, Listener};
use rustix::net::{AddressFamily, SocketType};

use super::{SIZE, writable};
use crate::raw::{Raw, Style};
use crate::servers::{OurServer, wait_for};

fn impatient() -> Limits {
    Limits {
        connection_count_max: 2,
        handshake: Duration::from_millis(80),
        idle: Some(Duration::from_millis(80)),
        stall: Duration::from_millis(80),
        ..Limits::default()
    }
}

#[test]
fn slow_and_idle_clients_are_disconnected() {
    let server = OurServer::start_with(FixedExports::new([writable(MemoryDevice::new(64 << 20))]), impatient());
    let mut silent = Raw::connect(&server.socket());
    assert_eq!(silent.take(1), None);
    server.wait_for_event(&["Disconnected", "the handshake took too long"]);
    let mut idle = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
    assert_eq!(idle.take(1), None);
    server.wait_for_event(&["Disconnected", "idle for too long"]);
    let mut half = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
    let header = half.header(0, 1, 1, 0, 4096);
    half.say(&header);
    assert_eq!(half.take(1), None);
    server.wait_for_event(&["Disconnected", "the rest of a request"]);
    // Never reads its replies, which are larger than any socket buffer.
    let mut greedy = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
    let header = greedy.header(0, 0, 1, 0, 32 << 20);
    greedy.say(&header);
    let inner = server.inner.as_ref().unwrap();
    wait_for("the greedy client to be disconnected", || inner.connection_count() == 0);
}

#[test]
fn the_number_of_connections_is_limited() {
    let limits = Limits {
        connection_count_max: 2,
        ..Limits::default()
    };
    let server = OurServer::start_with(FixedExports::new([writable(MemoryDevice::new(SIZE))]), limits);
    let first = Raw::connect(&server.socket());
    let _second = Raw::connect(&server.socket());
    let mut third = std::os::unix::net::UnixStream::connect(server.socket()).unwrap();
    let read = std::io::Read::read(&mut third, &mut [0; 1]);
    assert!(matches!(read, Ok(0)), "the connection was not closed: {read:?}");
    server.wait_for_event(&["TooMany"]);
    drop(first);
    let inner = server.inner.as_ref().unwrap();
    wait_for("a place", || inner.connection_count() < 2);
    Raw::connect(&server.socket());
}

/// Idle clients in the handshake must not exclude a legitimate client.
#[test]
fn silent_clients_are_replaced_by_new_ones() {
    let limits = Limits {
        connection_count_max: 8,
        handshake_count_max: 4,
        ..Limits::default()
    };
    let server = OurServer::start_with(FixedExports::new([writable(MemoryDevice::new(SIZE))]), limits);
    let silent: Vec<_> = (0..20)
        .map(|_| std::os::unix::net::UnixStream::connect(server.socket()).unwrap())
        .collect();
    let _honest: Vec<_> = (0..4)
        .map(|_| Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap())
        .collect();
    drop(silent);
}

/// Connects over the network from this loopback address.
fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((from, 0))).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    TcpStream::from(socket)
}

/// One address cannot use up the connections of others. Local clients do not count for any address.
#[test]
fn connections_of_one_address_are_limited() {
    const GREETING_BYTES: usize = 18;
    let limits = Limits {
        connection_count_max: 6,
        address_connection_count_max: 2,
        ..Limits::default()
    };
    let mut server = OurServer::start_with(FixedExports::new([writable(MemoryDevice::new(SIZE))]), limits);
    let listener = Listener::tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let place = listener.tcp_address().unwrap();
    server.inner.as_mut().unwrap().listen(listener).unwrap();
    let greet = |from| {
        let mut client = connect_from(from, place);
        let greeted = client.read_exact(&mut [0; GREETING_BYTES]);
        greeted.is_ok().then_some(client)
    };
    let (greedy, other) = ([127, 0, 0, 1], [127, 0, 0, 2]);
    let first: Vec<_> = (0..2).map(|_| greet(greedy).unwrap()).collect();
    assert!(greet(greedy).is_none());
    server.wait_for_event(&["TooMany"]);
    let _others: Vec<_> = (0..2).map(|_| greet(other).unwrap()).collect();
    Raw::connect(&server.socket());
    drop(first);
    let inner = server.inner.as_ref().unwrap();
    wait_for("a place", || inner.connection_count() <= 2);
    assert!(greet(greedy).is_some());
}

/// The memory for replies that clients do not read is bounded, and other clients continue.
#[test]
fn the_memory_of_all_clients_together_is_bounded() {
    let limits = Limits {
        memory_bytes_max: 4 << 20,
        ..Limits::default()
    };
    let size = 64 << 20;
    let server = OurServer::start_with(FixedExports::new([writable(MemoryDevice::new(size))]), limits);
    let _greedy: Vec<_> = (0..8)
        .map(|_| {
            let mut greedy = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
            for cookie in 0..8 {
                let header = greedy.header(0, 0, cookie, 0, 4 << 20);
                greedy.say(&header);
            }
            greedy
        })
        .collect();
    // A small request does not depend on the shared budget.
    let mut modest = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
    assert_eq!(modest.read(0, 4096).len(), 4096);
}
