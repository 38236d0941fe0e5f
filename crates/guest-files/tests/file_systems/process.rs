//! Readers on the other side of a connection.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use holdfast_block::{BlockDevice, Fault, FaultRule, FaultyDevice, FileDevice, IoMode, RequestKind};
use holdfast_guest_files::protocol::{ReaderProcess, RemoteFileSystem, serve};
use holdfast_guest_files::{Content, Error, FileSystem};

use crate::compare::{Attributes, assert_same};
use crate::place::{Place, system, text};
use crate::tree;

/// A thread in place of a process.
struct Connection(UnixStream);

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Connection {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.write(buffer)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl ReaderProcess for Connection {
    fn end(&mut self, error: &io::Error) -> String {
        format!("ended: {error}")
    }
}

fn connection() -> Connection {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || serve(Box::new(theirs.try_clone().unwrap()), Box::new(theirs), &[]));
    Connection(ours)
}

fn image() -> Place {
    let place = Place::new(64 << 20);
    let source = place.folder("source");
    tree::plain(&source);
    tree::sparse(&source);
    tree::unix(&source);
    system("mkfs.ext4", &["-q", "-F", "-d", text(&source), text(&place.image())]);
    place
}

#[test]
fn a_remote_file_system_is_the_same_file_system() {
    let place = image();
    let device = Arc::new(FileDevice::open(&place.image(), IoMode::Buffered).unwrap());
    let mut remote = RemoteFileSystem::open(Box::new(connection()), device, Content::Ext4).unwrap();
    assert_same(&mut remote, &place.path("source"), Attributes::None, &["lost+found"]);
    // An error of a visitor ends the listing and leaves the connection intact.
    let root = remote.root();
    let listed = remote.read_directory(root, &mut |_| Err(Error::LinkLoop));
    assert!(matches!(listed, Err(Error::LinkLoop)));
    assert!(remote.metadata(root).is_ok());
    assert!(matches!(remote.read_file(root, 0, 10), Err(Error::NotAFile)));
}

#[test]
fn an_error_of_the_disk_is_reported_as_what_it_is() {
    let place = image();
    let faulty = FaultyDevice::new(FileDevice::open(&place.image(), IoMode::Buffered).unwrap());
    faulty.add(FaultRule::every(RequestKind::Read, Fault::Io));
    let device: Arc<dyn BlockDevice> = Arc::new(faulty);
    let opened = RemoteFileSystem::open(Box::new(connection()), device, Content::Ext4);
    assert!(matches!(opened, Err(Error::Device(_))));
}

#[test]
fn a_reader_that_ends_or_lies_is_an_error() {
    let place = image();
    let device = || -> Arc<dyn BlockDevice> { Arc::new(FileDevice::open(&place.image(), IoMode::Buffered).unwrap()) };
    for answer in [
        &[][..],
        &[255, 255, 255, 255, 18],
        &[0, 0, 0, 0, 18],
        &[0, 0, 0, 0, 99],
        &[13, 0, 0, 0, 17, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, b'/'],
    ] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(answer).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let opened = RemoteFileSystem::open(Box::new(Connection(ours)), device(), Content::Ext4);
        assert!(
            matches!(opened, Err(Error::Reader(_) | Error::Damaged { .. })),
            "{answer:?}"
        );
    }
}
