//! When to freeze the guest.
//!
//! A round sends what the guest wrote during the last one. While the guest writes more slowly than the link sends,
//! rounds shrink, down to a floor. After each round, the rule predicts how long the guest would be frozen, and decides:
//!
//! | condition, in this order | decision |
//! |---|---|
//! | the predicted time is at most the limit | freeze |
//! | the round was smaller than 0.8 times the one before, and neither limit below is reached | continue |
//! | a round did not shrink, for the first time | continue |
//! | 2 rounds without shrinking, 10 rounds, or more bytes sent again than the disk has | throttle, if allowed and not done |
//! | the same after throttling | freeze at a minimum, if allowed, or give up |

use std::time::Duration;

use crate::traffic::{Bandwidth, FrameBytes, LinkTraffic, WireShare, bytes_per_s};

/// Number of rounds after which the rule does not continue without a change.
const ROUND_COUNT_MAX: u32 = 10;
/// Number of rounds without shrinking after which it does not.
const STALLED_COUNT_MAX: u32 = 2;
/// Number of rounds among which it looks for a minimum.
const MINIMUM_ROUND_COUNT: usize = 5;

/// What to do if the rounds do not converge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unconverged {
    /// Stop the copy with an error; the guest has not been frozen.
    GiveUp,
    /// Freeze anyway, when little is left in comparison with the last rounds.
    FreezeAtMinimum,
}

/// Whether the guest's writes may be slowed down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThrottlePolicy {
    /// Never.
    Never,
    /// If the rounds do not converge without it.
    IfNeeded,
}

/// The limits of the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvergenceOptions {
    /// Longest predicted time for which the guest may be frozen.
    pub frozen_max: Duration,
    /// The part of the frozen time that the copy of the disk does not cause: state of devices, start at the
    /// destination.
    pub other_frozen: Duration,
    /// Whether the guest's writes may be slowed down.
    pub throttle: ThrottlePolicy,
    /// What to do if the rounds do not converge.
    pub unconverged: Unconverged,
}

/// What was measured by the end of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundMeasurement {
    /// Bytes that the round sent.
    pub sent_bytes: u64,
    /// How long it took.
    pub took: Duration,
    /// Bytes that are dirty now.
    pub dirty_bytes: u64,
    /// Round-trip time of a message.
    pub round_trip: Duration,
    /// The longest of the last times that the receiver needed to make data durable.
    pub sync: Duration,
    /// The longest of the last times that the tracker needed to take marks.
    pub take: Duration,
    /// What the connections have carried since the start of the copy.
    pub traffic: LinkTraffic,
}

/// The prediction after a round, with its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forecast {
    /// The number of the round.
    pub round: u32,
    /// What was measured.
    pub measured: RoundMeasurement,
    /// Bytes per second that the connection carries, after compression.
    pub bandwidth_bytes_per_s: u64,
    /// Time to send what is dirty.
    pub send: Duration,
    /// How long the guest would be frozen.
    pub frozen: Duration,
    /// The limit.
    pub frozen_max: Duration,
    /// The decision.
    pub decision: RoundDecision,
}

/// What follows a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundDecision {
    /// Prepare to freeze the guest: the prediction is within the limit.
    Freeze,
    /// Prepare to freeze the guest although the prediction exceeds the limit: little is left compared with other
    /// rounds.
    FreezeAtMinimum,
    /// Another round.
    Continue,
    /// Another round, and at most this many bytes may become dirty per second from now on.
    Throttle {
        /// The limit. The caller divides it by the amplification of its tracker to limit the writes of the guest.
        dirty_bytes_per_s_max: u64,
    },
    /// Stop: the rounds do not converge.
    GiveUp,
}

/// Decides after each round.
#[derive(Debug)]
pub(crate) struct ConvergenceRule {
    options: ConvergenceOptions,
    disk_bytes: u64,
    round: u32,
    /// Rounds since the start, or since throttling.
    tried_count: u32,
    stalled_count: u32,
    last_bytes: Option<u64>,
    resent_bytes: u64,
    is_throttled: bool,
    bandwidth: Bandwidth,
    /// The traffic that is in the bandwidth.
    counted: LinkTraffic,
    /// The frames that are in the shares.
    compressed: FrameBytes,
    /// What compression left of the data of the last rounds, and the larger of the last two: what is predicted.
    last_share: WireShare,
    share: WireShare,
    /// Dirty bytes after the rounds since the rule looks for a minimum.
    candidates: Vec<u64>,
    /// Time that broken promises took longer than predicted.
    overrun: Duration,
}

