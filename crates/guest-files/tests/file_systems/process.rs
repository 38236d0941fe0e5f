//! Readers on the other side of a connection.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use holdfast_block::{BlockDevice, Fault, FaultRule, FaultyDevice, FileDevice, IoMode, RequestKind};
use holdfast_guest_files::protocol::{
    Appliance, ApplianceVolume, ApplianceVolumes, ReaderProcess, RemoteFileSystem, ScanReport, ScanRequest, serve,
    serve_appliance,
};
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

/// Volumes in place of those of an appliance: each is the same file system.
struct Volumes(Place);

impl ApplianceVolumes for Volumes {
    fn scan(&mut self, request: &ScanRequest) -> holdfast_guest_files::Result<ScanReport> {
        let volumes = request.disks.iter().map(|disk| ApplianceVolume {
            name: format!("{disk}:whole"),
            content: Content::Ext4,
            label: None,
            size_bytes: 64 << 20,
            problem: None,
        });
        Ok(ScanReport {
            volumes: volumes.collect(),
            notes: vec![format!("{} passphrases", request.passphrases.len())],
        })
    }

    fn mount(&mut self, volume: u32) -> holdfast_guest_files::Result<Box<dyn FileSystem>> {
        if volume > 1 {
            return Err(Error::NotFound);
        }
        Ok(self.0.open())
    }
}

#[test]
fn volumes_of_an_appliance_share_its_connection() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let place = image();
    let source = place.path("source");
    let ended = std::thread::spawn(move || {
        let input = Box::new(theirs.try_clone().unwrap());
        serve_appliance(input, Box::new(theirs), &mut Volumes(place)).unwrap();
    });
    let appliance = Appliance::new(Box::new(Connection(ours)));
    let request = ScanRequest {
        disks: vec!["vda".to_owned(), "vdb".to_owned()],
        passphrases: vec![b"one".to_vec()],
    };
    let report = appliance.scan(&request).unwrap();
    let names: Vec<&str> = report.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(
        (names, &report.notes[..]),
        (vec!["vda:whole", "vdb:whole"], &["1 passphrases".to_owned()][..])
    );
    assert!(matches!(appliance.mount(2), Err(Error::NotFound)));
    let mut first = appliance.mount(0).unwrap();
    let mut second = appliance.mount(1).unwrap();
    let root = first.root();
    assert_eq!(first.metadata(root).unwrap(), second.metadata(root).unwrap());
    assert!(first.attributes(root).unwrap().is_empty());
    assert_same(&mut first, &source, Attributes::None, &["lost+found"]);
    drop((first, second, appliance));
    ended.join().unwrap();
}
