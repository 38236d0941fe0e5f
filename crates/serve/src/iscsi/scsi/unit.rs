//! A logical unit: a device, its identity, and the state that initiators share.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use holdfast_block::BlockDevice;

use super::super::nexus::{InitiatorPort, Nexus};
use super::cdb::BlockSpan;
use super::mode::ModePages;
use super::reservations::{ReservationEffects, Reservations};
use super::sense::{Failure, Sense};
use crate::registry::RegisteredExport;
use crate::server::export_device::{Absent, ExportDevice};

/// Longest transfer of one command.
pub(crate) const TRANSFER_BYTES_MAX: u64 = 32 << 20;
/// Unit attentions that wait for one initiator; further ones would not tell it more.
const ATTENTION_COUNT_MAX: usize = 8;

/// "Power on, reset, or bus device reset occurred".
pub(crate) const POWER_ON: u16 = 0x2900;
/// "Bus device reset function occurred".
pub(crate) const DEVICE_RESET: u16 = 0x2903;
/// "Reported LUNs data has changed".
pub(crate) const LUNS_CHANGED: u16 = 0x3f0e;
/// "Commands cleared by another initiator".
pub(crate) const COMMANDS_CLEARED: u16 = 0x2f00;

/// The size of logical blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SectorSize {
    /// 512 bytes.
    #[default]
    Bytes512,
    /// 4096 bytes.
    Bytes4096,
}

impl SectorSize {
    /// The size in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bytes512 => 512,
            Self::Bytes4096 => 4096,
        }
    }
}

/// Properties of a logical unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitOptions {
    /// The serial number. Initiators take units with the same serial number for paths to the same disk.
    pub serial: String,
    /// The size of logical blocks.
    pub sector_size: SectorSize,
    /// The maximum size in bytes that initiators see, for those that cannot use large disks.
    pub size_bytes_max: Option<u64>,
    /// The meaning of absent extents of the device.
    pub absent: Absent,
}

impl UnitOptions {
    /// A unit with blocks of 512 bytes, and the size of its device.
    pub fn new(serial: impl Into<String>) -> Self {
        Self {
            serial: serial.into(),
            sector_size: SectorSize::default(),
            size_bytes_max: None,
            absent: Absent::ReadsAsZero,
        }
    }
}

/// A logical unit.
pub struct LogicalUnit {
    pub(super) device: ExportDevice,
    pub(super) options: UnitOptions,
    pub(super) block_count: u64,
    state: Mutex<UnitState>,
    /// Commands that compare and write take it for writing, other writes for reading.
    pub(super) exclusive: RwLock<()>,
    /// The export of the process that its initiators enter.
    registered: Option<Arc<RegisteredExport>>,
}

/// The state that all initiators share.
#[derive(Debug, Default)]
pub(super) struct UnitState {
    sessions: BTreeMap<u64, SessionState>,
    pub(super) reservations: Reservations,
    pub(super) pages: ModePages,
}

/// The state for one session.
#[derive(Debug)]
struct SessionState {
    port: InitiatorPort,
    attentions: VecDeque<u16>,
    /// Counts the times at which another initiator aborted this session's tasks.
    abort_count: u64,
}

impl SessionState {
    fn attend(&mut self, code: u16) {
        if !self.attentions.contains(&code) && self.attentions.len() < ATTENTION_COUNT_MAX {
            self.attentions.push_back(code);
        }
    }
}

/// A reset, or another event that ends tasks of several initiators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitReset {
    /// All tasks end, and all initiators learn of the reset.
    Reset,
    /// All tasks end; reservations stay.
    ClearTasks,
}

impl fmt::Debug for LogicalUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogicalUnit")
            .field("options", &self.options)
            .field("block_count", &self.block_count)
            .finish_non_exhaustive()
    }
}

impl LogicalUnit {
    /// A unit on `device`. Bytes after the last whole block are not accessible.
    pub fn new(device: ExportDevice, options: UnitOptions) -> Self {
        let size_bytes = device.reader().size_bytes();
        let size_bytes = options.size_bytes_max.map_or(size_bytes, |max| size_bytes.min(max));
        Self {
            block_count: size_bytes / u64::from(options.sector_size.bytes()),
            device,
            options,
            state: Mutex::default(),
            exclusive: RwLock::default(),
            registered: None,
        }
    }

    /// A unit on an export of a registry.
    pub fn of(registered: &Arc<RegisteredExport>, options: UnitOptions) -> Self {
        Self {
            registered: Some(Arc::clone(registered)),
            ..Self::new(registered.device(), options)
        }
    }

