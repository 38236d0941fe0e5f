//! Proves that snapshots can be read, and optionally that a disk equals a device.
//!
//! Verify reads a repository like a restore: from the manifest through the map to the frames. Every page of every map
//! is read; pieces are collected in batches sorted by frame, so that a frame that is shared by several disks, or by
//! several positions of a disk, is read once. The frames and pages that were read are recorded exactly, in at most 24
//! MiB; others are checked again when they recur. Damage does not stop it, and nothing is written: `scrub` reads the
//! rest of the repository, and `repair` repairs it.

mod request;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Receiver, Sender, bounded};
use holdfast_block::{BlockDevice, to_usize};

pub use crate::check::difference::Compare;
use crate::check::difference::{Differing, report_differing};
use crate::check::finding::{DamagedPart, FindingKind, Findings};
use crate::check::impact::add_impact;
use crate::check::map_walk::{MapItem, Verdict, Visitor, walk_disk};
use crate::check::scrub::check_relocations;
use crate::error::{Error, Result};
use crate::format::fingerprint::FingerprintKeys;
use crate::format::manifest::{DiskContent, DiskRecord, Manifest, snapshot_name};
use crate::format::pack::{FrameContent, pack_name};
use crate::gc::loss::LostSearch;
use crate::progress::job::JobProgress;
use crate::read::frame_check::{Depth, check_frame};
use crate::read::frame_plan::{PlannedPiece, moved_pieces};
use crate::read::frame_set::{FrameSet, PageSet};
use crate::repository::Repository;
use crate::repository::packs::FrameBuffers;
use crate::store::StoreError;
pub use request::{Selection, VerifyDepth, VerifyReport, VerifyRequest};

/// Memory for the frames that were seen: about 12 TiB of stored data.
const SEEN_BYTES_MAX: usize = 10 << 20;

/// Pieces that are sorted together: 2.5 MiB.
const BATCH_PIECE_COUNT: usize = 1 << 16;

impl Repository {
    /// Verifies snapshots. Damage is part of the report; an error means that the verification could not
    /// continue.
    pub fn verify(&self, request: &VerifyRequest<'_>, progress: &dyn JobProgress) -> Result<VerifyReport> {
        self.refresh()?;
        let mut findings = Findings::default();
        check_relocations(&self.vault, &mut findings)?;
        let mut manifests = self.selected(request, &mut findings)?;
        let mut report = VerifyReport::default();
        report.count(&manifests);
        progress.total(report.logical_bytes);
        let job = VerifyJob {
            repository: self,
            keys: self.vault.fingerprint_keys(),
            depth: request.depth,
            progress,
            findings: Mutex::new(findings),
            seen: Mutex::new(FrameSet::new(SEEN_BYTES_MAX)),
            differing: Mutex::default(),
            failure: Mutex::new(None),
            frame_count: AtomicU64::new(0),
            decoded_bytes: AtomicU64::new(0),
        };
        job.run(&manifests, request)?;
        report.frame_count = job.frame_count.into_inner();
        report.decoded_bytes = job.decoded_bytes.into_inner();
        let mut findings = job.findings.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(compare) = &request.compare {
            let differing = job.differing.into_inner().unwrap_or_else(PoisonError::into_inner);
            let manifest = self.snapshot(compare.snapshot)?;
            report.compared_bytes = report_differing(&manifest, compare, differing, &mut findings)?;
        }
        for (pack, flaw) in self.packs.flaws() {
            if !findings.has_place(DamagedPart::Pack(pack)) {
                findings.object(&pack_name(pack), flaw)?;
            }
        }
        let mut removed = Vec::new();
        if findings.has_missing_places() {
            removed = self.exclude_removed(&mut manifests)?;
            report.count(&manifests);
        }
        if let (Selection::Some(_), Some(id)) = (&request.snapshots, removed.first()) {
            return Err(Error::NoSnapshot { id: *id });
        }
        let needed = add_impact(&self.packs, &manifests, &mut findings)?;
        if !removed.is_empty() {
            findings.retract_missing(&needed);
        }
        (report.findings, report.unlisted_finding_count) = findings.finish();
        Ok(report)
    }