impl ConvergenceRule {
    pub(crate) fn new(options: ConvergenceOptions, disk_bytes: u64) -> Self {
        Self {
            options,
            disk_bytes,
            round: 0,
            tried_count: 0,
            stalled_count: 0,
            last_bytes: None,
            resent_bytes: 0,
            is_throttled: false,
            bandwidth: Bandwidth::Unknown,
            counted: LinkTraffic::default(),
            compressed: FrameBytes::default(),
            last_share: WireShare::WHOLE,
            share: WireShare::WHOLE,
            candidates: Vec::new(),
            overrun: Duration::ZERO,
        }
    }

    pub(crate) fn is_throttled(&self) -> bool {
        self.is_throttled
    }

    /// Records the first pass, which gives the bandwidth, and predicts.
    pub(crate) fn first_pass(&mut self, measured: RoundMeasurement) -> Forecast {
        self.measure_bandwidth(&measured);
        // What the guest writes may be of another kind than the rest of its disk: only rounds say how it compresses.
        self.compressed = measured.traffic.written;
        self.last_share = WireShare::WHOLE;
        self.share = WireShare::WHOLE;
        self.last_bytes = None;
        let decision = self.decide(&measured, Shrinking::Unknown);
        self.forecast(measured, decision)
    }

    /// Records a round and decides.
    pub(crate) fn round(&mut self, measured: RoundMeasurement) -> Forecast {
        self.round += 1;
        self.tried_count += 1;
        self.resent_bytes = self.resent_bytes.saturating_add(measured.sent_bytes);
        self.measure_bandwidth(&measured);
        let last_bytes = self.last_bytes.replace(measured.sent_bytes);
        let shrinking = match last_bytes {
            None => Shrinking::Unknown,
            Some(last) if measured.sent_bytes < last / 5 * 4 => Shrinking::Shrank,
            Some(_) => Shrinking::Stalled,
        };
        self.stalled_count = match shrinking {
            Shrinking::Stalled => self.stalled_count + 1,
            Shrinking::Shrank | Shrinking::Unknown => 0,
        };
        let decision = self.decide(&measured, shrinking);
        self.forecast(measured, decision)
    }

    /// Predicts from what is dirty now, without a round.
    pub(crate) fn predict(&self, measured: &RoundMeasurement) -> Duration {
        self.send_time(measured.dirty_bytes)
            + measured.round_trip * 2
            + measured.sync
            + measured.take
            + self.options.other_frozen
            + self.overrun
    }

    /// Records that the guest was frozen for too long, and was thawed: the next prediction is less hopeful.
    pub(crate) fn promise_broken(&mut self, frozen: Duration) {
        self.overrun += (frozen.saturating_sub(self.options.frozen_max) / 2).min(self.options.frozen_max / 4);
        self.tried_count = 0;
        self.stalled_count = 0;
        self.last_bytes = None;
    }

