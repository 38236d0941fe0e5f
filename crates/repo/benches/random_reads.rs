//! How long one reads at random places of an opened snapshot.
//!
//! `random_reads REPOSITORY PASSWORD_FILE PLACES LENGTH SOURCE` opens the newest snapshot as a device, reads LENGTH bytes
//! at each place (byte offsets, one per line of the file PLACES), compares them with the same bytes of the file SOURCE,
//! and prints one JSON object: milliseconds to open, and of each read.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the figures are its answer")]
#![allow(clippy::disallowed_methods, reason = "it measures time")]

use std::error::Error;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use holdfast_block::BlockDevice as _;
use holdfast_repo::key::{Credential, SystemRandomness};
use holdfast_repo::store::DirectoryStore;
use holdfast_repo::{Environment, Repository, SystemProcesses};

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .map(PathBuf::from)
        .collect();
    let [repository, password, places, length, source] = arguments.as_slice() else {
        println!("usage: random_reads REPOSITORY PASSWORD_FILE PLACES LENGTH SOURCE");
        return ExitCode::SUCCESS;
    };
    let length = length.to_string_lossy();
    match read_all([repository, password, places, source], &length) {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("random_reads: {error}");
            ExitCode::FAILURE
        }
    }
}

fn read_all([repository, password, places, source]: [&PathBuf; 4], length: &str) -> Result<String, Box<dyn Error>> {
    let password = fs::read_to_string(password)?;
    let password = password.lines().next().unwrap_or_default();
    let places: Vec<u64> = fs::read_to_string(places)?
        .lines()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let source = File::open(source)?;
    let mut expected = vec![0; length.parse()?];
    let mut read = expected.clone();

    let begun = Instant::now();
    let store = Arc::new(DirectoryStore::open(repository)?);
    let credential = Credential::Password(password.as_bytes());
    let opened = Repository::open(store, credential, environment())?;
    let (snapshots, _) = opened.repository.snapshots()?;
    let newest = snapshots
        .iter()
        .max_by_key(|snapshot| snapshot.time_ms)
        .ok_or("the repository has no snapshot")?;
    let device = opened.repository.device(newest.disk(None)?);
    let open_ms = begun.elapsed().as_secs_f64() * 1e3;

    let mut reads_ms = Vec::new();
    for place in places {
        let begun = Instant::now();
        device.read_at(&mut read, place)?;
        reads_ms.push(format!("{:.3}", begun.elapsed().as_secs_f64() * 1e3));
        source.read_exact_at(&mut expected, place)?;
        if read != expected {
            return Err(format!("{} bytes at {place} are not those of the source", read.len()).into());
        }
    }
    Ok(format!(
        "{{\"open_ms\": {open_ms:.3}, \"reads_ms\": [{}]}}",
        reads_ms.join(", ")
    ))
}

fn environment() -> Environment {
    Environment {
        randomness: Arc::new(SystemRandomness),
        processes: Arc::new(SystemProcesses),
        now_ms: Arc::new(|| {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            since.map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
        }),
    }
}
