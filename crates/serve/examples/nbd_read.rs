//! Reads an NBD export as fast as possible, to compare with other clients:
//!
//! ```text
//! cargo run --release --example nbd_read -- URI sequential|random|map THREADS CONNECTIONS PIECE_KIB
//! ```
//!
//! `sequential` reads the whole export, `random` reads 4 KiB at random offsets for 3 seconds, `map` queries all
//! extents. Prints one line: the operation and its duration.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a tool for those who work on the project, not for users"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, Clock, SeededRandom, SystemClock, for_each_extent, to_usize};
use holdfast_serve::nbd::client::{NbdDevice, NbdOptions};

const SEQUENTIAL_BYTES: u64 = 8 << 20;
const RANDOM_TIME: Duration = Duration::from_secs(3);

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().expect("URI MODE THREADS CONNECTIONS PIECE_KIB");
    let (uri, mode) = (next().parse().unwrap(), next());
    let thread_count: u64 = next().parse().unwrap();
    let options = NbdOptions {
        connection_count_max: next().parse().unwrap(),
        piece_bytes: next().parse::<u32>().unwrap() << 10,
        ..NbdOptions::default()
    };
    let clock = SystemClock::new();
    let device = NbdDevice::connect_to(&uri, options).unwrap();
    let began = clock.now();
    let (count, what) = match mode.as_str() {
        "sequential" => (sequential(&device, thread_count), "bytes"),
        "random" => (random(&device, thread_count, &clock), "reads"),
        "map" => (map(&device), "extents"),
        _ => panic!("{mode} is not sequential, random or map"),
    };
    let seconds = clock.now().saturating_sub(began).as_secs_f64();
    println!(
        "{count} {what} in {seconds:.4} s over {} connections",
        device.connection_count()
    );
}

/// Reads the device once from start to end, by several threads.
fn sequential(device: &NbdDevice, thread_count: u64) -> u64 {
    let position = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..thread_count {
            scope.spawn(|| {
                let mut buffer = vec![0; to_usize(SEQUENTIAL_BYTES)];
                loop {
                    let offset = position.fetch_add(SEQUENTIAL_BYTES, Ordering::Relaxed);
                    let Some(left) = device.size_bytes().checked_sub(offset).filter(|left| *left > 0) else {
                        break;
                    };
                    let length = to_usize(left.min(SEQUENTIAL_BYTES));
                    device.read_at(&mut buffer[..length], offset).unwrap();
                }
            });
        }
    });
    device.size_bytes()
}

fn random(device: &NbdDevice, thread_count: u64, clock: &SystemClock) -> u64 {
    let count = AtomicU64::new(0);
    let end = clock.now() + RANDOM_TIME;
    std::thread::scope(|scope| {
        for thread in 0..thread_count {
            let count = &count;
            scope.spawn(move || {
                let mut random = SeededRandom::new(thread);
                let mut buffer = [0; 4096];
                while clock.now() < end {
                    let offset = random.below(device.size_bytes() / 4096) * 4096;
                    device.read_at(&mut buffer, offset).unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    count.into_inner()
}

fn map(device: &NbdDevice) -> u64 {
    let mut count = 0;
    for_each_extent(device, 0..device.size_bytes(), |_| {
        count += 1;
        Ok(())
    })
    .unwrap();
    count
}
