//! What this machine can do: the single steps that every job is made of, alone and on all processors.
//!
//! `limits SAMPLE FOLDER` measures on the data of the file SAMPLE, writes for a moment into FOLDER, and prints one JSON
//! object: the name of each step with its bytes per second, on one thread and on all. `bench/run` holds the jobs against
//! them: no job can be faster than its slowest step.

#![allow(clippy::print_stdout, reason = "the figures are its answer")]
#![allow(clippy::disallowed_methods, reason = "it measures time")]

use std::fs::{self, File};
use std::hint::black_box;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use holdfast_repo::key::{Cipher, SealingKey, TAG_LENGTH};

/// Bytes of a frame before compression, as in a repository.
const FRAME_BYTES: usize = 3 << 20;
/// Bytes of the sample that are kept in memory.
const SAMPLE_BYTES: usize = 64 << 20;
/// Bytes of the file that is written.
const WRITE_BYTES: usize = 256 << 20;
/// Shortest time that is measured.
const MEASURED_TIME: Duration = Duration::from_millis(500);
/// zstd level of data, as in a repository.
const LEVEL: i32 = 3;

fn main() {
    let mut arguments = std::env::args_os()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .map(PathBuf::from);
    let (Some(sample), Some(folder)) = (arguments.next(), arguments.next()) else {
        println!("usage: limits SAMPLE FOLDER");
        return;
    };
    let frames = frames(&sample);
    let thread_count = thread::available_parallelism().map_or(1, usize::from);
    let steps: [(&str, [f64; 2]); 9] = [
        ("memcpy", both(thread_count, || memcpy(&frames))),
        ("read_page_cache", both(thread_count, || read_page_cache(&sample))),
        ("zero_test", both(thread_count, || zero_test(&frames))),
        ("blake3", both(thread_count, || blake3(&frames))),
        ("zstd_compress", both(thread_count, || compress(&frames))),
        ("zstd_decompress", both(thread_count, || decompress(&frames))),
        ("aes_256_gcm_seal", both(thread_count, || seal(&frames))),
        ("aes_256_gcm_open", both(thread_count, || open(&frames))),
        ("write_page_cache", both(1, || write(&folder, Durability::PageCache))),
    ];
    let synced = both(1, || write(&folder, Durability::Synced));
    let lines: Vec<String> = steps
        .iter()
        .chain([&("write_fsync", synced)])
        .map(|(name, [one, all])| format!("  \"{name}\": {{\"one\": {one:.0}, \"all\": {all:.0}}}"))
        .collect();
    println!("{{\n  \"threads\": {thread_count},\n{}\n}}", lines.join(",\n"));
}

/// The data of a sparse file in frames, holes and zero frames left out.
fn frames(path: &Path) -> Vec<Vec<u8>> {
    let mut file = File::open(path).expect("the sample can be opened");
    let length = file.metadata().expect("the sample has a length").len();
    let step = FRAME_BYTES as u64;
    // Spread over the whole file: its beginning alone is no picture of it.
    let count = (length / step).max(1);
    let stride = (count * step / SAMPLE_BYTES as u64).max(1);
    let mut frames = Vec::new();
    for number in (0..count).filter(|number| number % stride == 0) {
        let mut frame = Vec::with_capacity(FRAME_BYTES);
        file.seek(SeekFrom::Start(number * step))
            .expect("the sample can be sought");
        (&mut file)
            .take(step)
            .read_to_end(&mut frame)
            .expect("the sample can be read");
        if frame.iter().any(|byte| *byte != 0) {
            frames.push(frame);
        }
    }
    assert!(!frames.is_empty(), "the sample has no data");
    frames
}

/// Bytes per second of a step on one thread, and on all of them at once.
fn both<F: FnMut() -> usize>(thread_count: usize, step: impl Fn() -> F + Sync) -> [f64; 2] {
    [1, thread_count].map(|count| {
        let start = Barrier::new(count);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..count)
                .map(|_| {
                    scope.spawn(|| {
                        let mut step = step();
                        step();
                        start.wait();
                        rate(step)
                    })
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().expect("a step ends"))
                .sum()
        })
    })
}

#[allow(clippy::cast_precision_loss, reason = "figures for people")]
fn rate(mut step: impl FnMut() -> usize) -> f64 {
    let begun = Instant::now();
    let mut bytes = 0_usize;
    while begun.elapsed() < MEASURED_TIME {
        bytes += step();
    }
    bytes as f64 / begun.elapsed().as_secs_f64()
}

/// A step that is done to one frame after the other.
fn each(frames: &[Vec<u8>], mut work: impl FnMut(&[u8])) -> impl FnMut() -> usize {
    let mut turn = frames.iter().cycle();
    move || {
        let frame = turn.next().expect("a sample has frames");
        work(frame);
        frame.len()
    }
}

