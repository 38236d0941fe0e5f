//! The machines that are frozen while host snapshots are taken.

use holdfast_block::error_text;
use holdfast_engine::{
    GuestReport, GuestRequest, MachinePlaces, Quiesce, Quiesced, StateStore, machines_in, places_of,
};
use holdfast_host::provider::HostSnapshotScope;
use holdfast_host::qemu::memory::MemoryMethod;
use holdfast_host::{Description, DiskChoice, MachineState};
use serde::Serialize;

use crate::context::Context;
use crate::errors::Error;
use crate::machines::runs;
use crate::machines::{Chosen, Found, Hypervisors};
use crate::units;

/// When file systems of guests are frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum QuiesceWhen {
    /// Freeze where it works
    Try,
    /// Freeze, or fail
    Require,
    /// Never
    Off,
}

impl From<QuiesceWhen> for Quiesce {
    fn from(when: QuiesceWhen) -> Self {
        match when {
            QuiesceWhen::Try => Self::Try,
            QuiesceWhen::Require => Self::Require,
            QuiesceWhen::Off => Self::Off,
        }
    }
}

/// How memory is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MemoryHow {
    /// Live; stopped where QEMU older than 9.0 emulates the processors, and may lose writes
    Auto,
    /// While the machine runs; it is paused only for the rest at the end
    Live,
    /// While the machine is paused
    Stopped,
}

impl From<MemoryHow> for MemoryMethod {
    fn from(how: MemoryHow) -> Self {
        match how {
            MemoryHow::Auto => Self::Auto,
            MemoryHow::Live => Self::Live,
            MemoryHow::Stopped => Self::Stopped,
        }
    }
}

/// Whether the firmware variables and the TPM of a machine are stored with its host snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestState {
    /// They are stored.
    Kept,
    /// Only the disks are in the host snapshot.
    Omitted,
}

impl GuestState {
    /// Stored if there is a store.
    pub fn kept_in(store: Option<&StateStore>) -> Self {
        store.map_or(Self::Omitted, |_| Self::Kept)
    }
}

/// A machine, its description, and the locations of its disks.
pub struct KnownGuest {
    /// The machine.
    pub found: Found,
    /// Its description.
    pub description: Description,
    /// The locations of its disks.
    pub places: MachinePlaces,
}

impl KnownGuest {
    /// Looks up a selected machine.
    pub fn find(chosen: &Chosen, hypervisors: &Hypervisors<'_>) -> Result<Self, Error> {
        let found = hypervisors.find(chosen)?;
        let description = found.machine.describe().map_err(holdfast_engine::Error::from)?;
        let places = places_of(&description, &DiskChoice::default(), runs::new_run()?);
        Ok(Self {
            found,
            description,
            places,
        })
    }

    /// All machines of libvirt. A machine that disappears meanwhile is skipped; one that cannot be examined causes a
    /// warning.
    pub fn all(hypervisors: &Hypervisors<'_>, context: &Context) -> Result<Vec<Self>, Error> {
        let mut guests = Vec::new();
        for chosen in hypervisors.all_of(Vec::new())? {
            match Self::find(&chosen, hypervisors) {
                Ok(guest) => guests.push(guest),
                Err(error) if error.is_no_such_machine() => {}
                Err(error) => {
                    let reason = error_text(&error);
                    let message = format!("{} is not frozen for this: {reason}", chosen.said);
                    context.console().warning(&message);
                }
            }
        }
        Ok(guests)
    }

    /// Running machines that have disks in the requested datasets by now, whether or not they were known
    /// before.
    pub fn newcomers(known: &[Self], wanted: &[HostSnapshotScope], hypervisors: &Hypervisors<'_>) -> Vec<Description> {
        let Ok(label) = runs::new_run() else { return Vec::new() };
        let describe = |chosen: &Chosen| hypervisors.find(chosen).ok()?.machine.describe().ok();
        let runs = |found: &Description| found.summary.state != MachineState::ShutOff;
        let is_there = |found: &Description| {
            let is_same = |guest: &&Self| {
                guest.description.summary.uuid == found.summary.uuid && guest.description.disks == found.disks
            };
            // Locating disks takes time and may access their folders, so known results are reused.
            let places = match known.iter().find(is_same) {
                Some(guest) => guest.places.clone(),
                None => places_of(found, &DiskChoice::default(), label),
            };
            machines_in([&places], wanted) == [true]
        };
        let all = hypervisors.all_of(Vec::new()).unwrap_or_default();
        let found = all.iter().filter_map(describe);
        found.filter(runs).filter(is_there).collect()
    }

