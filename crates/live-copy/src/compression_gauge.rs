//! Whether frames that wait to be written should be compressed meanwhile.
//!
//! Compression gains time if the connection is slower than the compression: both work at the same time, so a frame takes
//! as long as the slower of them. It takes a processor that may be needed for ssh or for guests, so the connection has to
//! be clearly slower. Both are measured all the time, and neither is assumed to stay as it is.
//!
//! | measured | decision |
//! |---|---|
//! | the connection takes less than twice as long for a byte as the compression | frames are not compressed |
//! | the last frame did not become smaller | 1 frame is skipped; after further ones 2, 4, 8, and then always 16 |

use std::time::Duration;

/// How much slower than the compression a connection has to be.
const SLOWNESS: u32 = 2;
/// What is assumed of a processor until frames were compressed: 333 MB/s.
const ASSUMED: Pace = Pace {
    bytes: 1 << 20,
    time: Duration::from_micros(3146),
};
/// Bytes from which on older measurements lose half of their weight.
const REMEMBERED_BYTES: u64 = 4 << 20;
/// Less says nothing about a connection: its buffers take it.
const WRITTEN_BYTES_MIN: u64 = 1 << 20;
/// Largest number of frames that are skipped after one that did not become smaller.
const SKIPPED_COUNT_MAX: u32 = 16;

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompressionResult {
    Smaller,
    NotSmaller,
}

/// What to do with the next frame that could be compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompressionChoice {
    Compress,
    Skip,
}

/// Measures a connection and the compression.
#[derive(Debug)]
pub(crate) struct CompressionGauge {
    connection: Pace,
    compression: Pace,
    /// Number of frames to skip now, and after the last one that did not become smaller.
    skip_count: u32,
    last_skip_count: u32,
}

impl Default for CompressionGauge {
    fn default() -> Self {
        Self {
            connection: Pace::default(),
            compression: ASSUMED,
            skip_count: 0,
            last_skip_count: 0,
        }
    }
}

impl CompressionGauge {
    /// So many bytes were written in `time`, most of which the connection may have needed to take them.
    pub(crate) fn written(&mut self, bytes: u64, time: Duration) {
        self.connection.add(bytes, time);
    }

    /// A frame was compressed, or an attempt was made.
    pub(crate) fn compressed(&mut self, bytes: u64, time: Duration, result: CompressionResult) {
        self.compression.add(bytes, time);
        self.last_skip_count = match result {
            CompressionResult::Smaller => 0,
            CompressionResult::NotSmaller => (self.last_skip_count * 2).clamp(1, SKIPPED_COUNT_MAX),
        };
        self.skip_count = self.last_skip_count;
    }

    /// Whether the connection is slow enough.
    pub(crate) fn is_worthwhile(&self) -> bool {
        self.connection.bytes >= WRITTEN_BYTES_MIN && self.connection.is_slower_than(&self.compression, SLOWNESS)
    }

    /// Decides about one frame.
    pub(crate) fn choose(&mut self) -> CompressionChoice {
        if self.skip_count == 0 {
            return CompressionChoice::Compress;
        }
        self.skip_count -= 1;
        CompressionChoice::Skip
    }
}

/// Bytes and the time for them, where older ones have less weight.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    bytes: u64,
    time: Duration,
}

impl Pace {
    fn add(&mut self, bytes: u64, time: Duration) {
        if self.bytes >= REMEMBERED_BYTES {
            self.bytes /= 2;
            self.time /= 2;
        }
        self.bytes += bytes;
        self.time += time;
    }

    /// Whether this one takes `factor` times as long for a byte, or longer.
    fn is_slower_than(&self, other: &Self, factor: u32) -> bool {
        self.time.as_nanos() * u128::from(other.bytes)
            >= other.time.as_nanos() * u128::from(self.bytes) * u128::from(factor)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{CompressionChoice, CompressionGauge, CompressionResult};

    const MIB: u64 = 1 << 20;

    fn written(gauge: &mut CompressionGauge, mib: u64, mib_per_s: u64) {
        for _ in 0..mib {
            gauge.written(MIB, Duration::from_secs(1) / u32::try_from(mib_per_s).unwrap());
        }
    }

    #[test]
    fn only_a_slow_connection_is_worth_compression() {
        let mut gauge = CompressionGauge::default();
        assert!(!gauge.is_worthwhile(), "nothing is known");
        gauge.written(64 << 10, Duration::from_secs(1));
        assert!(!gauge.is_worthwhile(), "too little is known");
        let mut gauge = CompressionGauge::default();
        written(&mut gauge, 20, 400);
        assert!(!gauge.is_worthwhile());
        // A gigabit.
        written(&mut gauge, 20, 112);
        assert!(gauge.is_worthwhile());
        written(&mut gauge, 20, 1000);
        assert!(!gauge.is_worthwhile(), "it has become fast");
    }

    /// The buffers of the system take the first megabytes at once.
    #[test]
    fn a_slow_connection_is_recognized_behind_its_buffers() {
        let mut gauge = CompressionGauge::default();
        written(&mut gauge, 12, 2000);
        assert!(!gauge.is_worthwhile());
        written(&mut gauge, 1, 10);
        assert!(gauge.is_worthwhile());
    }

    #[test]
    fn a_slow_processor_needs_a_slower_connection() {
        let mut gauge = CompressionGauge::default();
        written(&mut gauge, 8, 100);
        assert!(gauge.is_worthwhile());
        for _ in 0..8 {
            gauge.compressed(MIB, Duration::from_millis(10), CompressionResult::Smaller);
        }
        assert!(!gauge.is_worthwhile());
        written(&mut gauge, 8, 40);
        assert!(gauge.is_worthwhile());
    }

    #[test]
    fn data_that_does_not_become_smaller_is_tried_rarely_and_the_end_of_it_is_found() {
        let mut gauge = CompressionGauge::default();
        let mut tried = |frames: u32, result| {
            let mut count = 0;
            for _ in 0..frames {
                if gauge.choose() == CompressionChoice::Compress {
                    count += 1;
                    gauge.compressed(MIB, Duration::from_millis(1), result);
                }
            }
            count
        };
        assert_eq!(tried(100, CompressionResult::Smaller), 100);
        assert!(tried(900, CompressionResult::NotSmaller) <= 60);
        assert!(tried(100, CompressionResult::Smaller) >= 84);
    }
}
