//! The messages of a front end.
//!
//! A front end passes the memory of its guest and the places of the rings, and starts and stops queues. Every value is
//! checked before it is used.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use super::chain::IndirectTables;
use super::config::{QUEUE_SIZE_MAX, WriteCache, features};
use super::event::VhostUserEvent;
use super::export::AcceptedWrites;
use super::inflight::{InflightRegion, Predecessor};
use super::memory::{GuestMap, MemorySeal, NoMemory, REGION_COUNT_MAX, RegionPlace, seal_of};
use super::notification::without_blocking;
use super::ring::{RingActivity, RingContext, RingFeatures, RingPlace, RingResources, RunningRing};

/// Why a front end is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionFailure {
    Invalid(&'static str),
    /// See [`FrontEndGone::WritesLost`](super::FrontEndGone::WritesLost).
    WritesLost,
}

/// The state of a connection.
pub(super) struct VhostSession {
    context: Arc<RingContext>,
    map: GuestMap,
    accepted_features: u64,
    cache: WriteCache,
    rings: Vec<RingSlot>,
    inflight: Option<InflightRegion>,
    /// Whether this session has created the region of requests in progress.
    is_own_inflight: bool,
    has_warned: bool,
    /// Whether a valid message has arrived.
    pub(super) has_entered: bool,
    /// The reason of the last error.
    pub(super) failure: Option<SessionFailure>,
}

/// A queue, as the front end has described it.
struct RingSlot {
    size: u16,
    place: Option<RingAddresses>,
    base: u16,
    call: Option<File>,
    activity: RingActivity,
    running: Option<RunningRing>,
}

/// Addresses in the memory of the guest.
#[derive(Debug, Clone, Copy)]
struct RingAddresses {
    descriptors: u64,
    available: u64,
    used: u64,
}

impl RingSlot {
    fn new() -> Self {
        Self {
            size: QUEUE_SIZE_MAX,
            place: None,
            base: 0,
            call: None,
            activity: RingActivity::Paused,
            running: None,
        }
    }

    /// Stops the queue, if it runs.
    fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            let stopped = running.stop();
            self.base = stopped.base;
            self.call = stopped.call;
        }
    }
}

impl VhostSession {
    pub(super) fn new(context: Arc<RingContext>) -> Self {
        let queue_count = usize::from(context.export.disk.queue_count);
        Self {
            rings: (0..queue_count).map(|_| RingSlot::new()).collect(),
            context,
            map: GuestMap::default(),
            accepted_features: 0,
            cache: WriteCache::WriteBack,
            inflight: None,
            is_own_inflight: false,
            has_warned: false,
            has_entered: false,
            failure: None,
        }
    }

    /// Completes the requests in progress, and flushes.
    pub(super) fn end(&mut self) -> holdfast_block::Result<()> {
        self.rings.iter_mut().for_each(RingSlot::stop);
        if let Some(device) = self.context.export.device.writer() {
            device.flush()?;
        }
        if let Some(inflight) = &self.inflight {
            inflight.set_flushed();
        }
        Ok(())
    }

    fn refuse<T>(&mut self, reason: &'static str) -> Result<T> {
        self.failure = Some(SessionFailure::Invalid(reason));
        Err(Error::InvalidParam)
    }

    fn ring(&mut self, index: u32) -> Result<&mut RingSlot> {
        let found = usize::try_from(index).ok().filter(|index| *index < self.rings.len());
        let failure = &mut self.failure;
        let ring = found.and_then(|index| self.rings.get_mut(index));
        ring.ok_or_else(|| {
            *failure = Some(SessionFailure::Invalid("there is no such queue"));
            Error::InvalidParam
        })
    }

    fn set_map(&mut self, map: std::result::Result<GuestMap, NoMemory>) -> Result<()> {
        match map {
            Ok(map) => {
                self.context.memory.set(map.clone());
                self.map = map;
                Ok(())
            }
            Err(NoMemory(reason)) => self.refuse(reason),
        }
    }

