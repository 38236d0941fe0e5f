//! `export` to a XenServer or XCP-ng pool: sends a machine to the pool as an XVA, without storing the XVA in between.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use holdfast_archive::{PackOptions, Packing};
use holdfast_hardware::xen::SuspendedMachine;
use holdfast_host::xapi::{Pool, Reference, Upload, UploadIdentity, XapiError, XapiRecord, XapiResult};
use holdfast_repo::Environment;
use jiff::Timestamp;

use super::suspended::Suspended;
use super::{
    ExportFormat, ExportFrom, ExportPlan, ExportReport, ExportRequest, ExportTarget, XvaExport, export, plan_export,
};
use crate::exchange::import::threads;
use crate::job::error::ExchangeError;
use crate::job::{Error, Job, Result, Unit};
use crate::notes::NOTE_UUID;
use crate::repository::open::find_snapshot;

/// What to export to a pool, and how.
pub struct ExportToPool<'a> {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The storage repository for the disks, by name or UUID; the pool's default if not given.
    pub storage: Option<String>,
    /// Identity and state of the machine in the pool.
    pub comes: PoolReturn,
    /// The source of the export.
    pub from: ExportFrom<'a>,
    /// Name of the machine in the pool; unchanged if not given.
    pub name: Option<String>,
    /// The host that exports.
    pub host: String,
    /// The current time.
    pub time: Timestamp,
}

/// Identity and state of a machine in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolReturn {
    /// The original machine, with its UUID and the addresses of its network cards. It boots.
    Starts,
    /// The original machine, resumed from its memory. Its memory contains these addresses, so they cannot change.
    Resumes,
    /// A new machine, with a new UUID and new addresses.
    AsAnother,
}

/// A machine that was sent to a pool.
#[derive(Debug)]
pub struct ExportedToPool {
    /// Report of the export.
    pub export: ExportReport,
    /// Its UUID in the pool.
    pub uuid: String,
    /// The storage repository with its disks.
    pub storage: String,
}

/// Output of the archive writer: the upload starts with the first byte, after all local checks.
#[derive(Clone)]
struct Sender(Arc<Mutex<Sending>>);

/// The connection to the pool is closed at the end: a writer thread that is still running must not keep a session.
enum Sending {
    NotBegun {
        pool: Arc<Pool>,
        /// The storage repository for the disks.
        storage: Reference,
        identity: UploadIdentity,
    },
    Begun(Box<Upload>),
    /// The error of the pool or of the connection.
    Failed(XapiError),
    /// The reader has finished.
    Over,
}

impl Sender {
    /// The report and the upload, or the error; after an error the upload is aborted.
    fn ended(&self, sent: Result<ExportReport>, job: Job<'_>) -> Result<(ExportReport, Upload)> {
        let mut sending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let state = std::mem::replace(&mut *sending, Sending::Over);
        let error = match (state, sent) {
            (Sending::Begun(upload), Ok(export)) => return Ok((export, *upload)),
            (Sending::Begun(upload), Err(error)) => {
                upload.cancel();
                error
            }
            (Sending::Failed(error), _) => error.into(),
            (_, Err(error)) => error,
            // An archive has at least a header.
            (_, Ok(_)) => unreachable!("an archive was written, and nothing was sent"),
        };
        // An interruption is more helpful than the error that it caused.
        Err(job.interrupt.check().err().map_or(error, Error::from))
    }
}

impl Sending {
    /// Sends bytes; false if the upload has ended.
    fn send(&mut self, bytes: &[u8]) -> XapiResult<bool> {
        if let Self::NotBegun {
            pool,
            storage,
            identity,
        } = self
        {
            let upload = pool.upload_machine(storage, *identity)?;
            *self = Self::Begun(Box::new(upload));
        }
        match self {
            Self::Begun(upload) => upload.send(bytes).map(|()| true),
            _ => Ok(false),
        }
    }
}

impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut sending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match sending.send(bytes) {
            Ok(true) => return Ok(bytes.len()),
            Ok(false) => {}
            // Kept for the caller that asks for the result: an I/O error cannot carry it.
            Err(error) => {
                let state = std::mem::replace(&mut *sending, Sending::Failed(error));
                if let Sending::Begun(upload) = state {
                    upload.cancel();
                }
            }
        }
        Err(std::io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The UUID of the exported machine. Refuses a machine that is to be resumed but cannot be.
fn uuid_of(request: &ExportToPool<'_>, job: Job<'_>) -> Result<Option<String>> {
    match &request.from {
        ExportFrom::Snapshot {
            repository,
            reference,
            zone,
            left_out,
        } => {
            let snapshot = find_snapshot(repository, reference, zone, job.progress)?;
            if request.comes == PoolReturn::Resumes {
                let suspended = Suspended::read(repository, &snapshot, request.name.as_deref(), left_out)?;
                refuse_other_processors(&request.pool, suspended.machine())?;
            }
            Ok(snapshot.notes.get(NOTE_UUID).cloned())
        }
        ExportFrom::Now(request) => Ok(Some(request.machine.describe()?.summary.uuid)),
    }
}

/// Refuses a second machine with the same addresses of network cards: they would disturb each other.
fn refuse_existing_uuid(pool: &Pool, uuid: Option<String>) -> Result<()> {
    let Some(uuid) = uuid else { return Ok(()) };
    match pool.machine(&uuid) {
        Ok(machine) => Err(ExchangeError::Twin {
            pool: pool.title(),
            name: machine.summary.name,
            uuid,
        }
        .into()),
        Err(XapiError::NoMachine { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Warns about machines of the same name: backups by a name that several machines have are refused.
fn warn_of_namesakes(pool: &Pool, name: &str, job: Job<'_>) {
    if let Err(XapiError::SeveralMachines { uuids, .. }) = pool.machine(name) {
        job.progress.warning(&format!(
            "the pool has {} machines {name:?} now ({}): name each by its UUID; --name gives a new machine another name",
            uuids.len(),
            uuids.join(", ")
        ));
    }
}

/// Warns about networks. A pool connects a network card to the network of the same name, or else to the one with the
/// same bridge, or else to a new network: a user who starts the machine has to know.
fn warn_of_networks(pool: &Pool, known: &[XapiRecord], machine: &XapiRecord, asked: &[String], job: Job<'_>) {
    let cards = machine.references("VIFs");
    let Ok(mut cards) = cards
        .iter()
        .map(|card| pool.record("VIF", card))
        .collect::<XapiResult<Vec<_>>>()
    else {
        return;
    };
    cards.sort_by_key(|card| card.text("device").parse().unwrap_or(u32::MAX));
    for (card, asked) in cards.iter().zip(asked) {
        let reference = card.reference("network");
        let device = card.text("device");
        let there = known.iter().find(|network| network.reference == reference);
        match there.map(|network| network.text("name_label")) {
            Some(name) if name == asked => {}
            Some(name) => job.progress.warning(&format!(
                "the pool has no network {asked:?}: network card {device} is in {name:?} now, which has the same bridge"
            )),
            None => job.progress.warning(&format!(
                "the pool has no network {asked:?}, and has made one for network card {device}: it leads nowhere until you join it to the hosts' own"
            )),
        }
    }
}

/// Refuses a pool with processors of another vendor: the machine could not resume, and the pool would refuse only after a long upload.
fn refuse_other_processors(pool: &Pool, machine: &SuspendedMachine) -> Result<()> {
    let pools = pool.records("pool")?;
    let there = pools.first().and_then(|record| record.entry("cpu_info", "vendor"));
    match (there, &machine.processor_vendor) {
        (Some(there), Some(vendor)) if !there.is_empty() && there != vendor => Err(ExchangeError::Processors {
            pool: pool.title(),
            there: there.to_owned(),
            vendor: vendor.clone(),
        }
        .into()),
        _ => Ok(()),
    }
}

/// Options of the archive that is sent.
fn xva_of(request: &ExportToPool<'_>, job: Job<'_>) -> XvaExport {
    XvaExport {
        packing: PackOptions {
            packing: Packing::None,
            level: None,
            threads: threads(job),
        },
        resumes: request.comes == PoolReturn::Resumes,
    }
}

/// Plans an export to a pool: the pool is queried, and nothing is sent. Returns the plan, and the storage repository for the disks.
pub fn plan_export_to_pool(request: ExportToPool<'_>, job: Job<'_>) -> Result<(ExportPlan, String)> {
    if request.comes != PoolReturn::AsAnother {
        refuse_existing_uuid(&request.pool, uuid_of(&request, job)?)?;
    }
    let storage = request.pool.storage(request.storage.as_deref())?;
    let target = ExportTarget::Stream(Box::new(std::io::sink()), ExportFormat::Xva(xva_of(&request, job)));
    let plan = plan_export(
        request.from,
        ExportRequest {
            target,
            name: request.name,
            host: request.host,
            time: request.time,
        },
        job,
    )?;
    Ok((plan, storage.text("name_label").to_owned()))
}

/// Exports a machine to a pool. After an error the pool removes the partial machine.
pub fn export_to_pool(request: ExportToPool<'_>, environment: &Environment, job: Job<'_>) -> Result<ExportedToPool> {
    let pool = Arc::clone(&request.pool);
    let identity = match request.comes {
        PoolReturn::Starts | PoolReturn::Resumes => UploadIdentity::Kept,
        PoolReturn::AsAnother => UploadIdentity::New,
    };
    if identity == UploadIdentity::Kept {
        refuse_existing_uuid(&pool, uuid_of(&request, job)?)?;
    }
    let storage = pool.storage(request.storage.as_deref())?;
    let networks = pool.records("network")?;
    let sender = Sender(Arc::new(Mutex::new(Sending::NotBegun {
        pool: Arc::clone(&pool),
        storage: storage.reference.clone(),
        identity,
    })));
    let xva = xva_of(&request, job);
    let sent = export(
        request.from,
        ExportRequest {
            target: ExportTarget::Stream(Box::new(sender.clone()), ExportFormat::Xva(xva)),
            name: request.name,
            host: request.host,
            time: request.time,
        },
        environment,
        job,
    );
    let (export, upload) = sender.ended(sent, job)?;
    job.progress.phase("waiting for the pool to import it", Unit::Items);
    let record = upload
        .finish(&mut |_| ())
        .and_then(|machine| pool.record("VM", &machine))
        .map_err(|error| match error {
            // The pool reported that the machine does not exist.
            XapiError::Refused { .. } | XapiError::Interrupted => error.into(),
            source => Error::from(ExchangeError::Outcome {
                pool: pool.title(),
                source,
            }),
        })?;
    warn_of_namesakes(&pool, record.text("name_label"), job);
    warn_of_networks(&pool, &networks, &record, &export.networks, job);
    Ok(ExportedToPool {
        export,
        uuid: record.text("uuid").to_owned(),
        storage: storage.text("name_label").to_owned(),
    })
}
