//! The bitmaps of frozen disks: that of the previous snapshot, which names the changes, and that of this one, which
//! starts.

use holdfast_block::{BlockDevice, DirtyBitmap, to_usize};
use holdfast_host::qemu::{Layer, Layers, PointInTime, QemuDisk};
use holdfast_host::qmp::query_with_retries;
use holdfast_serve::nbd::client::{ALLOCATION_DEPTH, Endpoint, NbdDevice, NbdOptions};

use super::{BitmapProof, FrozenDevice, FrozenDisk, GuestFreezer};
use crate::capture::qemu::changes::{ReadAll, check_spots};
use crate::capture::qemu::proof::{MARK_BYTES, NextBitmap, Proof};
use crate::capture::sink::History;
use crate::job::{Job, Result};

/// What has changed, or why that is not known.
type BitmapResult<T> = std::result::Result<T, ReadAll>;

impl<'a> GuestFreezer<'a> {
    /// The layers of all disks, if a later backup uses a bitmap.
    pub(super) fn layers(&self, wanted: &[(String, QemuDisk)]) -> Result<Option<Layers>> {
        if self.names.is_none() || wanted.is_empty() {
            return Ok(None);
        }
        let layers = query_with_retries(self.request.machine.monitor(), self.job.clock, &Layers::query);
        layers.map(Some).map_err(|error| self.failed(error))
    }

    /// The bitmap of each disk that may name the changes since the previous snapshot.
    pub(in crate::capture::qemu) fn proofs(&self, wanted: &[(String, QemuDisk)]) -> Result<Vec<BitmapProof>> {
        let layers = self.layers(wanted)?;
        let proof = |(target, disk): &(String, QemuDisk)| {
            let parent = self.before.and_then(|before| before.parent).ok_or(ReadAll::NoParent)?;
            let before = parent.disk(Some(target)).map_err(|_| ReadAll::NewDisk)?;
            let layers = layers.as_ref().and_then(|layers| layers.of(&disk.node));
            Proof::find(layers.as_deref(), disk.size_bytes, &before.notes, before.size_bytes)
        };
        Ok(wanted.iter().map(proof).collect())
    }

    /// The name of the bitmap that this run starts for a disk.
    pub(super) fn next_bitmap(&self, number: usize) -> Option<String> {
        let number = u32::try_from(number).expect("a machine has fewer disks");
        self.names.as_ref().map(|names| names.next(number))
    }

    /// The bitmap that this run has started for a disk.
    pub(super) fn next(&self, number: usize, layers: Option<&[Layer]>, disk: &QemuDisk) -> Option<NextBitmap> {
        let seed = u64::from(self.request.capture.run) << 32 | number as u64;
        Some(NextBitmap::new(
            self.next_bitmap(number)?,
            layers,
            disk.size_bytes,
            seed,
        ))
    }

    /// The bitmaps of earlier runs for this repository, with their nodes.
    pub(super) fn earlier_bitmaps(&self, wanted: &[(String, QemuDisk)]) -> Vec<(String, String)> {
        let mut old_bitmaps = Vec::new();
        let Some(names) = &self.names else { return old_bitmaps };
        for (_, disk) in wanted {
            let own = disk
                .bitmaps
                .iter()
                .filter(|bitmap| names.is_of_this_repository(&bitmap.name));
            old_bitmaps.extend(own.map(|bitmap| (disk.node.clone(), bitmap.name.clone())));
        }
        old_bitmaps
    }