    /// The selected manifests.
    fn selected(&self, request: &VerifyRequest<'_>, findings: &mut Findings) -> Result<Vec<Manifest>> {
        let mut manifests = match &request.snapshots {
            Selection::All => {
                let (manifests, errors) = self.snapshots()?;
                for error in errors {
                    findings.error(error)?;
                }
                for lost in self.lost_snapshots(&manifests, LostSearch::Thorough)? {
                    let name = snapshot_name(lost.id);
                    findings.push(&name, None, FindingKind::Missing, lost.to_string());
                }
                manifests
            }
            Selection::Some(ids) => {
                let mut manifests = Vec::new();
                for id in ids {
                    match self.snapshot(*id) {
                        Ok(manifest) => manifests.push(manifest),
                        Err(error @ Error::NoSnapshot { .. }) => return Err(error),
                        Err(error) => findings.object(&snapshot_name(*id), error)?,
                    }
                }
                manifests
            }
        };
        if let Some(compare) = &request.compare
            && !manifests.iter().any(|manifest| manifest.id == compare.snapshot)
        {
            manifests.push(self.snapshot(compare.snapshot)?);
        }
        Ok(manifests)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct VerifyJob<'a> {
    repository: &'a Repository,
    keys: FingerprintKeys,
    depth: VerifyDepth,
    progress: &'a dyn JobProgress,
    findings: Mutex<Findings>,
    seen: Mutex<FrameSet>,
    differing: Mutex<Differing>,
    failure: Mutex<Option<Error>>,
    frame_count: AtomicU64,
    decoded_bytes: AtomicU64,
}

/// Pieces of one disk in the same frame.
struct FrameGroup<'a> {
    pieces: Vec<PlannedPiece>,
    content: DiskContent,
    device: Option<&'a dyn BlockDevice>,
}