    pub(crate) fn registered(&self) -> Option<&Arc<RegisteredExport>> {
        self.registered.as_ref()
    }

    /// Raises a unit attention condition in all sessions.
    pub(crate) fn raise_attention(&self, code: u16) {
        self.lock()
            .sessions
            .values_mut()
            .for_each(|session| session.attend(code));
    }

    /// The size in bytes that initiators see.
    pub fn size_bytes(&self) -> u64 {
        self.block_count * self.block_bytes()
    }

    pub(crate) fn reader(&self) -> &dyn BlockDevice {
        self.device.reader()
    }

    /// The size that the device handles efficiently: from one block to 4096 bytes.
    pub(super) fn physical_block_bytes(&self) -> u32 {
        let logical = self.options.sector_size.bytes();
        self.device.reader().block_size_bytes().clamp(logical, 4096)
    }

    pub(super) fn block_bytes(&self) -> u64 {
        u64::from(self.options.sector_size.bytes())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, UnitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether initiators can write at all.
    pub(super) fn is_read_only(&self) -> bool {
        self.device.writer().is_none()
    }

    /// A session begins.
    pub(crate) fn enter(&self, nexus: &Nexus) {
        let session = SessionState {
            port: nexus.port.clone(),
            attentions: VecDeque::from([POWER_ON]),
            abort_count: 0,
        };
        self.lock().sessions.insert(nexus.id, session);
    }

    /// A session ends: what belongs to it ends, too.
    pub(crate) fn leave(&self, nexus: &Nexus) {
        let mut state = self.lock();
        state.sessions.remove(&nexus.id);
        state.reservations.release_legacy(nexus.id);
    }

    /// Takes the next unit attention of a session.
    pub(super) fn take_attention(&self, nexus: &Nexus) -> Option<Sense> {
        let mut state = self.lock();
        let session = state.sessions.get_mut(&nexus.id)?;
        session.attentions.pop_front().map(Sense::attention)
    }

    /// A number that changes whenever another initiator aborts the tasks of this session.
    pub(crate) fn abort_count(&self, nexus: &Nexus) -> u64 {
        self.lock()
            .sessions
            .get(&nexus.id)
            .map_or(0, |session| session.abort_count)
    }

    /// Aborts the tasks of all other sessions, and resets the unit if `reset` says so.
    pub(crate) fn reset(&self, nexus: &Nexus, reset: UnitReset) {
        let mut state = self.lock();
        if reset == UnitReset::Reset {
            state.reservations.reset();
            state.pages = ModePages::default();
        }
        for (id, session) in &mut state.sessions {
            if *id != nexus.id {
                session.abort_count += 1;
            }
            match reset {
                UnitReset::Reset => session.attend(DEVICE_RESET),
                UnitReset::ClearTasks if *id != nexus.id => session.attend(COMMANDS_CLEARED),
                UnitReset::ClearTasks => {}
            }
        }
    }

    /// Tells the sessions of other initiators of a change of reservations.
    pub(super) fn apply(state: &mut UnitState, nexus: &Nexus, effects: &ReservationEffects) {
        for (port, code) in &effects.attentions {
            let sessions = state.sessions.values_mut().filter(|session| session.port == *port);
            sessions.for_each(|session| session.attend(*code));
        }
        for (id, session) in &mut state.sessions {
            if *id != nexus.id && effects.aborted.contains(&session.port) {
                session.abort_count += 1;
            }
        }
    }

    /// Tells all other sessions that mode parameters have changed.
    pub(super) fn attend_others(state: &mut UnitState, nexus: &Nexus, code: u16) {
        for (id, session) in &mut state.sessions {
            if *id != nexus.id {
                session.attend(code);
            }
        }
    }

    /// The bytes of blocks, if all of them are on the unit.
    pub(super) fn range(&self, span: BlockSpan) -> Result<Range<u64>, Failure> {
        let end = span.first.checked_add(span.count);
        match end {
            Some(end) if end <= self.block_count => Ok(span.first * self.block_bytes()..end * self.block_bytes()),
            _ => Err(Sense::ADDRESS_OUT_OF_RANGE.into()),
        }
    }

    /// Like [`range`](Self::range), and refuses transfers that are too long.
    pub(super) fn transfer_range(&self, span: BlockSpan) -> Result<Range<u64>, Failure> {
        let range = self.range(span)?;
        if range.end - range.start > TRANSFER_BYTES_MAX {
            return Err(Sense::INVALID_FIELD_IN_CDB.into());
        }
        Ok(range)
    }
}
