//! A target in a folder, sources with a writer, and connections that break.

use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use holdfast_block::{
    BlockDevice, BlockDeviceMut as _, Clock as _, DirtyBitmap, MemoryDevice, SeededRandom, SystemClock, TrackedDevice,
};
use holdfast_engine::{Interrupt, Job, NoProgress};
use holdfast_image::{CreateOptions, Format, OpenOptions, create, open_mut};
use holdfast_live_copy::{
    ByteStream, Connector, CopyCompression, CopyObserver, CopyPurpose, CopyWarning, ExistingTarget, FreezeTrigger,
    Freezer, InterruptedCopy, LiveCopyReport, LiveCopyRequest, LiveSource, LocalConnector, ReceiveRequest,
    ReceiveTools, Result, Seed, SeedObserver, SendRate, SourceConsistency, copy_live,
};
use holdfast_repo::key::SystemRandomness;
use holdfast_transfer::{
    Capabilities, ConvergenceOptions, DiskId, Forecast, FrameDecoder, JournalState, Message, SessionId, ThrottlePolicy,
    TrackerCheck, Unconverged, UnitLayout,
};
use tempfile::TempDir;

pub(super) const UNIT_BYTES: u32 = 1 << 18;

pub(super) struct Rig {
    folder: TempDir,
    frozen_max: Duration,
    compression: CopyCompression,
    /// Bytes per second; none without a limit.
    rate: Option<NonZeroU64>,
}

/// Prints nothing.
struct Silent;

impl CopyObserver for Silent {
    fn round(&self, _forecast: &Forecast) {}
    fn warning(&self, _warning: CopyWarning) {}
}

