//! Standard input and output of disks and archives. Their other end may block for long; an interrupted job must end
//! nevertheless.

use std::fs::File;
use std::io::{IsTerminal as _, Read, Write};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};

use holdfast_engine::{Interrupt, Job};
use holdfast_host::StandardStream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::context::Context;
use crate::errors::Error;

/// How often a wait checks for an interruption.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};
/// The number of bytes that a pipe accepts at once if it accepts any.
const PIECE_BYTES: usize = 4096;

/// Standard output, as a file, without line buffering.
pub struct StandardOutput {
    file: File,
    way: Way,
    interrupt: Interrupt,
}

/// How much is written in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Everything: a file never blocks.
    AtOnce,
    /// As much as fits, without blocking.
    WithoutWaiting,
    /// Small pieces: when there is any room, such a write does not block.
    InPieces,
}

/// Returns an error if disk or archive data would go to a terminal, which would interpret parts of it as
/// commands.
pub fn refuse_terminal() -> Result<(), Error> {
    if std::io::stdout().is_terminal() {
        return Err(Error::usage(
            "the bytes of disks and archives are nothing for a terminal",
            "send them to a file or a pipe: > FILE",
        ));
    }
    Ok(())
}

impl StandardOutput {
    /// Standard output of this process.
    pub fn open(context: &Context) -> Result<Self, Error> {
        let file = std::io::stdout().as_fd().try_clone_to_owned();
        Self::of(File::from(file.map_err(Error::Stdout)?), context.interrupt()?).map_err(Error::Stdout)
    }

    fn of(file: File, interrupt: Interrupt) -> std::io::Result<Self> {
        let kind = file.metadata()?.file_type();
        let (file, way) = if kind.is_fifo() {
            // Reopened: another process with the same pipe must not be affected by the non-blocking mode.
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
            match File::options().write(true).custom_flags(nonblocking).open(path) {
                Ok(opened) => (opened, Way::WithoutWaiting),
                Err(_) => (file, Way::InPieces),
            }
        } else if kind.is_socket() || rustix::termios::isatty(&file) {
            (file, Way::InPieces)
        } else {
            (file, Way::AtOnce)
        };
        Ok(Self { file, way, interrupt })
    }
}

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let bytes = match self.way {
            Way::AtOnce => return self.file.write(bytes),
            Way::WithoutWaiting => bytes,
            Way::InPieces => &bytes[..bytes.len().min(PIECE_BYTES)],
        };
        loop {
            wait(&self.file, PollFlags::OUT, &self.interrupt)?;
            match self.file.write(bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// A file or pipe that is read; an interrupt ends a read that blocks.
pub struct PatientInput {
    file: File,
    interrupt: Interrupt,
    /// Remaining bytes: for a file, based on its size when it was opened.
    left_bytes: u64,
}

impl PatientInput {
    /// A stream, which ends at its end of file.
    pub fn new(file: File, interrupt: Interrupt) -> Self {
        Self {
            file,
            interrupt,
            left_bytes: 0,
        }
    }

    /// Standard input of this process. If it is closed, reading fails.
    pub fn of_standard_input(context: &Context) -> Result<Self, Error> {
        let file = std::io::stdin().as_fd().try_clone_to_owned();
        Ok(Self::new(File::from(file.map_err(Error::Stdin)?), context.interrupt()?))
    }

    /// A file that was just opened. It may grow while it is read; a file that is truncated meanwhile is an error.
    pub fn of_file(file: File, interrupt: Interrupt) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        let left_bytes = if metadata.is_file() { metadata.len() } else { 0 };
        Ok(Self {
            file,
            interrupt,
            left_bytes,
        })
    }
}

impl Read for PatientInput {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        wait(&self.file, PollFlags::IN, &self.interrupt)?;
        let count = self.file.read(buffer)?;
        if count == 0 && self.left_bytes > 0 && !buffer.is_empty() {
            return Err(std::io::Error::other("the file was cut off while it was read"));
        }
        self.left_bytes = self.left_bytes.saturating_sub(count as u64);
        Ok(count)
    }
}