/// A task of a worker.
enum VerifyTask<'a> {
    Frame(FrameGroup<'a>),
    /// A range that is zero on the disk, to be compared with a device.
    Zero(Range<u64>, &'a dyn BlockDevice),
}

/// Working memory of a worker.
struct Buffers {
    frame: FrameBuffers,
    raw: Vec<u8>,
    /// The corresponding bytes of the compared device.
    other: Vec<u8>,
}

impl Buffers {
    fn new() -> Self {
        Self {
            frame: FrameBuffers::new(),
            raw: Vec::new(),
            other: Vec::new(),
        }
    }
}

/// The threads that process tasks.
enum VerifyWorkers<'a> {
    Caller(Buffers),
    Threads(Sender<VerifyTask<'a>>),
}

impl<'a> VerifyJob<'a> {
    fn run(&self, manifests: &[Manifest], request: &VerifyRequest<'a>) -> Result<()> {
        if request.thread_count == 0 {
            return self.walk(manifests, request, &mut VerifyWorkers::Caller(Buffers::new()));
        }
        std::thread::scope(|scope| {
            let (send, tasks) = bounded::<VerifyTask<'a>>(request.thread_count * 4);
            for _ in 0..request.thread_count {
                let tasks = tasks.clone();
                scope.spawn(move || self.work(&tasks));
            }
            drop(tasks);
            self.walk(manifests, request, &mut VerifyWorkers::Threads(send))
        })?;
        lock(&self.failure).take().map_or(Ok(()), Err)
    }

    fn walk(&self, manifests: &[Manifest], request: &VerifyRequest<'a>, workers: &mut VerifyWorkers<'a>) -> Result<()> {
        let mut known = PageSet::default();
        for manifest in manifests {
            for disk in &manifest.disks {
                let device = compared_device(manifest, disk, request)?;
                let mut batcher = Batcher {
                    job: self,
                    workers,
                    device,
                    content: disk.content,
                    pieces: Vec::new(),
                };
                // Known pages are walked again if their bytes must be compared.
                let known = device.is_none().then_some(&mut known);
                walk_disk(&self.repository.packs, disk, known, &mut batcher)?;
                batcher.flush()?;
            }
        }
        Ok(())
    }

    fn work(&self, tasks: &Receiver<VerifyTask<'a>>) {
        let mut buffers = Buffers::new();
        for task in tasks {
            if lock(&self.failure).is_some() {
                return;
            }
            if let Err(error) = self.task(task, &mut buffers) {
                lock(&self.failure).get_or_insert(error);
                return;
            }
        }
    }

    fn task(&self, task: VerifyTask<'a>, buffers: &mut Buffers) -> Result<()> {
        let bytes = match &task {
            VerifyTask::Frame(group) => group.pieces.iter().map(|piece| u64::from(piece.length)).sum(),
            VerifyTask::Zero(range, _) => range.end - range.start,
        };
        match task {
            VerifyTask::Frame(group) => self.frame(&group, buffers)?,
            VerifyTask::Zero(range, device) => self.compare_zero(range, device, &mut buffers.other)?,
        }
        self.progress.advance(bytes);
        Ok(())
    }

    /// Checks the frames of a group, and follows relocations if gc has moved them meanwhile.
    fn frame(&self, group: &FrameGroup<'a>, buffers: &mut Buffers) -> Result<()> {
        match self.check_group(group, buffers) {
            Err(Error::MissingPack { pack }) => {
                self.repository.packs.refresh()?;
                let pieces = moved_pieces(&self.repository.packs, &group.pieces)?;
                for pieces in pieces.chunk_by(|a, b| (a.pack, a.frame) == (b.pack, b.frame)) {
                    if pieces[0].pack == pack {
                        // A relocation exists before its pack is deleted: data that is not found elsewhere is
                        // lost.
                        lock(&self.findings).place(DamagedPart::Pack(pack), Error::MissingPack { pack })?;
                    } else {
                        let pieces = pieces.to_vec();
                        self.frame(&FrameGroup { pieces, ..*group }, buffers)?;
                    }
                }
                Ok(())
            }
            other => other,
        }
    }

    /// Checks the frame of a group, and that all pieces of the group are within it; an error if the pack is
    /// missing.
    fn check_group(&self, group: &FrameGroup<'a>, buffers: &mut Buffers) -> Result<()> {
        let PlannedPiece { pack, frame, .. } = group.pieces[0];
        let packs = &self.repository.packs;
        let reader = match packs.frame_reader(pack) {
            Ok(reader) => reader,
            Err(error @ Error::MissingPack { .. }) => return Err(error),
            Err(error) => return lock(&self.findings).place(DamagedPart::Pack(pack), error),
        };
        let place = DamagedPart::Frame(pack, frame);
        let entry = match reader.frame(frame) {
            Ok(entry) => entry,
            Err(error) => return lock(&self.findings).place(place, error),
        };
        let expected = match group.content {
            DiskContent::Blocks => FrameContent::Blocks,
            DiskContent::Stream => FrameContent::Stream,
        };
        let behind = |piece: &&PlannedPiece| {
            u64::from(piece.frame_offset) + u64::from(piece.length) > u64::from(entry.raw_length)
        };
        if entry.content != expected || group.pieces.iter().any(|piece| behind(&piece)) {
            let detail = format!("frame {frame} is shorter than, or not of the kind that, a disk needs of it");
            return lock(&self.findings).place(place, Error::damaged(&reader.name, entry.offset, detail));
        }
        let wanted = self.depth == VerifyDepth::Full && lock(&self.seen).insert(pack, frame);
        if !wanted && group.device.is_none() {
            return Ok(());
        }
        let Buffers {
            frame: frame_buffers,
            raw,
            other,
        } = buffers;
        let read = packs.prints(pack, frame).and_then(|prints| {
            packs.frame(pack, frame, frame_buffers, raw)?;
            check_frame(&self.keys, &reader, frame, raw, &prints, Depth::Identities)
        });
        self.frame_count.fetch_add(1, Ordering::Relaxed);
        match read {
            Ok(()) => {
                self.decoded_bytes.fetch_add(raw.len() as u64, Ordering::Relaxed);
            }
            Err(Error::Store(StoreError::NotFound { .. }) | Error::MissingPack { .. }) => {
                packs.forget(pack);
                return Err(Error::MissingPack { pack });
            }
            Err(error) => return lock(&self.findings).place(place, error),
        }
        if let Some(device) = group.device {
            for piece in &group.pieces {
                let bytes = &raw[piece.frame_offset as usize..][..piece.length as usize];
                self.compare(bytes, piece.disk_offset, device, other)?;
            }
        }
        Ok(())
    }

    /// Compares `bytes` with the device at `offset`, block by block.
    fn compare(&self, bytes: &[u8], offset: u64, device: &dyn BlockDevice, other: &mut Vec<u8>) -> Result<()> {
        const STEP: usize = 4096;
        let available = device.size_bytes().saturating_sub(offset).min(bytes.len() as u64);
        if available == 0 {
            // A device that is too short is reported as a whole.
            return Ok(());
        }
        other.resize(to_usize(available), 0);
        device.read_at(other, offset).map_err(|source| Error::Device {
            role: "device to compare with",
            name: String::new(),
            source,
        })?;
        let mut differing = lock(&self.differing);
        differing.compared_bytes += available;
        let pairs = bytes.chunks(STEP).zip(other.chunks(STEP));
        for (number, (ours, theirs)) in (0u64..).zip(pairs) {
            if ours[..theirs.len()] != *theirs {
                let start = offset + number * STEP as u64;
                differing.push(start..start + theirs.len() as u64);
            }
        }
        Ok(())
    }

    fn compare_zero(&self, range: Range<u64>, device: &dyn BlockDevice, other: &mut Vec<u8>) -> Result<()> {
        const ZERO_BYTES: u64 = 1 << 20;
        let zeroes = vec![0; to_usize(ZERO_BYTES.min(range.end - range.start))];
        let mut at = range.start;
        while at < range.end {
            self.check_cancelled()?;
            let step = ZERO_BYTES.min(range.end - at);
            self.compare(&zeroes[..to_usize(step)], at, device, other)?;
            at += step;
        }
        Ok(())
    }

    fn check_cancelled(&self) -> Result<()> {
        if self.progress.cancelled().load(Ordering::Relaxed) {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// The device to compare `disk` with, if it is the selected one.
fn compared_device<'a>(
    manifest: &Manifest,
    disk: &DiskRecord,
    request: &VerifyRequest<'a>,
) -> Result<Option<&'a dyn BlockDevice>> {
    match &request.compare {
        Some(compare) if compare.snapshot == manifest.id => {
            let is_it = std::ptr::eq(manifest.disk(compare.disk)?, disk);
            Ok(is_it.then_some(compare.device))
        }
        _ => Ok(None),
    }
}

/// Collects pieces of one disk, and passes them to the workers by frame.
struct Batcher<'job, 'a> {
    job: &'job VerifyJob<'a>,
    workers: &'job mut VerifyWorkers<'a>,
    device: Option<&'a dyn BlockDevice>,
    content: DiskContent,
    pieces: Vec<PlannedPiece>,
}

impl<'a> Batcher<'_, 'a> {
    fn flush(&mut self) -> Result<()> {
        self.pieces.sort_unstable();
        let pieces = std::mem::take(&mut self.pieces);
        for group in pieces.chunk_by(|a, b| (a.pack, a.frame) == (b.pack, b.frame)) {
            self.dispatch(VerifyTask::Frame(FrameGroup {
                pieces: group.to_vec(),
                content: self.content,
                device: self.device,
            }))?;
        }
        Ok(())
    }

    fn dispatch(&mut self, task: VerifyTask<'a>) -> Result<()> {
        self.job.check_cancelled()?;
        match self.workers {
            VerifyWorkers::Caller(buffers) => self.job.task(task, buffers),
            // No receiver: all workers have stopped, and one of them has reported the error.
            VerifyWorkers::Threads(send) => send
                .send(task)
                .map_err(|_| lock(&self.job.failure).take().unwrap_or(Error::Cancelled)),
        }
    }
}

impl Visitor for Batcher<'_, '_> {
    fn visit(&mut self, visit: MapItem) -> Result<Verdict> {
        match visit {
            // An unreadable page is reported as unreadable.
            MapItem::Page { .. } => {}
            MapItem::Zero(range) => match self.device {
                Some(device) => self.dispatch(VerifyTask::Zero(range, device))?,
                None => self.job.progress.advance(range.end - range.start),
            },
            MapItem::Known(range) => self.job.progress.advance(range.end - range.start),
            MapItem::Piece {
                disk_offset,
                place,
                length,
            } => {
                self.pieces.push(PlannedPiece {
                    pack: place.pack,
                    frame: place.frame,
                    frame_offset: place.offset,
                    length: u32::try_from(length).expect("a piece lies in one frame"),
                    disk_offset,
                });
                if self.pieces.len() >= BATCH_PIECE_COUNT {
                    self.flush()?;
                }
            }
            MapItem::Unreadable { range, place, error } => {
                lock(&self.job.findings).place(place, error)?;
                self.job.progress.advance(range.end - range.start);
            }
        }
        Ok(Verdict::Clean)
    }
}
