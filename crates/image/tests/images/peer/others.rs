//! Independent readers: dissect.hypervisor, libvhdi and libvmdk.
//!
//! `read.py` in this folder calls them, and works around their known defects.

#![expect(clippy::disallowed_methods, reason = "tests run the peers")]

use std::cell::RefCell;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use holdfast_image::Format;

use super::{Lab, path_text};

const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/peers/bin/python");
const READ: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/images/peer/read.py");

/// A program that reads images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    Dissect,
    Libvhdi,
    Libvmdk,
}

impl Reader {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dissect => "dissect",
            Self::Libvhdi => "libvhdi",
            Self::Libvmdk => "libvmdk",
        }
    }

    /// The readers of this format.
    pub(crate) fn of(format: Format) -> &'static [Self] {
        match format {
            Format::Vhd | Format::Vhdx => &[Self::Dissect, Self::Libvhdi],
            Format::Vmdk => &[Self::Dissect, Self::Libvmdk],
            Format::Vdi | Format::Qcow2 | Format::Parallels => &[Self::Dissect],
            _ => &[],
        }
    }

    /// The disk of a chain of images, the top first; or the error of the reader.
    pub(crate) fn read(self, format: Format, chain: &[&Path], lab: &Lab) -> Result<Vec<u8>, String> {
        self.run(format, chain, lab, "all").map(|(_, bytes)| bytes)
    }

    /// The size of the disk, and its bytes from `offset` on.
    pub(crate) fn read_at(
        self,
        format: Format,
        image: &Path,
        lab: &Lab,
        offset: u64,
        length: usize,
    ) -> Result<(u64, Vec<u8>), String> {
        self.run(format, &[image], lab, &format!("{offset}:{length}"))
    }

    fn run(self, format: Format, chain: &[&Path], lab: &Lab, place: &str) -> Result<(u64, Vec<u8>), String> {
        let target = lab.path("read-by-peer");
        let mut request = vec![self.name(), format.name(), path_text(&target), place];
        request.extend(chain.iter().map(|image| path_text(image)));
        let answer = READERS.with_borrow_mut(|readers| readers.get_or_insert_with(Readers::start).ask(&request));
        match answer.trim_end().split_once('\t') {
            Some(("size", size)) => Ok((size.parse().expect("a size"), fs::read(&target).unwrap())),
            Some(("error", error)) => Err(error.to_owned()),
            _ => panic!("read.py answers {answer:?}"),
        }
    }
}

thread_local! {
    /// The readers of this test: libtest runs each test in a thread of its own.
    static READERS: RefCell<Option<Readers>> = const { RefCell::new(None) };
}

/// A process of `read.py`.
struct Readers {
    process: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Readers {
    fn start() -> Self {
        let started = Command::new(PYTHON)
            .arg(READ)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut process =
            started.unwrap_or_else(|error| panic!("these tests need {PYTHON}, which scripts/setup makes: {error}"));
        Self {
            requests: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            process,
        }
    }

    fn ask(&mut self, request: &[&str]) -> String {
        let line = request.join("\t") + "\n";
        self.requests.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        answer
    }
}

impl Drop for Readers {
    /// The process ends with its input.
    fn drop(&mut self) {
        drop(self.requests.take());
        self.process.wait().ok();
    }
}