    fn check_seal(&mut self, file: &File) {
        if seal_of(file) == MemorySeal::Unsealed && !self.has_warned {
            self.has_warned = true;
            self.context.events.vhost_user_event(&VhostUserEvent::UnsealedMemory {
                export: &self.context.export.name,
                peer: &self.context.peer,
            });
        }
    }

    /// Sets the cache mode that follows from features and configuration (section 5.2.5).
    fn update_cache(&self) {
        let is_write_through = self.accepted_features & features::FLUSH == 0 || self.cache == WriteCache::WriteThrough;
        self.context.is_write_through.store(is_write_through, Ordering::Release);
    }

    fn has_protocol_features(&self) -> bool {
        self.accepted_features & features::PROTOCOL_FEATURES != 0
    }

    fn start_ring(&mut self, index: u8, kick: File) -> Result<()> {
        let ring_features = RingFeatures {
            indirect: if self.accepted_features & features::INDIRECT_DESC == 0 {
                IndirectTables::NotNegotiated
            } else {
                IndirectTables::Negotiated
            },
            has_event_index: self.accepted_features & features::EVENT_IDX != 0,
        };
        let is_always_enabled = !self.has_protocol_features();
        let number = usize::from(index);
        let inflight = self.inflight.as_ref().and_then(|region| region.queue(number));
        let context = Arc::clone(&self.context);
        let ring = self.ring(u32::from(index))?;
        ring.stop();
        let Some(place) = ring.place else {
            return self.refuse("a queue is started before its place is known");
        };
        let resources = RingResources {
            place: RingPlace {
                size: ring.size,
                descriptors: place.descriptors,
                available: place.available,
                used: place.used,
                base: ring.base,
            },
            features: ring_features,
            kick,
            call: ring.call.take(),
            inflight,
            activity: if is_always_enabled {
                RingActivity::Enabled
            } else {
                ring.activity
            },
        };
        match RunningRing::start(&context, number, resources) {
            Ok(running) => {
                ring.running = Some(running);
                Ok(())
            }
            Err(reason) => self.refuse(reason),
        }
    }

    /// Refuses a front end that continues with writes that are lost.
    fn check_predecessor(&mut self, region: &InflightRegion) -> Result<()> {
        let export = &self.context.export;
        let is_complete = match (region.predecessor(self.context.server), export.accepted_writes) {
            _ if export.device.writer().is_none() => true,
            (Predecessor::None | Predecessor::Same, _)
            | (_, AcceptedWrites::Stay)
            | (Predecessor::Flushed, AcceptedWrites::NeedFlush) => true,
            (Predecessor::Killed, AcceptedWrites::NeedFlush) | (_, AcceptedWrites::Discarded) => false,
        };
        if is_complete {
            return Ok(());
        }
        self.failure = Some(SessionFailure::WritesLost);
        Err(Error::BackendInternalError)
    }
}

impl VhostUserBackendReqHandlerMut for VhostSession {
    fn set_owner(&mut self) -> Result<()> {
        self.has_entered = true;
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.rings.iter_mut().for_each(RingSlot::stop);
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.refuse("the reset of a device was not offered")
    }

    fn get_features(&mut self) -> Result<u64> {
        self.has_entered = true;
        Ok(self.context.export.disk.features())
    }

