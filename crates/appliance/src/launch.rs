//! The process that becomes QEMU: it receives open files, gives up rights, and dies with its parent.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::Stdio;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use rustix::process::{Resource, Rlimit, Signal, getppid, set_parent_process_death_signal, setrlimit};

use holdfast_host::command;

/// Most files of one launch: a kernel, an initrd, a channel and the disks.
pub(super) const FILE_COUNT_MAX: usize = 3 + 24;
/// Stands in an argument for the number that a received file has in this process.
pub(super) const FILE_MARK: &str = "@FILE";
const ORDER_BYTES_MAX: u64 = 1 << 20;
/// What QEMU needs beside the memory of its machine.
const OWN_BYTES_MAX: u64 = 4 << 30;

/// What to start.
pub(super) struct LaunchOrder<'a> {
    /// The process that starts it.
    pub(super) parent: u32,
    /// Memory of the machine.
    pub(super) memory_bytes: u64,
    /// The program, and its arguments, with [`FILE_MARK`] and a number for each file.
    pub(super) words: &'a [String],
    /// The open files.
    pub(super) files: &'a [BorrowedFd<'a>],
}

/// Sends an order to a process that runs [`become_machine`].
pub(super) fn send_order(stream: &UnixStream, order: &LaunchOrder<'_>) -> io::Result<()> {
    let head = [order.parent.to_string(), order.memory_bytes.to_string()];
    let text = head
        .iter()
        .chain(order.words)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join("\0");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILE_COUNT_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(order.files)) {
        return Err(io::Error::other("more disks than an appliance can have"));
    }
    let count = sendmsg(
        stream,
        &[IoSlice::new(text.as_bytes())],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    (&*stream).write_all(text.as_bytes().get(count..).unwrap_or_default())?;
    stream.shutdown(std::net::Shutdown::Write)
}

/// Receives an order on standard input, and becomes the program that it names. Returns only on an error.
///
/// The program is killed when the thread that started this process ends.
pub fn become_machine() -> io::Error {
    receive_and_start()
        .err()
        .unwrap_or_else(|| io::Error::other("no program"))
}

fn receive_and_start() -> io::Result<()> {
    // After exec, the signal stays.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::thread::set_no_new_privs(true)?;
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut first = vec![0; 64 << 10];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILE_COUNT_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        &stream,
        &mut [IoSliceMut::new(&mut first)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let files: Vec<OwnedFd> = control
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    first.truncate(received.bytes);
    (&stream).take(ORDER_BYTES_MAX).read_to_end(&mut first)?;
    let text = String::from_utf8(first).map_err(io::Error::other)?;
    let mut words = text.split('\0');
    let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
    let (Some(parent), Some(memory_bytes)) = (number(), number()) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    // A parent that ended before the signal was set sends none.
    if getppid().map(|pid| u64::from(pid.as_raw_nonzero().get().cast_unsigned())) != Some(parent) {
        return Err(io::Error::other("the parent has ended"));
    }
    for (resource, bytes) in [
        (Resource::Core, 0),
        (Resource::Fsize, 0),
        (Resource::As, memory_bytes + OWN_BYTES_MAX),
    ] {
        let limit = Rlimit {
            current: Some(bytes),
            maximum: Some(bytes),
        };
        setrlimit(resource, limit)?;
    }
    let mut words = words.map(|word| with_numbers(word, &files));
    let program = words.next().ok_or(io::ErrorKind::InvalidData)?;
    for file in &files {
        fcntl_setfd(file, FdFlags::empty())?;
    }
    let mut machine = command(program);
    machine
        .args(words)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(io::stderr())
        .current_dir("/");
    Err(machine.exec())
}

/// An argument with the numbers of files in place of their marks.
fn with_numbers(word: &str, files: &[OwnedFd]) -> String {
    let mut word = word.to_owned();
    for (number, file) in files.iter().enumerate().rev() {
        word = word.replace(&format!("{FILE_MARK}{number}@"), &file.as_raw_fd().to_string());
    }
    word
}
