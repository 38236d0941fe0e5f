//! Several threads on one image.

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, to_usize};
use holdfast_image::{OpenOptions, open_mut};

use super::MIB;
use super::work::{assert_is, create_with, over_base};
use crate::peer::{Lab, Random};

/// Threads write to different ranges, flush and read concurrently: no write is lost, and no thread blocks for ever.
#[test]
fn threads_read_one_image() {
    const THREADS: u64 = 4;
    const SHARE_BYTES: u64 = MIB + 3072;
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    let (_, base) = lab.raw("base.raw", THREADS * SHARE_BYTES, 50);
    create_with(&image, over_base(), base.len() as u64);
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    let mut disk = base;
    // The ranges end inside clusters: adjacent threads copy the same cluster from the backing file concurrently.
    std::thread::scope(|scope| {
        for (number, share) in (0..THREADS).zip(disk.chunks_mut(to_usize(SHARE_BYTES))) {
            let device = &device;
            scope.spawn(move || {
                let mut random = Random(number);
                let first = number * SHARE_BYTES;
                for _ in 0..150 {
                    let start = random.below(SHARE_BYTES);
                    let end = (start + 1 + random.below(90_000)).min(SHARE_BYTES);
                    let place = to_usize(start)..to_usize(end);
                    match random.below(8) {
                        0 => {
                            share[place].fill(0);
                            device.write_zeroes(first + start..first + end).unwrap();
                        }
                        1 => device.flush().unwrap(),
                        2 | 3 => {
                            let mut found = vec![0; place.len()];
                            device.read_at(&mut found, first + start).unwrap();
                            assert!(found == share[place], "a thread sees its own writes");
                        }
                        _ => {
                            random.fill(&mut share[place.clone()]);
                            device.write_at(&share[place], first + start).unwrap();
                        }
                    }
                }
            });
        }
    });
    device.flush().unwrap();
    drop(device);
    assert_is(&image, &disk, &lab, "threads");
}
