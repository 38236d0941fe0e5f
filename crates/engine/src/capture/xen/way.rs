//! Chooses how disks of a pool are read, and which parts.

use std::sync::Arc;

use holdfast_block::{BlockDevice, DirtyBitmap, error_text};
use holdfast_host::xapi::{DiskForm, NbdAddress, Pool, Reference, Tracking, VirtualDisk, XapiError};
use holdfast_image::VhdStream;
use holdfast_repo::{DiskRecord, Manifest, Repository};
use holdfast_serve::nbd::client::{Endpoint, NbdDevice, NbdOptions, TlsClient};

use super::instant::PoolSnapshot;
use super::streams::{Form, PlannedStream, Streams};
use super::transfer_mode::XenTransfer;
use super::{ChosenXenDisk, XenBackupRequest};
use crate::capture::sink::History;
use crate::job::error::XenBackupError;
use crate::job::{Job, Result};
use crate::notes::{NOTE_XEN_BASE, NOTE_XEN_DISK, note};

/// Reasons to read a whole disk.
const NO_PARENT: &str = "there is no earlier snapshot to compare with";
const RAW_IS_WHOLE: &str = "raw bytes are read as a whole";

/// The granularity of known changes, which is the block size of a VHD.
const BLOCK_BYTES: u64 = 2 << 20;

/// The part of a disk that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum XenChange {
    /// The changes since the previous snapshot.
    Since {
        /// The size of the blocks with changes, in bytes.
        changed_bytes: u64,
    },
    /// The whole disk; the reason.
    Everything(String),
}

impl XenChange {
    /// The number of bytes that are read of a disk of this size.
    pub(super) fn read_bytes(&self, size_bytes: u64) -> u64 {
        match self {
            Self::Since { changed_bytes } => *changed_bytes,
            Self::Everything(_) => size_bytes,
        }
    }
}

/// Chooses the method for all disks of a machine.
pub(super) fn choose(request: &XenBackupRequest<'_>, taken: &[ChosenXenDisk], job: Job<'_>) -> Result<XenTransfer> {
    let pool = &request.pool;
    let way = match request.way {
        Some(XenTransfer::Nbd) => match why_no_nbd(pool, taken)? {
            None => XenTransfer::Nbd,
            Some(reason) => {
                return Err(XenBackupError::NoWay {
                    machine: request.machine.clone(),
                    way: "NBD",
                    reason,
                }
                .into());
            }
        },
        Some(way) => way,
        None => match why_no_nbd(pool, taken)? {
            None => XenTransfer::Nbd,
            Some(reason) => {
                job.progress
                    .note(&format!("disks are read as VHDs, and not by NBD: {reason}"));
                XenTransfer::Vhd
            }
        },
    };
    Ok(way)
}

/// Enables changed-block tracking in the pool, if the next backup can use it.
pub(super) fn track_changes(
    request: &XenBackupRequest<'_>,
    taken: &[ChosenXenDisk],
    way: XenTransfer,
    job: Job<'_>,
) -> Result<()> {
    if way == XenTransfer::Nbd && request.keeps_base {
        for disk in taken.iter().filter(|disk| disk.live.tracking == Tracking::Off) {
            let device = &disk.live.device;
            match request.pool.track_changes(&disk.live.reference) {
                Ok(()) => job.progress.note(&format!(
                    "from now on the pool tracks which blocks of disk {device} change: the next backup reads only those"
                )),
                Err(error @ XapiError::Interrupted) => return Err(error.into()),
                Err(error) => job.progress.warning(&format!(
                    "the pool cannot track which blocks of disk {device} change: {}; the next backup reads all of it",
                    error_text(&error)
                )),
            }
        }
    }
    Ok(())
}

/// Why a whole disk would be read; none if only changes would be.
pub(super) fn why_everything(
    history: Option<History<'_>>,
    request: &XenBackupRequest<'_>,
    taken: &ChosenXenDisk,
    way: XenTransfer,
) -> Result<Option<String>> {
    match history.and_then(|history| Some((history.repository, history.parent?))) {
        _ if way == XenTransfer::Raw => Ok(Some(RAW_IS_WHOLE.to_owned())),
        None => Ok(Some(NO_PARENT.to_owned())),
        Some((repository, parent)) => Ok(base_of(repository, request, taken, parent)?.err()),
    }
}