fn memcpy(frames: &[Vec<u8>]) -> impl FnMut() -> usize {
    let mut target = vec![0; FRAME_BYTES];
    each(frames, move |frame| {
        target[..frame.len()].copy_from_slice(frame);
        black_box(&mut target);
    })
}

fn read_page_cache(sample: &Path) -> impl FnMut() -> usize + use<> {
    let file = File::open(sample).expect("the sample can be opened");
    let length = file.metadata().expect("the sample has a length").len();
    let window = length.min(SAMPLE_BYTES as u64);
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    move || {
        let read = file.read_at(&mut buffer, at).expect("the sample can be read");
        at = (at + read as u64) % window;
        black_box(&mut buffer);
        read
    }
}

fn zero_test(frames: &[Vec<u8>]) -> impl FnMut() -> usize {
    // Of zeros: the one that cannot stop early.
    let zeros = vec![0_u8; FRAME_BYTES];
    each(frames, move |_| {
        let (words, _) = zeros.as_chunks::<8>();
        black_box(words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word)));
    })
}

/// Of whole frames, where every lane of the vector unit is busy.
fn blake3(frames: &[Vec<u8>]) -> impl FnMut() -> usize {
    let key = [7; 32];
    each(frames, move |frame| {
        black_box(blake3::keyed_hash(&key, frame));
    })
}

fn compress(frames: &[Vec<u8>]) -> impl FnMut() -> usize {
    let mut compressor = zstd::bulk::Compressor::new(LEVEL).expect("a legal level");
    let mut target = Vec::with_capacity(zstd::zstd_safe::compress_bound(FRAME_BYTES));
    each(frames, move |frame| {
        target.clear();
        compressor
            .compress_to_buffer(frame, &mut target)
            .expect("the buffer has room");
    })
}

fn decompress(frames: &[Vec<u8>]) -> impl FnMut() -> usize {
    let stored: Vec<Vec<u8>> = frames
        .iter()
        .map(|frame| zstd::bulk::compress(frame, LEVEL).expect("a frame compresses"))
        .collect();
    let mut decompressor = zstd::bulk::Decompressor::new().expect("memory");
    let mut target = Vec::with_capacity(FRAME_BYTES);
    let mut number = 0;
    move || {
        target.clear();
        let length = decompressor
            .decompress_to_buffer(&stored[number], &mut target)
            .expect("what was compressed decompresses");
        number = (number + 1) % stored.len();
        length
    }
}

fn seal(frames: &[Vec<u8>]) -> impl FnMut() -> usize {
    let key = SealingKey::new(Cipher::Aes256Gcm, &[7; 32]);
    let mut buffer = Vec::with_capacity(FRAME_BYTES + TAG_LENGTH);
    let mut nonce = 0_u64;
    each(frames, move |frame| {
        buffer.clear();
        buffer.extend_from_slice(frame);
        nonce += 1;
        key.seal(nonce_of(nonce), &[], &mut buffer);
    })
}

fn open(frames: &[Vec<u8>]) -> impl FnMut() -> usize {
    let key = SealingKey::new(Cipher::Aes256Gcm, &[7; 32]);
    let sealed: Vec<Vec<u8>> = frames
        .iter()
        .map(|frame| {
            let mut frame = frame.clone();
            key.seal([1; 12], &[], &mut frame);
            frame
        })
        .collect();
    let mut buffer = Vec::with_capacity(FRAME_BYTES + TAG_LENGTH);
    let mut number = 0;
    move || {
        buffer.clear();
        buffer.extend_from_slice(&sealed[number]);
        key.open([1; 12], &[], &mut buffer).expect("what was sealed opens");
        number = (number + 1) % sealed.len();
        buffer.len()
    }
}

fn nonce_of(number: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    nonce
}

/// When a written file counts as written.
#[derive(Clone, Copy)]
enum Durability {
    /// When the system has it.
    PageCache,
    /// When the disk has it.
    Synced,
}

fn write(folder: &Path, durability: Durability) -> impl FnMut() -> usize + use<> {
    let path = folder.join("limits.tmp");
    let bytes = vec![7; 1 << 20];
    move || {
        let mut file = File::create(&path).expect("a file can be made");
        for _ in 0..WRITE_BYTES / bytes.len() {
            file.write_all(&bytes).expect("a file can be written");
        }
        if let Durability::Synced = durability {
            file.sync_all().expect("a file can be synced");
        }
        fs::remove_file(&path).expect("a file can be removed");
        WRITE_BYTES
    }
}