    /// Its present description and disk locations: time has passed and hooks have run since it was found.
    fn refreshed(&self, run: u32) -> (Description, MachinePlaces) {
        match self.found.machine.describe() {
            Ok(now) if now.disks == self.description.disks => (now, self.places.clone()),
            Ok(now) => {
                let places = places_of(&now, &DiskChoice::default(), run);
                (now, places)
            }
            Err(_) => (self.description.clone(), self.places.clone()),
        }
    }

    /// The request for freezing or pausing the machine.
    ///
    /// If its state is stored, the machine is paused while files of that state are copied.
    pub fn request(
        &self,
        quiesce: Quiesce,
        state: GuestState,
        context: &Context,
    ) -> holdfast_engine::Result<GuestRequest<'_>> {
        let run = runs::new_run()?;
        let (description, places) = self.refreshed(run);
        let journal = runs::journal(context, &self.found.way);
        Ok(GuestRequest {
            machine: &*self.found.machine,
            has_to_stop: state == GuestState::Kept && (description.nvram.is_some() || description.tpm.is_some()),
            description,
            quiesce,
            places,
            memory: None,
            watchdog: Some(runs::watchdog(self.found.way.clone(), run, journal.as_ref())?),
            journal,
            run,
        })
    }
}

/// How a machine was treated during a host snapshot.
#[derive(Debug, Serialize)]
pub struct GuestDocument {
    name: String,
    uuid: String,
    /// "running", "paused" or "shut off".
    state: String,
    /// "memory", "file system", "crash" or "shut off".
    consistency: &'static str,
    /// How long its file systems were frozen; null if they were not.
    frozen_us: Option<u64>,
    /// How long it was paused; null if it was not.
    paused_us: Option<u64>,
    /// Why its file systems were not frozen; null if they were, or if that was not needed.
    not_frozen: Option<String>,
    /// Bytes of its memory; null if it was not saved.
    memory_bytes: Option<u64>,
}

impl From<&GuestReport> for GuestDocument {
    fn from(report: &GuestReport) -> Self {
        let micros = |duration: std::time::Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let (frozen, why) = match &report.quiesced {
            Quiesced::Yes { frozen, .. } => (Some(*frozen), None),
            Quiesced::NoAgent => (None, Some("it has no guest agent".to_owned())),
            Quiesced::Failed(reason) => (None, Some(reason.clone())),
            Quiesced::Off => (None, Some("--quiesce=off".to_owned())),
            Quiesced::NotNeeded => (None, None),
        };
        Self {
            name: report.name.clone(),
            uuid: report.uuid.clone(),
            state: report.state.to_string(),
            consistency: report.consistency(),
            frozen_us: frozen.map(micros),
            paused_us: report.paused.map(micros),
            not_frozen: why.filter(|_| report.memory_bytes.is_none()),
            memory_bytes: report.memory_bytes,
        }
    }
}

impl GuestDocument {
    /// The summary as text.
    pub fn line(&self) -> String {
        let time = |us| units::duration(std::time::Duration::from_micros(us));
        let mut parts = vec![match (&self.not_frozen, self.frozen_us) {
            _ if self.memory_bytes.is_some() => {
                format!("with {} of memory", units::bytes(self.memory_bytes.unwrap_or_default()))
            }
            (_, Some(us)) => format!("its file systems were frozen for {}", time(us)),
            (Some(why), None) => format!("crash-consistent: {why}"),
            (None, None) => self.state.clone(),
        }];
        parts.extend(self.paused_us.map(|us| format!("paused {}", time(us))));
        format!("{}: {}", self.name, parts.join(", "))
    }
}