/// Standard input, as a file.
pub fn standard_input() -> Result<File, Error> {
    open_input()?;
    let file = std::io::stdin().as_fd().try_clone_to_owned();
    Ok(File::from(file.map_err(Error::Stdin)?))
}

/// Returns an error if standard input is closed; otherwise it would be mistaken for empty input.
pub fn open_input() -> Result<(), Error> {
    if StandardStream::Input.was_closed() {
        return Err(Error::usage(
            "standard input is closed",
            "redirect a file to it with < FILE, or use a pipe; < /dev/null is an empty input",
        ));
    }
    Ok(())
}

/// Returns an error if the output cannot be delivered.
pub fn open_output() -> Result<(), Error> {
    if StandardStream::Output.was_closed() {
        return Err(Error::usage(
            "standard output is closed",
            "redirect it: > FILE, or > /dev/null",
        ));
    }
    Ok(())
}

/// The result of a job that writes to standard output. An interrupted job is reported as interrupted, not as an error
/// of its stream.
pub fn stopped_or<T>(done: holdfast_engine::Result<T>, job: Job<'_>) -> holdfast_engine::Result<T> {
    if done.is_err() {
        job.interrupt.check()?;
    }
    done
}

/// Waits until something can be read or written, or the job is interrupted.
fn wait(file: &File, flags: PollFlags, interrupt: &Interrupt) -> std::io::Result<()> {
    loop {
        interrupt.check().map_err(std::io::Error::other)?;
        match poll(&mut [PollFd::new(file, flags)], Some(&PATIENCE)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::fd::OwnedFd;

    use holdfast_engine::Interrupt;

    use super::{PatientInput, StandardOutput, Way};

    #[test]
    fn a_file_that_is_cut_off_while_it_is_read_is_an_error() {
        let make = || {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&[7; 1000]).unwrap();
            file
        };
        for (length, expected) in [(1000, Some(1000)), (2000, Some(2000)), (999, None), (0, None)] {
            let file = make();
            let mut input = PatientInput::of_file(file.reopen().unwrap(), Interrupt::new()).unwrap();
            input.read_exact(&mut [0; 10]).unwrap();
            file.as_file().set_len(length).unwrap();
            let read = input.read_to_end(&mut Vec::new());
            assert_eq!(read.ok().map(|count| count + 10), expected, "{length}");
            assert_eq!(input.read(&mut []).unwrap(), 0);
        }
    }

    /// All data arrives, for every size of write; and an interrupted job ends although the pipe has no
    /// reader.
    #[test]
    fn no_thread_waits_for_a_reader_that_stands_still() {
        let (reader, writer) = std::io::pipe().unwrap();
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let pairs: [(OwnedFd, OwnedFd, Way); 2] = [
            (reader.into(), writer.into(), Way::WithoutWaiting),
            (near.into(), far.into(), Way::InPieces),
        ];
        for (reader, writer, way) in pairs {
            let interrupt = Interrupt::new();
            let mut output = StandardOutput::of(File::from(writer), interrupt.clone()).unwrap();
            assert_eq!(output.way, way);
            let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| at.to_le_bytes()[1]).collect();
            let mut reader = File::from(reader);
            std::thread::scope(|scope| {
                let read = scope.spawn(|| {
                    let mut read = vec![0; bytes.len()];
                    reader.read_exact(&mut read).unwrap();
                    read
                });
                output.write_all(&bytes).unwrap();
                assert!(read.join().unwrap() == bytes);
            });
            std::thread::scope(|scope| {
                let stopped = scope.spawn(|| output.write_all(&bytes));
                interrupt.request();
                stopped.join().unwrap().unwrap_err();
            });
        }
        let output = StandardOutput::of(tempfile::tempfile().unwrap(), Interrupt::new()).unwrap();
        assert_eq!(output.way, Way::AtOnce);
    }
}
