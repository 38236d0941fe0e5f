//! Makes requests to a device fail: the n-th request of a kind, or all from the n-th on.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::device::range_length;
use crate::{BlockDevice, BlockDeviceMut, Error, ExtentList, RequestKind, Result, SeededRandom, to_usize};

/// Size of a sector: a disk writes a sector completely or not at all.
const SECTOR_BYTES: u64 = 512;

/// How a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Fails with an input/output error; nothing is changed.
    Io,
    /// Fails with "no space left"; nothing is changed.
    NoSpace,
    /// Fails with an input/output error after the first `keep_bytes` bytes were written.
    ShortWrite {
        /// Number of bytes that are written, at most those of the request.
        keep_bytes: u64,
    },
    /// Fails with an input/output error after some of the sectors, chosen by the seed, were written.
    TornWrite {
        /// The seed, which chooses the sectors.
        seed: u64,
    },
}

/// When a fault occurs. For each kind, requests are counted from 1, including those that fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultRule {
    kind: RequestKind,
    first: u64,
    last: u64,
    fault: Fault,
}

impl FaultRule {
    /// The `number`-th request of `kind` (from 1) fails.
    pub fn nth(kind: RequestKind, number: u64, fault: Fault) -> Self {
        Self {
            kind,
            first: number,
            last: number,
            fault,
        }
    }

    /// The `number`-th request of `kind` (from 1) and all later ones fail.
    pub fn from_nth(kind: RequestKind, number: u64, fault: Fault) -> Self {
        Self {
            last: u64::MAX,
            ..Self::nth(kind, number, fault)
        }
    }

    /// Every request of `kind` fails.
    pub fn every(kind: RequestKind, fault: Fault) -> Self {
        Self::from_nth(kind, 1, fault)
    }
}

#[derive(Debug, Default)]
struct FaultState {
    rules: Vec<FaultRule>,
    counts: BTreeMap<RequestKind, u64>,
}

/// A device whose requests fail according to rules.
#[derive(Debug)]
pub struct FaultyDevice<D> {
    device: D,
    state: Mutex<FaultState>,
}

impl<D: BlockDevice> FaultyDevice<D> {
    /// Wraps `device`. Without a rule ([`add`](Self::add)), no request fails.
    pub fn new(device: D) -> Self {
        Self {
            device,
            state: Mutex::default(),
        }
    }

    /// Adds a rule. If several rules apply to a request, the first one counts.
    pub fn add(&self, rule: FaultRule) {
        self.lock().rules.push(rule);
    }

    /// Removes all rules, so that no request fails. The counters are kept.
    pub fn clear_rules(&self) {
        self.lock().rules.clear();
    }

    /// Number of requests of `kind` so far.
    pub fn count(&self, kind: RequestKind) -> u64 {
        self.lock().counts.get(&kind).copied().unwrap_or_default()
    }

    /// The wrapped device.
    pub fn into_inner(self) -> D {
        self.device
    }

    fn lock(&self) -> MutexGuard<'_, FaultState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request and returns its fault, if any.
    fn fault(&self, kind: RequestKind) -> Option<Fault> {
        let mut state = self.lock();
        let count = state.counts.entry(kind).or_default();
        *count += 1;
        let number = *count;
        state
            .rules
            .iter()
            .find(|rule| rule.kind == kind && (rule.first..=rule.last).contains(&number))
            .map(|rule| rule.fault)
    }

    fn fail_by_rule(&self, kind: RequestKind, action: &'static str, offset: u64) -> Result<()> {
        self.fault(kind)
            .map_or(Ok(()), |fault| Err(fault_error(fault, action, offset)))
    }
}

fn fault_error(fault: Fault, action: &'static str, offset: u64) -> Error {
    let errno = match fault {
        Fault::NoSpace => Errno::NOSPC,
        Fault::Io | Fault::ShortWrite { .. } | Fault::TornWrite { .. } => Errno::IO,
    };
    Error::io(action, offset, errno)
}

/// Splits `offset..offset + length` at sector boundaries: offset and length of each piece.
pub(crate) fn sector_pieces(offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let piece = (SECTOR_BYTES - at % SECTOR_BYTES).min(end - at);
            at += piece;
            (at - piece, piece)
        })
    })
}