impl Rig {
    pub(super) fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            frozen_max: Duration::from_secs(20),
            compression: CopyCompression::Adaptive,
            rate: None,
        }
    }

    pub(super) fn with_rate(self, bytes_per_s: u64) -> Self {
        let rate = NonZeroU64::new(bytes_per_s);
        Self { rate, ..self }
    }

    pub(super) fn with_frozen_max(self, frozen_max: Duration) -> Self {
        Self { frozen_max, ..self }
    }

    pub(super) fn target_path(&self) -> PathBuf {
        self.path("target")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn target(&self) -> Vec<u8> {
        std::fs::read(self.target_path()).unwrap()
    }

    pub(super) fn write_target(&self, bytes: &[u8]) {
        let mut file = std::fs::File::create(self.target_path()).unwrap();
        file.write_all(bytes).unwrap();
    }

    /// An image with the content of a device.
    pub(super) fn seed(&self, name: &str, format: Format, device: &MemoryDevice) -> Seed {
        let path = self.folder.path().join(name);
        let options = CreateOptions::new(format, device.size_bytes());
        create(&path, &options).unwrap();
        let image = open_mut(&path, &OpenOptions::default()).unwrap();
        image.write_at(&content_of(device), 0).unwrap();
        image.flush().unwrap();
        Seed { path, format: None }
    }

    /// Number of units that an interrupted copy holds, durably.
    pub(super) fn held_unit_count(&self) -> u64 {
        let journal = std::fs::read(self.journal_path()).unwrap();
        let state = JournalState::decode(&journal).unwrap().unwrap();
        state.units.len() as u64
    }

    fn journal_path(&self) -> PathBuf {
        self.folder.path().join(".target.holdfast-copy.journal")
    }

    /// The names of all files, sorted.
    pub(super) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    pub(super) fn local(&self) -> Arc<dyn Connector> {
        Arc::new(LocalConnector::new(self.tools()))
    }

    pub(super) fn tools(&self) -> ReceiveTools {
        ReceiveTools {
            clock: Arc::new(SystemClock::new()),
            randomness: Arc::new(SystemRandomness),
            journal_folder: self.path("journals"),
            program: "receiver".to_owned(),
        }
    }

    /// Connections that end after so many bytes to the receiver.
    pub(super) fn breaking(&self, bytes: u64) -> Arc<dyn Connector> {
        breaking(self.local(), bytes)
    }

    /// The same, but not before something is durable.
    pub(super) fn breaking_when_synced(&self, bytes: u64) -> Arc<dyn Connector> {
        self.breaking_when_synced_in(bytes, self.journal_path())
    }

    /// The same, for another journal.
    pub(super) fn breaking_when_synced_in(&self, bytes: u64, journal: PathBuf) -> Arc<dyn Connector> {
        Arc::new(Breaking {
            inner: self.local(),
            journal: Some(journal),
            bytes,
        })
    }

    /// Connections that carry so many bytes per second to the receiver.
    pub(super) fn slow(&self, bytes_per_s: u64) -> Arc<dyn Connector> {
        Arc::new(Slow {
            inner: self.local(),
            bytes_per_s,
        })
    }

    /// The same to a receiver that cannot decompress.
    pub(super) fn slow_and_older(&self, bytes_per_s: u64) -> Arc<dyn Connector> {
        let inner = self.slow(bytes_per_s);
        Arc::new(Older { inner })
    }

    pub(super) fn request(&self, device: &dyn BlockDevice) -> ReceiveRequest {
        ReceiveRequest {
            target: self.target_path(),
            size_bytes: device.size_bytes(),
            expected_bytes: 0,
            existing: ExistingTarget::Refuse,
            interrupted: InterruptedCopy::Continue,
            seed: None,
            format: None,
        }
    }

    pub(super) fn with_compression(self, compression: CopyCompression) -> Self {
        Self { compression, ..self }
    }

    pub(super) fn copy(&self, source: &dyn LiveSource, connector: Arc<dyn Connector>) -> Result<LiveCopyReport> {
        let request = self.request(source.device());
        self.copy_as(source, connector, request, Duration::from_secs(60))
    }

    pub(super) fn copy_as(
        &self,
        source: &dyn LiveSource,
        connector: Arc<dyn Connector>,
        receive: ReceiveRequest,
        retry_time: Duration,
    ) -> Result<LiveCopyReport> {
        self.copy_in(source, connector, receive, retry_time, SessionId([1; 16]))
    }

    pub(super) fn copy_in(
        &self,
        source: &dyn LiveSource,
        connector: Arc<dyn Connector>,
        receive: ReceiveRequest,
        retry_time: Duration,
        session: SessionId,
    ) -> Result<LiveCopyReport> {
        let request = LiveCopyRequest {
            source,
            layout: UnitLayout::new(source.device().size_bytes(), UNIT_BYTES).unwrap(),
            connector,
            receive,
            session,
            disk: DiskId([2; 16]),
            convergence: ConvergenceOptions {
                frozen_max: self.frozen_max,
                other_frozen: Duration::ZERO,
                throttle: ThrottlePolicy::Never,
                unconverged: Unconverged::GiveUp,
            },
            purpose: CopyPurpose::Duplicate,
            trigger: FreezeTrigger::WhenReady,
            director: None,
            compression: self.compression,
            rate: Arc::new(SendRate::at_most(self.rate, Arc::new(SystemClock::new()))),
            attempt_count_max: 3,
            retry_time,
            clock: Arc::new(SystemClock::new()),
            randomness: &SystemRandomness,
            program: "sender".to_owned(),
            observer: &Silent,
        };
        let job = Job {
            progress: &NoProgress,
            interrupt: &Interrupt::new(),
            clock: &SystemClock::new(),
            thread_count: 2,
        };
        copy_live(&request, job)
    }
}

pub(super) fn content_of(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(device.size_bytes()).unwrap()];
    device.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// A disk with a program that writes to it, and its own tracker.
pub(super) struct TrackedSource {
    pub(super) device: TrackedDevice<MemoryDevice>,
    /// Held for each write, and by a freeze.
    gate: RwLock<()>,
    pub(super) is_frozen: AtomicBool,
    pub(super) is_stopped: AtomicBool,
    pub(super) freeze_count: AtomicU64,
    pub(super) write_count: AtomicU64,
    /// The content when it was last frozen.
    pub(super) at_freeze: Mutex<Vec<u8>>,
    /// What the program writes at the beginning of the disk when it is asked to freeze.
    pub(super) last_write: Vec<u8>,
}

