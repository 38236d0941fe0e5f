//! `export` to a pool of XenServer or XCP-ng: a machine in a snapshot becomes a machine there, by an XVA that is stored nowhere in between.

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
    /// The storage repository that gets the disks, by name or UUID; the pool's default where not given.
    pub storage: Option<String>,
    /// As what the machine comes.
    pub comes: PoolReturn,
    /// What is exported.
    pub from: ExportFrom<'a>,
    /// What the machine is called there; as here where not given.
    pub name: Option<String>,
    /// The host that exports.
    pub host: String,
    /// Now.
    pub time: Timestamp,
}

/// As what a machine comes to a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolReturn {
    /// As the one that it was, with its UUID and the addresses of its network cards. It starts.
    Starts,
    /// The same, and it goes on from its memory. What is in its memory knows these addresses, so it cannot have others.
    GoesOn,
    /// As another one, with others.
    AsAnother,
}

/// A machine that is in a pool now.
#[derive(Debug)]
pub struct ExportedToPool {
    /// What was sent.
    pub export: ExportReport,
    /// Its UUID there.
    pub uuid: String,
    /// The storage repository that its disks are in.
    pub storage: String,
}

/// What a writer of archives writes to: the upload begins with the first byte, when all that could be refused here was looked at.
#[derive(Clone)]
struct Sender(Arc<Mutex<Sending>>);

/// What has the pool is gone when it is over: a thread that still writes must not keep a session.
enum Sending {
    NotBegun {
        pool: Arc<Pool>,
        /// The storage repository that gets the disks.
        storage: Reference,
        identity: UploadIdentity,
    },
    Begun(Box<Upload>),
    /// What the pool, or the way there, had to say.
    Failed(XapiError),
    /// The reader is gone.
    Over,
}

impl Sender {
    /// What was sent, and the upload that it was sent by; or why that is not so. Then it is given up.
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
            // An archive has a beginning, at the least.
            (_, Ok(_)) => unreachable!("an archive was written, and nothing was sent"),
        };
        // An interruption says more than the error that it caused.
        Err(job.interrupt.check().err().map_or(error, Error::from))
    }
}

impl Sending {
    /// Sends bytes; false where it is over.
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
            // It is kept for the caller that asks how it ended: an error of writing has no room for it.
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

/// The UUID of the machine that is exported. One that is to go on is refused here where it cannot.
fn uuid_of(request: &ExportToPool<'_>, job: Job<'_>) -> Result<Option<String>> {
    match &request.from {
        ExportFrom::Snapshot {
            repository,
            reference,
            zone,
            left_out,
        } => {
            let snapshot = find_snapshot(repository, reference, zone, job.progress)?;
            if request.comes == PoolReturn::GoesOn {
                let suspended = Suspended::read(repository, &snapshot, request.name.as_deref(), left_out)?;
                refuse_other_processors(&request.pool, suspended.machine())?;
            }
            Ok(snapshot.notes.get(NOTE_UUID).cloned())
        }
        ExportFrom::Now(request) => Ok(Some(request.machine.describe()?.summary.uuid)),
    }
}

/// Two machines with the same addresses of their network cards would disturb each other.
fn refuse_twins(pool: &Pool, uuid: Option<String>) -> Result<()> {
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

/// Backups by a name that two machines have are refused, those of the older one among them.
fn warn_of_namesakes(pool: &Pool, name: &str, job: Job<'_>) {
    if let Err(XapiError::SeveralMachines { uuids, .. }) = pool.machine(name) {
        job.progress.warning(&format!(
            "the pool has {} machines {name:?} now ({}): name each by its UUID; --name gives a new machine another name",
            uuids.len(),
            uuids.join(", ")
        ));
    }
}

/// A pool plugs a network card into the network of its name, else into the one whose bridge is called the same, else into one that it makes: a user who
/// starts the machine has to know.
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

/// A machine goes on only on processors of the maker that it was started on: its pool would take it in for hours, and then refuse.
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

/// The archive that is sent.
fn xva_of(request: &ExportToPool<'_>, job: Job<'_>) -> XvaExport {
    XvaExport {
        packing: PackOptions {
            packing: Packing::None,
            level: None,
            threads: threads(job),
        },
        goes_on: request.comes == PoolReturn::GoesOn,
    }
}

/// Plans an export to a pool: the pool is asked, and nothing is sent. The plan, and the storage repository that would get the disks.
pub fn plan_export_to_pool(request: ExportToPool<'_>, job: Job<'_>) -> Result<(ExportPlan, String)> {
    if request.comes != PoolReturn::AsAnother {
        refuse_twins(&request.pool, uuid_of(&request, job)?)?;
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

/// Exports a machine to a pool. Where that fails, the pool removes what it has of it.
pub fn export_to_pool(request: ExportToPool<'_>, environment: &Environment, job: Job<'_>) -> Result<ExportedToPool> {
    let pool = Arc::clone(&request.pool);
    let identity = match request.comes {
        PoolReturn::Starts | PoolReturn::GoesOn => UploadIdentity::Kept,
        PoolReturn::AsAnother => UploadIdentity::New,
    };
    if identity == UploadIdentity::Kept {
        refuse_twins(&pool, uuid_of(&request, job)?)?;
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
    job.progress.phase("waiting for the pool to take it in", Unit::Items);
    let record = upload
        .finish(&mut |_| ())
        .and_then(|machine| pool.record("VM", &machine))
        .map_err(|error| match error {
            // The pool itself says that it is not there.
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
