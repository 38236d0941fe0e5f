//! QEMU as the peer: each side must read every image that the other one writes.

#![expect(clippy::disallowed_methods, reason = "tests run the peer")]

pub(crate) mod others;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use holdfast_block::{BlockDevice, BlockDeviceMut as _, ExtentKind, for_each_extent, to_usize};
use holdfast_image::{OpenOptions, check, open_mut};
use tempfile::TempDir;

fn run(program: &str, arguments: &[&str]) -> Output {
    run_in(Path::new("."), program, arguments)
}

fn run_in(directory: &Path, program: &str, arguments: &[&str]) -> Output {
    match Command::new(program).args(arguments).current_dir(directory).output() {
        Ok(output) => output,
        Err(error) => panic!("these tests need {program} (Debian package qemu-utils): {error}"),
    }
}

/// Runs qemu-img, which must succeed; returns its output.
pub(crate) fn qemu_img(arguments: &[&str]) -> String {
    qemu_img_in(Path::new("."), arguments)
}

fn qemu_img_in(directory: &Path, arguments: &[&str]) -> String {
    let mut output = run_in(directory, "qemu-img", arguments);
    // QEMU measures the speed of key derivation, and fails if the CPU clock of the host did not advance meanwhile.
    for _ in 0..20 {
        if !String::from_utf8_lossy(&output.stderr).contains("Unable to get accurate CPU usage") {
            break;
        }
        output = run_in(directory, "qemu-img", arguments);
    }
    assert!(
        output.status.success(),
        "qemu-img {arguments:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs qemu-io commands on an image; they must succeed.
pub(crate) fn qemu_io(image: &Path, commands: &[&str]) {
    qemu_io_as("qcow2", image, commands);
}

/// The same with a given format.
pub(crate) fn qemu_io_as(format: &str, image: &Path, commands: &[&str]) {
    let mut arguments = vec!["-f", format];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(path_text(image));
    let output = run("qemu-io", &arguments);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !printed.contains("rror"),
        "qemu-io {arguments:?}: {printed}"
    );
}

/// Corruptions and leaks according to `qemu-img check`.
pub(crate) fn qemu_check(image: &Path) -> (u64, u64) {
    let output = run("qemu-img", &["check", "-f", "qcow2", "--output=json", path_text(image)]);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        matches!(output.status.code(), Some(0 | 2 | 3)),
        "qemu-img check: {printed}{errors}"
    );
    (number_in(&printed, "corruptions"), number_in(&printed, "leaks"))
}

/// The number after `"key":` in JSON text; 0 if it is missing.
fn number_in(json: &str, key: &str) -> u64 {
    let Some((_, rest)) = json.split_once(&format!("\"{key}\":")) else {
        return 0;
    };
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("digits")
}

pub(crate) fn path_text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

/// A small random generator; a failure can be replayed by its seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
    }
}

/// A disk with random bytes, text and zeroes in pieces of all sizes.
pub(crate) fn sample_disk(size_bytes: u64, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut disk = vec![0; to_usize(size_bytes)];
    let mut at = 0;
    while at < disk.len() {
        let length = 512 << random.below(9);
        let end = (at + length).min(disk.len());
        match random.below(3) {
            0 => {}
            1 => random.fill(&mut disk[at..end]),
            _ => {
                let letter = b'a' + u8::try_from(random.below(26)).unwrap();
                for (number, byte) in disk[at..end].iter_mut().enumerate() {
                    *byte = if number % 7 == 0 { letter } else { b'x' };
                }
            }
        }
        at = end;
    }
    disk
}