impl TrackedSource {
    pub(super) fn new(device: MemoryDevice) -> Self {
        Self {
            device: TrackedDevice::new(device, 4096).unwrap(),
            gate: RwLock::new(()),
            is_frozen: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
            freeze_count: AtomicU64::new(0),
            write_count: AtomicU64::new(0),
            at_freeze: Mutex::new(Vec::new()),
            last_write: Vec::new(),
        }
    }

    /// Writes all the time to a small part of the disk, which even a slow host sends faster than it is written.
    pub(super) fn write_until_stopped(&self, seed: u64) {
        let mut random = SeededRandom::new(seed);
        let reach = self.device.size_bytes() / 32;
        while !self.is_stopped.load(Ordering::SeqCst) {
            let open = self.gate.read().unwrap();
            if !self.is_frozen.load(Ordering::SeqCst) {
                let offset = random.below(reach / 4096) * 4096;
                self.device.write_at(&random.bytes(4096), offset).unwrap();
                self.write_count.fetch_add(1, Ordering::SeqCst);
            }
            drop(open);
            holdfast_block::Clock::sleep(&SystemClock::new(), Duration::from_millis(1));
        }
    }

    fn freeze_writer(&self) {
        let _closed = self.gate.write().unwrap();
        self.device.write_at(&self.last_write, 0).unwrap();
        self.is_frozen.store(true, Ordering::SeqCst);
        self.freeze_count.fetch_add(1, Ordering::SeqCst);
        *self.at_freeze.lock().unwrap() = content_of(&self.device);
    }

    fn thaw_writer(&self) {
        self.is_frozen.store(false, Ordering::SeqCst);
    }
}

impl LiveSource for TrackedSource {
    fn device(&self) -> &dyn BlockDevice {
        &self.device
    }
    fn granularity_bytes(&self) -> u32 {
        4096
    }
    fn start_tracking(&self) -> Result<()> {
        self.device.take();
        Ok(())
    }
    fn take_marks(&self) -> Result<DirtyBitmap> {
        Ok(self.device.take())
    }
    fn count_marks(&self) -> Result<u64> {
        Ok(self.device.peek().dirty_bytes())
    }
    fn check(&self) -> Result<TrackerCheck> {
        let dirty_bytes = self.count_marks()?;
        Ok(TrackerCheck::Valid { dirty_bytes })
    }
    fn freeze(&self) -> Result<()> {
        self.freeze_writer();
        Ok(())
    }
    fn thaw(&self) -> Result<()> {
        self.thaw_writer();
        Ok(())
    }
    fn throttle(&self, _dirty_bytes_per_s_max: u64) -> Result<bool> {
        Ok(false)
    }
    fn unthrottle(&self) -> Result<()> {
        Ok(())
    }
    fn stop_tracking(&self) -> Result<()> {
        Ok(())
    }
    fn consistency(&self) -> SourceConsistency {
        SourceConsistency::Crash
    }
}

/// Freezes the writer of a source, as a command of the user would.
pub(super) struct WriterFreezer<'a>(pub(super) &'a TrackedSource);

impl Freezer for WriterFreezer<'_> {
    fn freeze(&self) -> Result<()> {
        self.0.freeze_writer();
        Ok(())
    }
    fn thaw(&self) -> Result<()> {
        self.0.thaw_writer();
        Ok(())
    }
}

/// Connections of another connector that end after so many bytes to the receiver.
pub(super) fn breaking(inner: Arc<dyn Connector>, bytes: u64) -> Arc<dyn Connector> {
    Arc::new(Breaking {
        inner,
        journal: None,
        bytes,
    })
}

struct Breaking {
    inner: Arc<dyn Connector>,
    journal: Option<PathBuf>,
    bytes: u64,
}

impl Connector for Breaking {
    fn connect(&self, request: &ReceiveRequest, watch: &SeedObserver) -> Result<ByteStream> {
        let ByteStream { input, output, closer } = self.inner.connect(request, watch)?;
        let left = Arc::new(AtomicU64::new(self.bytes));
        Ok(ByteStream {
            input: Box::new(BreakingReader {
                input,
                left: Arc::clone(&left),
            }),
            output: Box::new(BreakingWriter {
                output,
                journal: self.journal.clone(),
                left,
            }),
            closer,
        })
    }
    fn place(&self) -> String {
        self.inner.place()
    }
}