impl<D: BlockDevice> BlockDevice for FaultyDevice<D> {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.fail_by_rule(RequestKind::Read, "read", offset)?;
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check_bounds(range.start, range_length(&range))?;
        self.fail_by_rule(RequestKind::Extents, "ask for extents", range.start)?;
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl<D: BlockDeviceMut> BlockDeviceMut for FaultyDevice<D> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        let Some(fault) = self.fault(RequestKind::Write) else {
            return self.device.write_at(data, offset);
        };
        match fault {
            Fault::Io | Fault::NoSpace => {}
            Fault::ShortWrite { keep_bytes } => {
                let keep = to_usize(keep_bytes.min(data.len() as u64));
                self.device.write_at(&data[..keep], offset)?;
            }
            Fault::TornWrite { seed } => {
                let mut random = SeededRandom::new(seed);
                for (at, length) in sector_pieces(offset, data.len() as u64) {
                    if random.one_in(2) {
                        let start = to_usize(at - offset);
                        self.device.write_at(&data[start..start + to_usize(length)], at)?;
                    }
                }
            }
        }
        Err(fault_error(fault, "write", offset))
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        self.fail_by_rule(RequestKind::WriteZeroes, "write zeroes", range.start)?;
        self.device.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        self.fail_by_rule(RequestKind::Trim, "trim", range.start)?;
        self.device.trim(range)
    }

    fn flush(&self) -> Result<()> {
        self.fail_by_rule(RequestKind::Flush, "flush", 0)?;
        self.device.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::{Fault, FaultRule, FaultyDevice};
    use crate::testing::conformance::Conformance;
    use crate::{BlockDevice, BlockDeviceMut, MemoryDevice, RequestKind};

    #[test]
    fn conforms_without_rules() {
        Conformance::new().check_mutable(|size| FaultyDevice::new(MemoryDevice::new(size)));
    }

    #[test]
    fn exactly_the_requests_that_a_rule_names_fail() {
        let device = FaultyDevice::new(MemoryDevice::new(1000));
        device.add(FaultRule::nth(RequestKind::Write, 2, Fault::NoSpace));
        device.add(FaultRule::from_nth(RequestKind::Flush, 2, Fault::Io));
        device.write_at(&[1], 0).unwrap();
        assert!(device.write_at(&[2], 0).unwrap_err().is_no_space());
        device.write_at(&[3], 1).unwrap();
        device.flush().unwrap();
        assert!(!device.flush().unwrap_err().is_no_space());
        device.flush().unwrap_err();
        device.clear_rules();
        device.flush().unwrap();
        assert_eq!(
            (device.count(RequestKind::Write), device.count(RequestKind::Flush)),
            (3, 4)
        );
        assert_eq!(device.into_inner().to_bytes()[..2], [1, 3]);
    }

    #[test]
    fn reads_extents_zeroes_and_trims_fail_too() {
        let device = FaultyDevice::new(MemoryDevice::new(1000));
        for kind in [
            RequestKind::Read,
            RequestKind::Extents,
            RequestKind::WriteZeroes,
            RequestKind::Trim,
        ] {
            device.add(FaultRule::every(kind, Fault::Io));
        }
        device.read_at(&mut [0], 0).unwrap_err();
        device.extents(0..1, 1).unwrap_err();
        device.write_zeroes(0..1).unwrap_err();
        device.trim(0..1).unwrap_err();
    }

    #[test]
    fn a_short_write_keeps_a_prefix_and_a_torn_one_whole_sectors() {
        let device = FaultyDevice::new(MemoryDevice::new(100_000));
        device.add(FaultRule::nth(
            RequestKind::Write,
            1,
            Fault::ShortWrite { keep_bytes: 700 },
        ));
        device.add(FaultRule::nth(RequestKind::Write, 2, Fault::TornWrite { seed: 5 }));
        device.write_at(&[1; 1000], 0).unwrap_err();
        device.write_at(&vec![2; 50_001], 1000).unwrap_err();
        let bytes = device.into_inner().to_bytes();
        assert!(bytes[..700].iter().all(|byte| *byte == 1) && bytes[700..1000].iter().all(|byte| *byte == 0));
        let sectors: Vec<&[u8]> = bytes[1024..50_688].chunks(512).collect();
        assert!(
            sectors
                .iter()
                .all(|sector| sector.iter().all(|byte| *byte == sector[0]))
        );
        let kept = sectors.iter().filter(|sector| sector[0] == 2).count();
        assert!((20..80).contains(&kept), "{kept} of {} sectors", sectors.len());
    }
}