/// Asserts that `device` reads as `expected`, as a whole and in pieces, and that its extents are correct.
pub(crate) fn assert_reads_as(device: &dyn BlockDevice, expected: &[u8], what: &str) {
    assert_eq!(device.size_bytes(), expected.len() as u64, "{what}");
    let mut found = vec![0xee; expected.len()];
    device
        .read_at(&mut found, 0)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    if found != expected {
        let at = found.iter().zip(expected).position(|(left, right)| left != right);
        panic!("{what}: differs at {at:?}");
    }
    let mut random = Random(1);
    for _ in 0..50 {
        let start = random.below(expected.len() as u64);
        let length = random.below(100_000).min(expected.len() as u64 - start);
        let mut piece = vec![0xee; to_usize(length)];
        device.read_at(&mut piece, start).unwrap();
        assert!(
            piece == expected[to_usize(start)..to_usize(start + length)],
            "{what}: {length} bytes at {start}"
        );
    }
    let mut end = 0;
    for_each_extent(device, 0..device.size_bytes(), |extent| {
        assert_eq!(extent.offset, end);
        end = extent.end();
        if extent.kind != ExtentKind::Data {
            let bytes = &expected[to_usize(extent.offset)..to_usize(extent.end())];
            assert!(bytes.iter().all(|byte| *byte == 0), "{what}: {extent:?} is not zero");
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(end, device.size_bytes());
}

/// Makes random changes to the image and to a vector.
pub(crate) fn work(image: &Path, disk: &mut [u8], random: &mut Random, operations: u32) {
    let device = open_mut(image, &OpenOptions::default()).unwrap();
    assert_eq!(device.size_bytes(), disk.len() as u64);
    for _ in 0..operations {
        let start = random.below(disk.len() as u64);
        let longest = [512, 70_000, 600_000][to_usize(random.below(3))];
        let (mut start, mut end) = (start, (start + 1 + random.below(longest)).min(disk.len() as u64));
        if random.below(2) == 0 {
            start = start / 4096 * 4096;
            end = end.next_multiple_of(4096).min(disk.len() as u64);
        }
        let place = to_usize(start)..to_usize(end);
        match random.below(10) {
            0..6 => {
                random.fill(&mut disk[place.clone()]);
                device.write_at(&disk[place], start).unwrap();
            }
            6 | 7 => {
                disk[place].fill(0);
                device.write_zeroes(start..end).unwrap();
            }
            8 => {
                device.trim(start..end).unwrap();
                let mut found = vec![0; place.len()];
                device.read_at(&mut found, start).unwrap();
                for (now, before) in found.iter().zip(&disk[place.clone()]) {
                    assert!(now == before || *now == 0, "trimmed bytes are as before, or zero");
                }
                disk[place].copy_from_slice(&found);
            }
            _ => device.flush().unwrap(),
        }
    }
    assert_reads_as(&device, disk, "before the flush");
    device.flush().unwrap();
    assert_reads_as(&device, disk, "after the flush");
}

/// A temporary folder for one test.
pub(crate) struct Lab {
    directory: TempDir,
}

impl Lab {
    pub(crate) fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs qemu-img with these arguments in this folder; it must succeed.
    pub(crate) fn qemu_img(&self, words: &str) -> String {
        let words: Vec<&str> = words.split_whitespace().collect();
        qemu_img_in(self.directory.path(), &words)
    }

    /// A raw file with sample content.
    pub(crate) fn raw(&self, name: &str, size_bytes: u64, seed: u64) -> (PathBuf, Vec<u8>) {
        let disk = sample_disk(size_bytes, seed);
        let path = self.path(name);
        fs::File::create(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&fs::OpenOptions::new().write(true).open(&path).unwrap(), &disk, 0)
            .unwrap();
        (path, disk)
    }
}

/// Asserts that our check finds no problem.
pub(crate) fn assert_clean(image: &Path) {
    let report = check(image, &OpenOptions::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// The number of corruptions that our check finds.
pub(crate) fn corruptions(image: &Path) -> u64 {
    check(image, &OpenOptions::default()).unwrap().corruption_count
}

/// The disk as QEMU reads it.
pub(crate) fn flatten(image: &Path, lab: &Lab) -> Vec<u8> {
    let raw = lab.path("flat.raw");
    qemu_img(&["convert", "-O", "raw", path_text(image), path_text(&raw)]);
    fs::read(raw).unwrap()
}

/// Replaces the content of a file.
pub(crate) fn overwrite(path: &Path, bytes: &[u8]) {
    let file = fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .open(path)
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).unwrap();
}

/// Runs qemu-img, which must fail; returns its error output.
pub(crate) fn qemu_img_fails(arguments: &[&str]) -> String {
    let output = run("qemu-img", arguments);
    assert!(!output.status.success(), "qemu-img {arguments:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A qemu-io that keeps an image open until it is dropped.
pub(crate) struct QemuIo(std::process::Child);

impl QemuIo {
    pub(crate) fn hold(image: &Path) -> Self {
        use std::io::Write as _;
        use std::process::Stdio;
        let before = fs::metadata(image).unwrap().len();
        let mut child = Command::new("qemu-io")
            .args(["-f", "qcow2", path_text(image)])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // qemu-io runs commands only after opening the image: the result of this write shows that it did.
        child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(b"write -P 1 0 512\nflush\n")
            .unwrap();
        while fs::metadata(image).unwrap().len() == before {
            std::thread::yield_now();
        }
        Self(child)
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}
