//! Disks of a running machine, whose writes QEMU records.

use std::sync::{Mutex, PoisonError};

use holdfast_block::{BlockDevice, DirtyBitmap};
use holdfast_engine::{Quiesced, TrackedMachine};
use holdfast_serve::nbd::client::NbdDevice;
use holdfast_transfer::TrackerCheck;

use crate::error::Result;
use crate::source::{Freezer, LiveSource, SourceConsistency};

/// A disk of a machine, as QEMU exports it while the guest writes to it.
pub struct TrackedSource<'a> {
    machine: &'a TrackedMachine<'a>,
    number: usize,
    device: NbdDevice,
    freezer: &'a dyn Freezer,
}

impl<'a> TrackedSource<'a> {
    /// The disk `number` of the machine, which `freezer` freezes.
    pub fn open(machine: &'a TrackedMachine<'a>, number: usize, freezer: &'a dyn Freezer) -> Result<Self> {
        Ok(Self {
            device: machine.open(number)?,
            machine,
            number,
            freezer,
        })
    }
}

impl LiveSource for TrackedSource<'_> {
    fn device(&self) -> &dyn BlockDevice {
        &self.device
    }

    fn granularity_bytes(&self) -> u32 {
        self.machine.granularity_bytes()
    }

    /// QEMU records since before this source was opened. Marks from before a restart only add to what is sent.
    fn start_tracking(&self) -> Result<()> {
        Ok(())
    }

    fn take_marks(&self) -> Result<DirtyBitmap> {
        Ok(self.machine.take_marks(self.number)?)
    }

    fn count_marks(&self) -> Result<u64> {
        self.machine.drop_read_marks(self.number)?;
        // What a check says about an invalid tracker ends the copy.
        Ok(self.machine.dirty_bytes(self.number)?.unwrap_or_default())
    }

    fn check(&self) -> Result<TrackerCheck> {
        let counted = self.machine.dirty_bytes(self.number)?;
        Ok(match counted {
            Some(dirty_bytes) => TrackerCheck::Valid { dirty_bytes },
            None => TrackerCheck::Invalid,
        })
    }

    fn freeze(&self) -> Result<()> {
        self.freezer.freeze()
    }

    fn thaw(&self) -> Result<()> {
        self.freezer.thaw()
    }

    fn throttle(&self, dirty_bytes_per_s_max: u64) -> Result<bool> {
        Ok(self.machine.limit_writes(self.number, dirty_bytes_per_s_max)?)
    }

    fn unthrottle(&self) -> Result<()> {
        Ok(self.machine.unlimit_writes()?)
    }

    fn stop_tracking(&self) -> Result<()> {
        self.unthrottle()
    }

    fn consistency(&self) -> SourceConsistency {
        self.freezer.consistency()
    }
}

/// Pauses a machine, with the file systems of its guest frozen if possible.
pub struct MachineFreezer<'a> {
    machine: &'a TrackedMachine<'a>,
    quiesced: Mutex<Option<Quiesced>>,
}

impl<'a> MachineFreezer<'a> {
    /// For this machine.
    pub fn new(machine: &'a TrackedMachine<'a>) -> Self {
        Self {
            machine,
            quiesced: Mutex::default(),
        }
    }

    /// How the guest was quiesced in the last pause; none before its end.
    pub fn quiesced(&self) -> Option<Quiesced> {
        self.quiesced.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Freezer for MachineFreezer<'_> {
    fn freeze(&self) -> Result<()> {
        Ok(self.machine.pause()?)
    }

    fn thaw(&self) -> Result<()> {
        if let Some(quiesced) = self.machine.resume()? {
            *self.quiesced.lock().unwrap_or_else(PoisonError::into_inner) = Some(quiesced);
        }
        Ok(())
    }

    fn consistency(&self) -> SourceConsistency {
        match self.quiesced() {
            Some(Quiesced::Yes { .. }) => SourceConsistency::FileSystem,
            _ => SourceConsistency::Crash,
        }
    }
}