    fn set_features(&mut self, accepted: u64) -> Result<()> {
        if accepted & !self.context.export.disk.features() != 0 {
            return self.refuse("the front end accepts features that were not offered");
        }
        self.accepted_features = accepted;
        self.update_cache();
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let mut map = Ok(GuestMap::default());
        for (region, file) in regions.iter().zip(files) {
            self.check_seal(&file);
            let place = place_of(region);
            map = map.and_then(|map| map.with(place, file));
        }
        self.set_map(map).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, count: u32) -> Result<()> {
        let size = u16::try_from(count)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= QUEUE_SIZE_MAX);
        let Some(size) = size else {
            return self.refuse("the size of a ring must be a power of two, and at most 1024");
        };
        self.ring(index)?.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let place = |address| self.map.guest_address(address);
        let (Some(descriptors), Some(used), Some(available)) = (place(descriptor), place(used), place(available))
        else {
            return self.refuse("a ring is outside the memory of the guest");
        };
        self.ring(index)?.place = Some(RingAddresses {
            descriptors,
            available,
            used,
        });
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let Ok(base) = u16::try_from(base) else {
            return self.refuse("the index of a ring is too large");
        };
        self.ring(index)?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let ring = self.ring(index)?;
        ring.stop();
        Ok(VhostUserVringState::new(index, u32::from(ring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        match file.map(without_blocking) {
            Some(Ok(kick)) => self.start_ring(index, kick),
            Some(Err(_)) | None => self.refuse("a queue needs a file for its notifications"),
        }
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let Ok(call) = file.map(without_blocking).transpose() else {
            return self.refuse("the file of notifications is not valid");
        };
        let ring = self.ring(u32::from(index))?;
        match &ring.running {
            Some(running) => running.set_call(call),
            None => ring.call = call,
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, _file: Option<File>) -> Result<()> {
        self.ring(u32::from(index)).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, accepted: u64) -> Result<()> {
        let offered = self.get_protocol_features()?.bits();
        if accepted & !offered != 0 {
            return self.refuse("the front end accepts protocol features that were not offered");
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.context.export.disk.queue_count))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let ring = self.ring(index)?;
        ring.activity = if enable {
            RingActivity::Enabled
        } else {
            RingActivity::Paused
        };
        if let Some(running) = &ring.running {
            running.set_activity(ring.activity);
        }
        Ok(())
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let space = self.context.export.disk.space(self.cache, offset, size);
        space.ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let Some(cache) = self.context.export.disk.chosen_cache(offset, bytes) else {
            return self.refuse("the front end writes to a constant part of the configuration");
        };
        self.cache = cache;
        self.update_cache();
        Ok(())
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        self.refuse("a disk has no display")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidParam)
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queue_count, queue_size) = (wanted.num_queues, wanted.queue_size);
        let is_valid = queue_count > 0 && queue_count <= self.context.export.disk.queue_count;
        if !is_valid || queue_size == 0 || queue_size > QUEUE_SIZE_MAX {
            return self.refuse("the front end has more queues, or larger ones, than were offered");
        }
        let Ok((region, file)) = InflightRegion::create(queue_count, queue_size) else {
            return self.refuse("no memory for requests in progress");
        };
        self.inflight = Some(region);
        self.is_own_inflight = true;
        let size_bytes = InflightRegion::size_bytes(queue_count, queue_size);
        Ok((VhostUserInflight::new(size_bytes, 0, queue_count, queue_size), file))
    }

    fn set_inflight_fd(&mut self, described: &VhostUserInflight, file: File) -> Result<()> {
        let (queue_count, queue_size) = (described.num_queues, described.queue_size);
        if queue_count > self.context.export.disk.queue_count
            || InflightRegion::size_bytes(queue_count, queue_size) > described.mmap_size
        {
            return self.refuse("the region of requests in progress is too small");
        }
        self.check_seal(&file);
        match InflightRegion::open(file, described.mmap_offset, queue_count, queue_size) {
            Ok(region) => {
                if !self.is_own_inflight {
                    self.check_predecessor(&region)?;
                }
                self.inflight = Some(region);
                Ok(())
            }
            Err(NoMemory(reason)) => self.refuse(reason),
        }
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGION_COUNT_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<u64>> {
        self.check_seal(&file);
        let map = self.map.with(place_of(region), file);
        self.set_map(map).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let map = self.map.without(place_of(region));
        self.set_map(map)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidParam)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidParam)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidParam)
    }

    fn set_log_base(&mut self, _log: &vhost::vhost_user::message::VhostUserLog, _file: File) -> Result<()> {
        Err(Error::InvalidParam)
    }
}

fn place_of(region: &VhostUserMemoryRegion) -> RegionPlace {
    RegionPlace {
        guest_address: region.guest_phys_addr,
        size_bytes: region.memory_size,
        user_address: region.user_addr,
        file_offset: region.mmap_offset,
    }
}