    /// The changes of a disk, if the bitmap has its witness and passes the spot checks. `above` serves the map of the
    /// layers above the bitmap.
    pub(super) fn changes(
        &self,
        device: &FrozenDevice<'_>,
        context: &str,
        proof: &Proof,
        above: Option<(&Endpoint, &str)>,
        target: &str,
    ) -> BitmapResult<DirtyBitmap> {
        let Some(History {
            repository,
            parent: Some(parent),
            ..
        }) = self.before
        else {
            return Err(ReadAll::NoParent);
        };
        let name = context.trim_start_matches("qemu:dirty-bitmap:");
        let mut changed = device
            .bitmaps()
            .dirty_bitmap(name)
            .map_err(|error| ReadAll::NotTold(error.to_string()))?;
        if !proof.is_witnessed(&changed) {
            return Err(ReadAll::BegunAnew);
        }
        // A parent that cannot be read is reported when it is used.
        let before = repository.open_disk(parent.id, Some(target)).ok();
        let before = before.as_ref().map(|before| before as &dyn BlockDevice);
        if let Some(before) = before {
            unmark(&mut changed, device, before, &proof.witness);
        }
        if proof.below.is_some() {
            let (endpoint, export) = above.ok_or(ReadAll::LayersUnknown)?;
            changed
                .merge(&written_above(endpoint, export, proof.layer_count, self.job)?)
                .map_err(|error| ReadAll::NotTold(error.to_string()))?;
        }
        if let Some(before) = before {
            check_spots(device, &changed, before, u64::from(self.request.capture.run))?;
        }
        Ok(changed)
    }

    /// Marks the witness of each new bitmap. All disks have been read, so the marked ranges are not needed any more.
    pub(super) fn keep_witnesses(&self, cut: &PointInTime, disks: &[FrozenDisk<'a>]) {
        for (number, disk) in disks.iter().enumerate() {
            let Some(next) = &disk.next else { continue };
            if let Err(error) = self.keep_witness(cut, number, disk, next) {
                self.job.progress.note(&format!(
                    "{}: the bitmap {} has no witness, so the next backup reads everything: {error}",
                    self.request.capture.name, next.name
                ));
            }
        }
    }

    fn keep_witness(
        &self,
        cut: &PointInTime,
        number: usize,
        disk: &FrozenDisk<'a>,
        next: &NextBitmap,
    ) -> std::result::Result<(), String> {
        let monitor = self.request.machine.monitor();
        cut.begin_witness(monitor, number).map_err(|error| error.to_string())?;
        for offset in &next.witness {
            let end = (offset + MARK_BYTES).min(disk.device.size_bytes());
            disk.device.touch(*offset..end).map_err(|error| error.to_string())?;
        }
        let kept = cut.keep_witness(monitor, number, &disk.node, &next.name);
        kept.map_err(|error| error.to_string())
    }
}

/// Clears marks of a bitmap where nothing has changed: they were made for the witness.
fn unmark(changed: &mut DirtyBitmap, device: &FrozenDevice<'_>, before: &dyn BlockDevice, witness: &[u64]) {
    let (mut now, mut then) = (vec![0; to_usize(MARK_BYTES)], vec![0; to_usize(MARK_BYTES)]);
    for offset in witness {
        let end = (offset + MARK_BYTES).min(device.size_bytes()).min(before.size_bytes());
        let length = to_usize(end.saturating_sub(*offset));
        let (now, then) = (&mut now[..length], &mut then[..length]);
        let is_read = device.look_at(now, *offset).is_ok() && before.read_at(then, *offset).is_ok();
        if is_read && now == then {
            changed.clear(*offset..end);
        }
    }
}

/// The ranges for which the layers above a bitmap have their own clusters.
fn written_above(endpoint: &Endpoint, export: &str, layer_count: u64, job: Job<'_>) -> BitmapResult<DirtyBitmap> {
    let options = NbdOptions {
        contexts: vec![ALLOCATION_DEPTH.to_owned()],
        is_stopped: Some(job.interrupt.question()),
        ..NbdOptions::default()
    };
    let device = NbdDevice::connect(endpoint, export, options).map_err(|error| ReadAll::NotTold(error.to_string()))?;
    device
        .allocated_above(layer_count)
        .map_err(|error| ReadAll::NotTold(error.to_string()))
}