/// Why disks cannot be read by NBD; none if they can.
fn why_no_nbd(pool: &Pool, taken: &[ChosenXenDisk]) -> Result<Option<String>> {
    let mut is_reached = false;
    for disk in taken {
        match pool.nbd_addresses(&disk.live.reference) {
            Ok(places) if places.is_empty() => {
                return Ok(Some(
                    "no network of the pool is meant for it (xe network-param-add param-name=purpose param-key=nbd)"
                        .to_owned(),
                ));
            }
            Ok(_) if is_reached => {}
            // All disks are served by the same program, so one is tested.
            Ok(places) => match unreached(pool, &places) {
                None => is_reached = true,
                reason => return Ok(reason),
            },
            Err(error @ XapiError::Refused { .. }) => return Ok(Some(error.to_string())),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Why none of these addresses can be reached; none if one can.
fn unreached(pool: &Pool, places: &[NbdAddress]) -> Option<String> {
    let mut reason = None;
    for place in places {
        match pool.reach_nbd(place) {
            Ok(()) => return None,
            Err(error) => {
                reason = Some(format!(
                    "{}:{} cannot be reached: {}",
                    place.address,
                    place.port,
                    error_text(&error)
                ));
            }
        }
    }
    reason
}

/// A disk, ready to be read.
pub(super) struct OpenDisk {
    pub(super) device: Arc<dyn BlockDevice>,
    /// Where it may differ from the previous snapshot, if that is known.
    pub(super) changed: Option<DirtyBitmap>,
    pub(super) way: XenTransfer,
    pub(super) change: XenChange,
}

/// All disks in order, and the streams that some of them come from.
pub(super) struct OpenedXenDisks {
    pub(super) disks: Vec<OpenDisk>,
    pub(super) streams: Streams,
}

/// The base that a disk can be compared with.
struct Base {
    /// The pool's disk.
    disk: Reference,
    /// Whether the pool still has its content, too.
    has_data: bool,
    /// The disk in the previous snapshot.
    device: Arc<dyn BlockDevice>,
}

/// A disk before all streams are planned.
enum PlannedDisk {
    Whole(OpenDisk),
    /// Given by its number among the streams.
    Stream {
        number: usize,
        way: XenTransfer,
        since: Option<(Arc<dyn BlockDevice>, DirtyBitmap)>,
        change: XenChange,
    },
}

/// Opens the disks of a point in time.
pub(super) fn open_disks(
    history: Option<History<'_>>,
    request: &XenBackupRequest<'_>,
    taken: &[ChosenXenDisk],
    instant: &PoolSnapshot<'_>,
    way: XenTransfer,
    job: Job<'_>,
) -> Result<OpenedXenDisks> {
    let parent = history.and_then(|history| Some((history.repository, history.parent?)));
    let is_doubted = match parent {
        Some((repository, _)) if way == XenTransfer::Vhd => repository.has_known_damage()?,
        _ => false,
    };
    let mut planned = Vec::new();
    let mut halves = Vec::new();
    for disk in taken {
        job.interrupt.check()?;
        let Some(snapshot) = instant.snapshot_of(&disk.live) else {
            return Err(XenBackupError::DiskMissing {
                machine: request.machine.clone(),
                device: disk.live.device.clone(),
            }
            .into());
        };
        let base = match parent {
            None => Err(NO_PARENT.to_owned()),
            // Unchanged ranges would be taken from the doubted base.
            Some(_) if is_doubted => {
                Err("the repository has known damage, which a full read repairs where it can".to_owned())
            }
            Some((repository, parent)) => base_of(repository, request, disk, parent)?,
        };
        let half = match way {
            XenTransfer::Nbd => PlannedDisk::Whole(by_nbd(request, snapshot, base)?),
            XenTransfer::Vhd => as_vhd(request, snapshot, base, &mut planned)?,
            XenTransfer::Raw => {
                let reason = RAW_IS_WHOLE.to_owned();
                stream(&mut planned, snapshot, Form::Raw, XenChange::Everything(reason))
            }
        };
        halves.push(half);
    }
    let streams = Streams::new(Arc::clone(&request.pool), planned);
    let disks = halves.into_iter().map(|half| half.finish(&streams)).collect();
    Ok(OpenedXenDisks { disks, streams })
}

impl PlannedDisk {
    fn finish(self, streams: &Streams) -> OpenDisk {
        match self {
            Self::Whole(disk) => disk,
            Self::Stream {
                number,
                way,
                since,
                change,
            } => {
                let stream = streams.device(number);
                let (device, changed) = match since {
                    None => (stream, None),
                    Some((base, changed)) => {
                        let device: Arc<dyn BlockDevice> = Arc::new(super::SinceDevice {
                            stream,
                            base,
                            changed: changed.clone(),
                        });
                        (device, Some(changed))
                    }
                };
                OpenDisk {
                    device,
                    changed,
                    way,
                    change,
                }
            }
        }
    }
}

/// The base for comparing a disk, or why there is none.
fn base_of(
    repository: &Repository,
    request: &XenBackupRequest<'_>,
    taken: &ChosenXenDisk,
    parent: &Manifest,
) -> Result<std::result::Result<Base, String>> {
    let Ok(before) = parent.disk(Some(&taken.target)) else {
        return Ok(Err("the snapshot before has no such disk".to_owned()));
    };
    if before.size_bytes != taken.live.size_bytes {
        return Ok(Err(format!(
            "the disk had {} bytes and has {} now",
            before.size_bytes, taken.live.size_bytes
        )));
    }
    if note(&before.notes, NOTE_XEN_DISK) != Some(&taken.live.uuid) {
        return Ok(Err(
            "the snapshot before is of another disk of the pool, or the machine was reverted".to_owned(),
        ));
    }
    let Some(uuid) = note(&before.notes, NOTE_XEN_BASE) else {
        return Ok(Err(
            "the pool was not to keep what the snapshot before could be compared by".to_owned(),
        ));
    };
    Ok(match request.pool.disk_of_uuid(uuid)? {
        // A writable disk may have changed.
        Some(record) if !record.is("is_a_snapshot") => {
            Err("the pool does not have the snapshot any more that the earlier one could be compared by".to_owned())
        }
        Some(record) => Ok(Base {
            has_data: record.text("type") != "cbt_metadata",
            disk: record.reference.clone(),
            device: device_of(repository, before),
        }),
        None => Err("the pool has lost what the snapshot before could be compared by".to_owned()),
    })
}

fn device_of(repository: &Repository, disk: &DiskRecord) -> Arc<dyn BlockDevice> {
    Arc::new(repository.device(disk))
}

fn by_nbd(
    request: &XenBackupRequest<'_>,
    snapshot: &VirtualDisk,
    base: std::result::Result<Base, String>,
) -> Result<OpenDisk> {
    let pool = &request.pool;
    let changed = match base {
        Err(reason) => Err(reason),
        Ok(base) => match pool.changed_blocks(&base.disk, &snapshot.reference, snapshot.size_bytes) {
            Ok(changed) => Ok(changed),
            Err(error @ XapiError::Refused { .. }) => Err(error.to_string()),
            Err(error) => return Err(error.into()),
        },
    };
    let device = connect(request, snapshot)?;
    let (changed, change) = match changed {
        Ok(changed) => {
            let changed_bytes = changed.dirty_bytes();
            (Some(changed), XenChange::Since { changed_bytes })
        }
        Err(reason) => (None, XenChange::Everything(reason)),
    };
    Ok(OpenDisk {
        device: Arc::new(device),
        changed,
        way: XenTransfer::Nbd,
        change,
    })
}

/// Connects to the first reachable address that serves a disk.
fn connect(request: &XenBackupRequest<'_>, disk: &VirtualDisk) -> Result<NbdDevice> {
    let places = request.pool.nbd_addresses(&disk.reference)?;
    let mut reason = "no place serves it any more".to_owned();
    for place in &places {
        let tls = match place.trust() {
            None => None,
            Some(trust) => match TlsClient::new(trust.tls()?, &place.name) {
                Ok(tls) => Some(tls),
                Err(error) => {
                    reason = error.to_string();
                    continue;
                }
            },
        };
        let options = NbdOptions {
            tls,
            connection_count_max: request.connection_count_max,
            is_stopped: Some(request.pool.is_stopped()),
            ..NbdOptions::default()
        };
        // The export name contains the session, so it must not appear in messages.
        let endpoint = Endpoint::Tcp(place.address.clone(), place.port);
        match NbdDevice::connect(&endpoint, &place.export, options) {
            Ok(device) if device.size_bytes() == disk.size_bytes => return Ok(device),
            Ok(device) => reason = format!("it has {} bytes there", device.size_bytes()),
            Err(_) if (request.pool.is_stopped())() => return Err(crate::Interrupted.into()),
            Err(error) => {
                reason = error_text(&error).replace(&place.export, "its export");
            }
        }
    }
    Err(XenBackupError::NoWay {
        machine: request.machine.clone(),
        way: "NBD",
        reason: format!("disk {}: {reason}", disk.device),
    }
    .into())
}

fn as_vhd(
    request: &XenBackupRequest<'_>,
    snapshot: &VirtualDisk,
    base: std::result::Result<Base, String>,
    planned: &mut Vec<PlannedStream>,
) -> Result<PlannedDisk> {
    let since = match base {
        Err(reason) => Err(reason),
        Ok(base) if !base.has_data => {
            Err("the pool has kept only what tracking compares by, as for reading by NBD".to_owned())
        }
        Ok(base) => changed_in_vhd(&request.pool, snapshot, &base.disk)?.map(|changed| (base, changed)),
    };
    Ok(match since {
        Err(reason) if !is_in_order(&request.pool, snapshot)? => {
            let reason = format!("{reason}; and raw bytes, since the pool sends the blocks of a VHD in another order");
            stream(planned, snapshot, Form::Raw, XenChange::Everything(reason))
        }
        Err(reason) => stream(planned, snapshot, Form::Vhd, XenChange::Everything(reason)),
        Ok((base, changed)) => {
            let changed_bytes = changed.dirty_bytes();
            let form = Form::Since(base.disk, Arc::clone(&base.device));
            match stream(planned, snapshot, form, XenChange::Since { changed_bytes }) {
                PlannedDisk::Stream {
                    number, way, change, ..
                } => PlannedDisk::Stream {
                    number,
                    way,
                    since: Some((base.device, changed)),
                    change,
                },
                whole @ PlannedDisk::Whole(_) => whole,
            }
        }
    })
}

fn stream(planned: &mut Vec<PlannedStream>, snapshot: &VirtualDisk, form: Form, change: XenChange) -> PlannedDisk {
    let way = if matches!(form, Form::Raw) {
        XenTransfer::Raw
    } else {
        XenTransfer::Vhd
    };
    planned.push(PlannedStream {
        label: format!("disk {}", snapshot.device),
        disk: snapshot.reference.clone(),
        size_bytes: snapshot.size_bytes,
        form,
    });
    PlannedDisk::Stream {
        number: planned.len() - 1,
        way,
        since: None,
        change,
    }
}

/// Whether the blocks of a disk are streamed in order, according to the VHD's table, which comes first.
fn is_in_order(pool: &Arc<Pool>, disk: &VirtualDisk) -> Result<bool> {
    let download = pool.download_disk(&disk.reference, &DiskForm::Vhd)?;
    Ok(VhdStream::open(download, &disk.device)?.is_in_order())
}

/// The changes of a disk since another one, according to the table of a differencing VHD, which comes first.
fn changed_in_vhd(
    pool: &Arc<Pool>,
    disk: &VirtualDisk,
    base: &Reference,
) -> Result<std::result::Result<DirtyBitmap, String>> {
    let form = DiskForm::VhdSince(base.clone());
    let stream = match pool.download_disk(&disk.reference, &form) {
        Ok(download) => VhdStream::open(download, &disk.device),
        Err(error @ (XapiError::Refused { .. } | XapiError::Status { .. })) => {
            return Ok(Err(error.to_string()));
        }
        Err(error) => return Err(error.into()),
    };
    let stream = match stream {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(error.to_string())),
    };
    if stream.parent().is_none() {
        return Ok(Err("the pool sends all of the disk".to_owned()));
    }
    if !stream.is_in_order() {
        return Ok(Err(
            "the pool sends its blocks in another order than that of the disk".to_owned()
        ));
    }
    let mut changed = DirtyBitmap::new(disk.size_bytes, BLOCK_BYTES)?;
    for range in stream.stored() {
        changed.set(range);
    }
    Ok(Ok(changed))
}