struct Slow {
    inner: Arc<dyn Connector>,
    bytes_per_s: u64,
}

impl Connector for Slow {
    fn connect(&self, request: &ReceiveRequest, watch: &SeedObserver) -> Result<ByteStream> {
        let stream = self.inner.connect(request, watch)?;
        Ok(ByteStream {
            output: Box::new(SlowWriter {
                output: stream.output,
                bytes_per_s: self.bytes_per_s,
            }),
            ..stream
        })
    }
    fn place(&self) -> String {
        self.inner.place()
    }
}

/// A connection to a receiver that cannot decompress.
struct Older {
    inner: Arc<dyn Connector>,
}

impl Connector for Older {
    fn connect(&self, request: &ReceiveRequest, watch: &SeedObserver) -> Result<ByteStream> {
        let stream = self.inner.connect(request, watch)?;
        Ok(ByteStream {
            input: Box::new(OlderReader {
                input: stream.input,
                greeting: None,
            }),
            ..stream
        })
    }
    fn place(&self) -> String {
        self.inner.place()
    }
}

struct OlderReader {
    input: Box<dyn Read + Send>,
    /// What is left of the first frame.
    greeting: Option<std::io::Cursor<Vec<u8>>>,
}

impl OlderReader {
    fn read_greeting(&mut self) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; 16];
        self.input.read_exact(&mut bytes)?;
        let payload_bytes = u32::from_le_bytes(bytes[..4].try_into().unwrap());
        bytes.resize(16 + payload_bytes as usize + 4, 0);
        self.input.read_exact(&mut bytes[16..])?;
        let mut decoder = FrameDecoder::new();
        decoder.push(&bytes);
        let mut frame = decoder.next_frame().unwrap().unwrap();
        let Message::Hello(hello) = &mut frame.message else {
            panic!("{frame:?} is not a greeting");
        };
        hello.capabilities = hello.capabilities.without(Capabilities::COMPRESSION);
        let mut older = Vec::new();
        frame.encode(&mut older);
        Ok(older)
    }
}

impl Read for OlderReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.greeting.is_none() {
            self.greeting = Some(std::io::Cursor::new(self.read_greeting()?));
        }
        match self.greeting.as_mut().unwrap().read(buffer)? {
            0 => self.input.read(buffer),
            count => Ok(count),
        }
    }
}

struct SlowWriter {
    output: Box<dyn Write + Send>,
    bytes_per_s: u64,
}

impl Write for SlowWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let part = &bytes[..bytes.len().min(64 << 10)];
        let count = self.output.write(part)?;
        let nanos = count as u64 * 1_000_000_000 / self.bytes_per_s;
        SystemClock::new().sleep(Duration::from_nanos(nanos));
        Ok(count)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.output.flush()
    }
}

struct BreakingReader {
    input: Box<dyn Read + Send>,
    left: Arc<AtomicU64>,
}

impl Read for BreakingReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.input.read(buffer)?;
        if self.left.load(Ordering::SeqCst) == 0 {
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        Ok(count)
    }
}

struct BreakingWriter {
    output: Box<dyn Write + Send>,
    journal: Option<PathBuf>,
    left: Arc<AtomicU64>,
}

impl Write for BreakingWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let clock = SystemClock::new();
        // The receiver has time to make more durable.
        clock.sleep(Duration::from_millis(3));
        let left = usize::try_from(self.left.load(Ordering::SeqCst)).unwrap();
        if left == 0 {
            // The first entry says that the copy has begun.
            let is_unsynced = |journal: &PathBuf| !std::fs::metadata(journal).is_ok_and(|found| found.len() > 200);
            while self.journal.as_ref().is_some_and(is_unsynced) && clock.now() < Duration::from_secs(10) {
                clock.sleep(Duration::from_millis(1));
            }
            return Err(std::io::ErrorKind::BrokenPipe.into());
        }
        let count = self.output.write(&bytes[..bytes.len().min(left)])?;
        self.left.fetch_sub(count as u64, Ordering::SeqCst);
        Ok(count)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.output.flush()
    }
}
