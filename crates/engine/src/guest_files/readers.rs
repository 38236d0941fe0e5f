//! What reads the volumes of a guest: a process without rights, or the appliance.

use std::io;
use std::sync::Arc;

use holdfast_block::BlockDevice;
use holdfast_guest_files::protocol::{ReaderProcess, RemoteFileSystem};
use holdfast_guest_files::{Content, DiskSource, Error as ReadError, FileSystem, Volume};
use holdfast_host::ConfinedReader;

use super::appliance::ApplianceOptions;
use super::restart::RestartedFileSystem;

/// Starts the process that reads file systems.
pub type ReaderLauncher<'a> = &'a dyn Fn() -> io::Result<ConfinedReader>;

/// Which reader is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReaderChoice {
    /// A process, and the appliance for what that cannot read.
    #[default]
    Auto,
    /// A process only.
    Process,
    /// The appliance only.
    Appliance,
}

/// How file systems are read.
pub struct ReaderOptions<'a> {
    /// Which reader.
    pub choice: ReaderChoice,
    /// Starts a process that reads.
    pub launch: ReaderLauncher<'static>,
    /// How an appliance is made.
    pub appliance: ApplianceOptions<'a>,
}

/// What reads a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReaderKind {
    /// A process without rights.
    Process,
    /// A virtual machine with a kernel of Linux.
    Appliance,
}

/// A volume, and what can read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestVolume {
    /// The volume. One that only the appliance sees has no segments.
    pub volume: Volume,
    /// Whether it was found by this process.
    pub(super) is_local: bool,
    /// Its number in the appliance.
    pub(super) number: Option<u32>,
    /// Why the appliance cannot read it.
    pub(super) problem: Option<String>,
}

impl GuestVolume {
    /// What would read it; none if nothing can.
    pub fn reader(&self, choice: ReaderChoice) -> Option<ReaderKind> {
        if choice != ReaderChoice::Appliance && self.is_for_process() {
            return Some(ReaderKind::Process);
        }
        (choice != ReaderChoice::Process && self.is_for_appliance()).then_some(ReaderKind::Appliance)
    }

    /// Why nothing reads it, as far as it is known.
    pub fn reason(&self) -> Option<String> {
        self.problem
            .clone()
            .or_else(|| self.volume.unreadable.as_ref().map(|reason| reason.0.clone()))
    }

    pub(super) fn is_for_process(&self) -> bool {
        self.is_local && self.volume.unreadable.is_none() && self.volume.content.is_readable()
    }

    /// Members of arrays and groups are not volumes of files; what is assembled of them is.
    pub(super) fn is_for_appliance(&self) -> bool {
        let is_member = matches!(self.volume.content, Content::MdMember | Content::LvmMember);
        let is_possible = self.volume.unreadable.is_some() && self.is_local || self.volume.content.is_for_appliance();
        self.problem.is_none() && is_possible && !is_member
    }
}

impl ReaderOptions<'_> {
    /// Opens the file system of a volume in a process of its own.
    pub(super) fn open_in_process(
        &self,
        volume: &Volume,
        disks: &[DiskSource],
    ) -> std::result::Result<Box<dyn FileSystem>, ReadError> {
        let launch = self.launch;
        let device = Arc::new(volume.device(disks));
        let content = volume.content;
        let open = move || {
            let process = launch().map_err(|error| ReadError::Reader(format!("does not start: {error}")))?;
            let device: Arc<dyn BlockDevice> = Arc::clone(&device) as _;
            let opened = RemoteFileSystem::open(Box::new(GuestReader(process)), device, content)?;
            Ok(Box::new(opened) as Box<dyn FileSystem>)
        };
        Ok(Box::new(RestartedFileSystem::open(Box::new(open))?))
    }
}

/// The process that reads a file system.
struct GuestReader(ConfinedReader);

impl io::Read for GuestReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl io::Write for GuestReader {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl ReaderProcess for GuestReader {
    fn end(&mut self, error: &io::Error) -> String {
        match (error.kind(), self.0.end()) {
            (io::ErrorKind::TimedOut, _) => "does not answer".to_owned(),
            (_, Some(ended)) => ended,
            (_, None) => format!("ended: {error}"),
        }
    }
}