    /// The bytes that the link carries in `time`, without compression.
    pub(crate) fn bytes_in(&self, time: Duration) -> u64 {
        let bytes = u128::from(self.bandwidth.bytes_per_s()) * time.as_nanos() / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    fn decide(&mut self, measured: &RoundMeasurement, shrinking: Shrinking) -> RoundDecision {
        if self.predict(measured) <= self.options.frozen_max {
            return RoundDecision::Freeze;
        }
        let is_hopeless = self.stalled_count >= STALLED_COUNT_MAX
            || self.tried_count >= ROUND_COUNT_MAX
            || self.resent_bytes > self.disk_bytes && shrinking == Shrinking::Stalled;
        if self.candidates.is_empty() && !is_hopeless {
            return RoundDecision::Continue;
        }
        if self.options.throttle == ThrottlePolicy::IfNeeded && !self.is_throttled {
            self.is_throttled = true;
            self.tried_count = 0;
            self.stalled_count = 0;
            self.resent_bytes = 0;
            let dirty_bytes_per_s_max = (self.share.plain_bytes(self.bandwidth.bytes_per_s()) / 2).max(1);
            return RoundDecision::Throttle { dirty_bytes_per_s_max };
        }
        match self.options.unconverged {
            Unconverged::GiveUp => RoundDecision::GiveUp,
            Unconverged::FreezeAtMinimum => self.freeze_at_minimum(measured.dirty_bytes),
        }
    }

    /// Freezes when no more is dirty than in the last rounds.
    fn freeze_at_minimum(&mut self, dirty_bytes: u64) -> RoundDecision {
        let smallest = self.candidates.iter().min().copied().unwrap_or(u64::MAX);
        self.candidates.push(dirty_bytes);
        if self.candidates.len() >= MINIMUM_ROUND_COUNT && dirty_bytes <= smallest
            || self.candidates.len() >= 2 * MINIMUM_ROUND_COUNT
        {
            self.candidates.clear();
            return RoundDecision::FreezeAtMinimum;
        }
        RoundDecision::Continue
    }

    fn forecast(&self, measured: RoundMeasurement, decision: RoundDecision) -> Forecast {
        Forecast {
            round: self.round,
            measured,
            bandwidth_bytes_per_s: self.bandwidth.bytes_per_s(),
            send: self.send_time(measured.dirty_bytes),
            frozen: self.predict(&measured),
            frozen_max: self.options.frozen_max,
            decision,
        }
    }

    /// Learns from what the connections have carried since the last call: their bandwidth, where half of the weight belongs
    /// to the new value, and how the data compresses.
    pub(crate) fn measure_bandwidth(&mut self, measured: &RoundMeasurement) {
        const COUNTING_BYTES_MIN: u64 = 64 << 10;
        let traffic = measured.traffic.since(&self.counted);
        if traffic.applied_bytes >= COUNTING_BYTES_MIN {
            let wire_bytes = WireShare::of(traffic.written).wire_bytes(traffic.applied_bytes);
            self.bandwidth = self.bandwidth.measured(bytes_per_s(wire_bytes, traffic.applied_in));
            self.counted = measured.traffic;
        } else if measured.sent_bytes >= COUNTING_BYTES_MIN || self.bandwidth == Bandwidth::Unknown {
            self.bandwidth = self.bandwidth.guessed(bytes_per_s(measured.sent_bytes, measured.took));
        }
        let written = measured.traffic.written.since(self.compressed);
        if written.plain_bytes >= COUNTING_BYTES_MIN {
            let share = WireShare::of(written);
            self.share = share.max(self.last_share);
            self.last_share = share;
            self.compressed = measured.traffic.written;
        }
    }

    fn send_time(&self, bytes: u64) -> Duration {
        let wire_bytes = self.share.wire_bytes(bytes);
        let nanos = u128::from(wire_bytes) * 1_000_000_000 / u128::from(self.bandwidth.bytes_per_s().max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Whether a round was clearly smaller than the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shrinking {
    Unknown,
    Shrank,
    Stalled,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{
        ConvergenceOptions, ConvergenceRule, Forecast, RoundDecision, RoundMeasurement, ThrottlePolicy, Unconverged,
    };
    use crate::traffic::{FrameBytes, LinkTraffic};

    const MIB: u64 = 1 << 20;

    fn rule(throttle: ThrottlePolicy, unconverged: Unconverged) -> ConvergenceRule {
        let options = ConvergenceOptions {
            frozen_max: Duration::from_millis(50),
            other_frozen: Duration::ZERO,
            throttle,
            unconverged,
        };
        ConvergenceRule::new(options, 1024 * MIB)
    }

    /// A round of `sent` MiB over a link of 100 MiB/s.
    fn measured(sent: u64, dirty: u64) -> RoundMeasurement {
        RoundMeasurement {
            sent_bytes: sent * MIB,
            took: Duration::from_millis(sent * 10),
            dirty_bytes: dirty * MIB,
            round_trip: Duration::from_millis(1),
            sync: Duration::from_millis(5),
            take: Duration::from_millis(3),
            traffic: LinkTraffic::default(),
        }
    }

    /// The same, over a link that carries 10 MiB/s after compression to `wire` MiB.
    fn compressed(before: &RoundMeasurement, sent: u64, wire: u64, dirty: u64) -> RoundMeasurement {
        let mut traffic = before.traffic;
        traffic.add_applied(sent * MIB, Duration::from_millis(wire * 100));
        traffic.add_written(FrameBytes {
            plain_bytes: sent * MIB,
            wire_bytes: wire * MIB,
        });
        RoundMeasurement {
            traffic,
            ..measured(sent, dirty)
        }
    }

    /// A disk that compresses well, and a guest that writes what does not: the prediction is that without compression, and
    /// becomes better only when rounds have shown how the guest's data compresses.
    #[test]
    fn data_of_the_first_pass_says_nothing_about_how_the_rounds_compress() {
        let send = |forecast: Forecast| forecast.send.as_millis();
        let mut rule = rule(ThrottlePolicy::Never, Unconverged::GiveUp);
        let first = compressed(&measured(0, 0), 1000, 250, 10);
        let forecast = rule.first_pass(first);
        assert_eq!(forecast.bandwidth_bytes_per_s, 10 * MIB);
        assert_eq!(send(forecast), 1000);
        let second = compressed(&first, 10, 10, 5);
        assert_eq!(send(rule.round(second)), 500);
        let third = compressed(&second, 8, 2, 4);
        assert_eq!(send(rule.round(third)), 400, "the worse of two rounds counts");
        let fourth = compressed(&third, 8, 2, 4);
        assert_eq!(send(rule.round(fourth)), 100);
        let fifth = compressed(&fourth, 4, 4, 1);
        assert_eq!(send(rule.round(fifth)), 100);
    }

    /// Frames were read in 1 ms, and the receiver had them after a second.
    #[test]
    fn the_bandwidth_is_that_of_the_receiver_and_not_of_the_reads() {
        let mut rule = rule(ThrottlePolicy::Never, Unconverged::GiveUp);
        let queued = measured(8, 8);
        let guessed = rule.first_pass(queued);
        assert_eq!(guessed.bandwidth_bytes_per_s, 100 * MIB);
        let applied = compressed(&queued, 8, 8, 8);
        assert_eq!(rule.round(applied).bandwidth_bytes_per_s, 10 * MIB);
        // Nothing more was applied yet.
        let queued = RoundMeasurement {
            traffic: applied.traffic,
            ..queued
        };
        assert_eq!(rule.round(queued).bandwidth_bytes_per_s, 10 * MIB);
    }

    #[test]
    fn shrinking_rounds_end_in_a_freeze_with_the_predicted_time() {
        let mut rule = rule(ThrottlePolicy::Never, Unconverged::GiveUp);
        assert_eq!(rule.first_pass(measured(1024, 200)).decision, RoundDecision::Continue);
        assert_eq!(rule.round(measured(200, 60)).decision, RoundDecision::Continue);
        assert_eq!(rule.round(measured(60, 20)).decision, RoundDecision::Continue);
        let forecast = rule.round(measured(20, 4));
        assert_eq!(forecast.decision, RoundDecision::Freeze);
        assert_eq!(forecast.frozen, Duration::from_millis(40 + 2 + 5 + 3));
    }

    #[test]
    fn the_verdict_on_a_guest_that_writes_too_fast_comes_within_two_rounds_of_the_fact() {
        let mut never = rule(ThrottlePolicy::Never, Unconverged::GiveUp);
        never.first_pass(measured(1024, 200));
        assert_eq!(never.round(measured(200, 200)).decision, RoundDecision::Continue);
        assert_eq!(never.round(measured(200, 200)).decision, RoundDecision::Continue);
        assert_eq!(never.round(measured(200, 200)).decision, RoundDecision::GiveUp);

        let mut throttled = rule(ThrottlePolicy::IfNeeded, Unconverged::FreezeAtMinimum);
        throttled.first_pass(measured(1024, 200));
        throttled.round(measured(200, 200));
        throttled.round(measured(200, 200));
        let decision = throttled.round(measured(200, 200)).decision;
        let dirty_bytes_per_s_max = 50 * MIB;
        assert_eq!(decision, RoundDecision::Throttle { dirty_bytes_per_s_max });
        assert_eq!(throttled.round(measured(200, 200)).decision, RoundDecision::Continue);
        let rounds = (0..20)
            .position(|dirty| throttled.round(measured(200, 200 - dirty)).decision == RoundDecision::FreezeAtMinimum);
        assert!(rounds.is_some_and(|count| count < 8), "{rounds:?}");
    }

    #[test]
    fn a_slow_shrink_ends_after_ten_rounds() {
        let mut rule = rule(ThrottlePolicy::Never, Unconverged::GiveUp);
        rule.first_pass(measured(1024, 900));
        let mut sent = 90_000;
        let decisions: Vec<_> = (0..10)
            .map(|_| {
                sent = sent * 7 / 10;
                rule.round(measured(sent, 900)).decision
            })
            .collect();
        assert!(
            decisions[..9]
                .iter()
                .all(|decision| *decision == RoundDecision::Continue)
        );
        assert_eq!(decisions[9], RoundDecision::GiveUp);
    }
}
