//! What a history is made of.

use std::time::Duration;

use holdfast_block::{SeededRandom, to_usize};
use holdfast_transfer::{Capabilities, CopyPurpose, FreezeTrigger, PriorContent, ReceiverId, ReceiverOptions};

pub(super) const UNIT_BYTES: u32 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Faults {
    ConnectionBreaks,
    ReceiverLosesPower,
}

/// When failures happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultFocus {
    Anywhere,
    /// Mostly while the disk changes its owner.
    Handover,
}

#[derive(Debug, Clone)]
pub(super) struct WorldOptions {
    pub(super) seed: u64,
    pub(super) unit_count: u64,
    /// Of the sender, and of all receivers.
    pub(super) capabilities: Capabilities,
    pub(super) receiver_capabilities: Capabilities,
    pub(super) stream_count: u16,
    pub(super) fault_count: u64,
    pub(super) focus: FaultFocus,
    pub(super) stale_target_count: u64,
    /// Number of writes of the guest, and how many steps there are for each.
    pub(super) write_count: u64,
    pub(super) write_interval: u64,
    pub(super) frozen_max: Duration,
    pub(super) trigger: FreezeTrigger,
    pub(super) purpose: CopyPurpose,
    /// What the targets held before.
    pub(super) prior: PriorContent,
    pub(super) cut_at_frame: Option<u64>,
    pub(super) cut_fault: Faults,
}

impl WorldOptions {
    /// A copy without failures of a disk that is not written.
    pub(super) fn quiet(seed: u64) -> Self {
        Self {
            seed,
            unit_count: 128,
            capabilities: Capabilities::ALL,
            receiver_capabilities: Capabilities::ALL,
            stream_count: 1,
            fault_count: 0,
            focus: FaultFocus::Anywhere,
            stale_target_count: 0,
            write_count: 0,
            write_interval: 1,
            frozen_max: Duration::from_secs(10),
            trigger: FreezeTrigger::WhenReady,
            purpose: CopyPurpose::Handover,
            prior: PriorContent::Unrelated,
            cut_at_frame: None,
            cut_fault: Faults::ConnectionBreaks,
        }
    }

    pub(super) fn random(seed: u64) -> Self {
        let mut random = SeededRandom::new(seed);
        let mut some = || match random.below(6) {
            0 => Capabilities::default(),
            1 => Capabilities::SYNC | Capabilities::COMPRESSION,
            2 => Capabilities::HASHES | Capabilities::COMPRESSION,
            3 => Capabilities::SYNC | Capabilities::HASHES,
            _ => Capabilities::ALL,
        };
        let (capabilities, receiver_capabilities) = (some(), some());
        Self {
            seed: random.next_u64(),
            unit_count: 4 + random.below(28),
            capabilities,
            receiver_capabilities,
            stream_count: 1 + random.below(4) as u16,
            fault_count: random.below(12),
            focus: if random.one_in(2) {
                FaultFocus::Anywhere
            } else {
                FaultFocus::Handover
            },
            stale_target_count: random.below(4),
            write_count: random.below(600),
            write_interval: 2 + random.below(40),
            frozen_max: Duration::from_millis([20, 60, 200, 2000][to_usize(random.below(4))]),
            trigger: if random.one_in(2) {
                FreezeTrigger::WhenReady
            } else {
                FreezeTrigger::OnRequest
            },
            purpose: if random.one_in(4) {
                CopyPurpose::Duplicate
            } else {
                CopyPurpose::Handover
            },
            prior: if random.one_in(4) {
                PriorContent::Similar
            } else {
                PriorContent::Unrelated
            },
            cut_at_frame: None,
            cut_fault: Faults::ConnectionBreaks,
        }
    }

    /// The options of the receiver with this number.
    pub(super) fn receiver(&self, size_bytes: u64, number: u8) -> ReceiverOptions {
        ReceiverOptions {
            receiver: ReceiverId([number; 16]),
            capabilities: self.receiver_capabilities,
            window_bytes: 8 * (u64::from(UNIT_BYTES) + 100),
            stream_count_max: 3,
            disk_bytes_max: size_bytes,
            prior: self.prior,
            program: "simulation".to_owned(),
        }
    }
}
