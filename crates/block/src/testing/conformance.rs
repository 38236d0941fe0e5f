//! The conformance suite of block devices.
//!
//! The suite belongs to the trait; the test of an implementation only constructs devices:
//!
//! ```
//! use holdfast_block::{MemoryDevice, conformance::Conformance};
//! Conformance::new().check_mutable(MemoryDevice::new);
//! ```
//!
//! The suite panics at the first violation, and names it. Random parts print their seed; `HOLDFAST_SEED=...` replays
//! it.

use std::ops::Range;

use crate::{BlockDevice, BlockDeviceMut, Error, ExtentKind, SeededRandom, for_each_extent, to_usize};

/// Sizes that find wrong assumptions: 0, less than a sector, not a multiple of a sector, several clusters.
const SIZES_BYTES: [u64; 9] = [0, 1, 511, 512, 4096, 4097, 10_000, 65_536, 300_001];
const OPERATION_COUNT: u64 = 300;
const THREAD_COUNT: u64 = 4;

/// The suite and its parameters.
#[derive(Debug, Clone)]
pub struct Conformance {
    seed: u64,
    sizes_bytes: Vec<u64>,
    operation_count: u64,
}

impl Default for Conformance {
    fn default() -> Self {
        Self::new()
    }
}

impl Conformance {
    /// The suite with its usual sizes and the seed of [`test_seed`].
    pub fn new() -> Self {
        Self {
            seed: test_seed(),
            sizes_bytes: SIZES_BYTES.to_vec(),
            operation_count: OPERATION_COUNT,
        }
    }

    /// Uses other device sizes, for a format that does not support all sizes.
    #[must_use]
    pub fn with_sizes(mut self, sizes_bytes: &[u64]) -> Self {
        self.sizes_bytes = sizes_bytes.to_vec();
        self
    }

    /// Uses another number of random operations for each size.
    #[must_use]
    pub fn with_operation_count(mut self, operation_count: u64) -> Self {
        self.operation_count = operation_count;
        self
    }

    /// `length` bytes with ranges of zeroes, for the contents of a device under test.
    pub fn pattern(&self, length: u64) -> Vec<u8> {
        let mut random = SeededRandom::new(self.seed ^ length);
        let mut bytes = vec![0; to_usize(length)];
        for piece in bytes.chunks_mut(1000) {
            if random.one_in(2) {
                random.fill(piece);
            }
        }
        bytes
    }

    /// Checks the contract of a read-only device with the content `expected`.
    pub fn check_read_only(&self, device: &dyn BlockDevice, expected: &[u8]) {
        assert_eq!(device.size_bytes(), expected.len() as u64, "size in bytes");
        assert!(
            device.block_size_bytes().is_power_of_two(),
            "block size is no power of two"
        );
        check_contents(device, expected);
        check_reads_at_every_alignment(device, expected);
        check_reads_out_of_bounds(device);
        check_requests_of_nothing(device);
        check_extents(device, expected);
        self.check_random_reads(device, expected);
        self.check_concurrent_reads(device, expected);
    }

    /// Checks the contract of a writable device. Each size and each check uses a new device.
    ///
    /// `make` gets the size in bytes. The device may have any content at first.
    pub fn check_mutable<D: BlockDeviceMut>(&self, mut make: impl FnMut(u64) -> D) {
        for &size_bytes in &self.sizes_bytes {
            let device = make(size_bytes);
            let mut model = contents(&device);
            assert_eq!(model.len() as u64, size_bytes, "size in bytes");
            self.check_read_only(&device, &model);
            check_writes_out_of_bounds(&device, &model);
            check_changes_of_nothing(&device, &model);
            check_writes_at_every_alignment(&device, &mut model);
            self.check_random_operations(&device, &mut model);
            self.check_concurrent_writes(&device, &mut model);
            device.flush().expect("flush");
            self.check_read_only(&device, &model);
        }
    }

    fn check_random_reads(&self, device: &dyn BlockDevice, expected: &[u8]) {
        let mut random = SeededRandom::new(self.seed);
        for _ in 0..self.operation_count / 4 {
            check_read(device, expected, random.range_within(expected.len() as u64, 70_000));
        }
    }

    fn check_concurrent_reads(&self, device: &dyn BlockDevice, expected: &[u8]) {
        std::thread::scope(|scope| {
            for thread in 0..THREAD_COUNT {
                scope.spawn(move || {
                    let mut random = SeededRandom::new(self.seed ^ thread);
                    for _ in 0..16 {
                        check_read(device, expected, random.range_within(expected.len() as u64, 20_000));
                    }
                });
            }
        });
    }

    /// Applies random operations to the device and to a vector of bytes, and compares them.
    fn check_random_operations(&self, device: &dyn BlockDeviceMut, model: &mut [u8]) {
        let mut random = SeededRandom::new(self.seed ^ model.len() as u64);
        for _ in 0..self.operation_count {
            random_operation(device, model, 0, &mut random);
        }
        check_contents(device, model);
        check_extents(device, model);
    }

    /// Several threads write to interleaved ranges that touch but do not overlap, while another thread reads.
    fn check_concurrent_writes(&self, device: &dyn BlockDeviceMut, model: &mut [u8]) {
        let part_bytes = model.len().div_ceil(to_usize(THREAD_COUNT)).max(1);
        std::thread::scope(|scope| {
            for (thread, part) in (0u64..).zip(model.chunks_mut(part_bytes)) {
                scope.spawn(move || {
                    let mut random = SeededRandom::new(self.seed ^ thread);
                    for _ in 0..self.operation_count / 8 {
                        random_operation(device, part, thread * part_bytes as u64, &mut random);
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..4 {
                    drop(contents(device));
                    device.flush().expect("flush while others write");
                }
            });
        });
        check_contents(device, model);
    }
}

/// The seed of this run: `HOLDFAST_SEED`, or a fresh one; printed, so that a failure can be replayed.
#[expect(clippy::print_stdout, reason = "only tests call this, and a failure needs its seed")]
pub fn test_seed() -> u64 {
    let seed = match std::env::var("HOLDFAST_SEED") {
        Ok(text) => text.parse().expect("HOLDFAST_SEED is a decimal number"),
        Err(_) => SeededRandom::fresh_seed(),
    };
    println!("replay with HOLDFAST_SEED={seed}");
    seed
}

/// All bytes of a device.
pub fn contents(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0xEE; to_usize(device.size_bytes())];
    device.read_at(&mut bytes, 0).expect("read everything");
    bytes
}

/// Executes one random operation on the device and on `model`, the content of the device from `base` on, and compares
/// the result.
fn random_operation(device: &dyn BlockDeviceMut, model: &mut [u8], base: u64, random: &mut SeededRandom) {
    let mut range = random.range_within(model.len() as u64, 30_000);
    if random.one_in(2) {
        // Half of the requests are aligned, like most requests in practice.
        range = range.start / 512 * 512..range.end / 512 * 512;
    }
    let on_device = base + range.start..base + range.end;
    let part = &mut model[to_usize(range.start)..to_usize(range.end)];
    match random.below(10) {
        0..=3 => {
            random.fill(part);
            device.write_at(part, on_device.start).expect("write");
        }
        4 | 5 => {
            device.write_zeroes(on_device.clone()).expect("write zeroes");
            part.fill(0);
        }
        6 => check_trim(device, on_device.clone(), part),
        7 => device.flush().expect("flush"),
        _ => {}
    }
    let mut buffer = vec![0xEE; part.len()];
    device.read_at(&mut buffer, on_device.start).expect("read");
    assert_same(&buffer, part, on_device.start);
}

/// Trims, checks that every byte is zero or unchanged, and updates the model.
fn check_trim(device: &dyn BlockDeviceMut, range: Range<u64>, part: &mut [u8]) {
    device.trim(range.clone()).expect("trim");
    let mut after = vec![0xEE; part.len()];
    device.read_at(&mut after, range.start).expect("read after trim");
    for (at, (now, before)) in (range.start..).zip(after.iter().zip(part.iter())) {
        assert!(
            *now == 0 || now == before,
            "byte {at} is {now} after a trim of {range:?}: neither zero nor {before} as before"
        );
    }
    part.copy_from_slice(&after);
}

fn assert_same(actual: &[u8], expected: &[u8], offset: u64) {
    assert_eq!(actual.len(), expected.len());
    if let Some(at) = actual.iter().zip(expected).position(|(a, b)| a != b) {
        panic!(
            "byte {} of the device is {}, should be {} (request of {} bytes at {offset})",
            offset + at as u64,
            actual[at],
            expected[at],
            expected.len()
        );
    }
}

fn check_contents(device: &dyn BlockDevice, expected: &[u8]) {
    assert_same(&contents(device), expected, 0);
}

fn check_read(device: &dyn BlockDevice, expected: &[u8], range: Range<u64>) {
    let expected = &expected[to_usize(range.start)..to_usize(range.end)];
    let mut buffer = vec![0xEE; expected.len()];
    device.read_at(&mut buffer, range.start).expect("read");
    assert_same(&buffer, expected, range.start);
}

/// Ranges around every power of two inside the device, and around its end.
fn awkward_ranges(size_bytes: u64) -> Vec<Range<u64>> {
    let mut borders = vec![0, size_bytes];
    borders.extend((0..=17).map(|power| 1 << power).filter(|border| *border < size_bytes));
    let mut ranges = Vec::new();
    for border in borders {
        for before in [0, 1, 7, 512] {
            for length in [1, 2, 511, 512, 513, 4096, 4097] {
                let start = border.saturating_sub(before);
                let end = (start + length).min(size_bytes);
                if start < end {
                    ranges.push(start..end);
                }
            }
        }
    }
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    ranges.dedup();
    ranges
}

fn check_reads_at_every_alignment(device: &dyn BlockDevice, expected: &[u8]) {
    for range in awkward_ranges(device.size_bytes()) {
        check_read(device, expected, range);
    }
}

/// Requests that reach past the end, including some whose offset plus length overflows.
fn requests_out_of_bounds(size_bytes: u64) -> [(u64, usize); 7] {
    [
        (size_bytes, 1),
        (size_bytes.saturating_sub(1), 2),
        (0, to_usize(size_bytes) + 1),
        (size_bytes + 1, 0),
        (size_bytes + 4096, 512),
        (u64::MAX, 1),
        (u64::MAX - 1, 4096),
    ]
}

fn assert_out_of_bounds<T>(result: crate::Result<T>, what: &str, offset: u64, length: usize) {
    match result {
        Err(Error::OutOfBounds { .. }) => {}
        Err(other) => panic!("{what} of {length} bytes at {offset}: not refused as out of bounds but with: {other}"),
        Ok(_) => panic!("{what} of {length} bytes at {offset} reaches past the end and was accepted"),
    }
}

/// The range of a request, if it can be represented.
fn range_of(offset: u64, length: usize) -> Option<Range<u64>> {
    offset.checked_add(length as u64).map(|end| offset..end)
}

fn check_reads_out_of_bounds(device: &dyn BlockDevice) {
    for (offset, length) in requests_out_of_bounds(device.size_bytes()) {
        let mut buffer = vec![0xEE; length];
        assert_out_of_bounds(device.read_at(&mut buffer, offset), "read", offset, length);
        assert!(
            buffer.iter().all(|byte| *byte == 0xEE),
            "a refused read of {length} bytes at {offset} changed the buffer"
        );
        if let Some(range) = range_of(offset, length) {
            assert_out_of_bounds(device.extents(range, 10), "extents", offset, length);
        }
    }
}

fn check_writes_out_of_bounds(device: &dyn BlockDeviceMut, model: &[u8]) {
    for (offset, length) in requests_out_of_bounds(device.size_bytes()) {
        assert_out_of_bounds(device.write_at(&vec![0xDD; length], offset), "write", offset, length);
        if let Some(range) = range_of(offset, length) {
            assert_out_of_bounds(device.write_zeroes(range.clone()), "write of zeroes", offset, length);
            assert_out_of_bounds(device.trim(range), "trim", offset, length);
        }
    }
    check_contents(device, model);
}

fn offsets_of_nothing(size_bytes: u64) -> [u64; 3] {
    [0, size_bytes / 2, size_bytes]
}

fn check_requests_of_nothing(device: &dyn BlockDevice) {
    for offset in offsets_of_nothing(device.size_bytes()) {
        device.read_at(&mut [], offset).expect("read of nothing");
        let list = device.extents(offset..offset, 1).expect("extents of nothing");
        assert!(
            list.as_slice().is_empty() && list.start() == offset && list.end() == offset,
            "extents of nothing at {offset} are {list:?}"
        );
    }
}

fn check_changes_of_nothing(device: &dyn BlockDeviceMut, model: &[u8]) {
    for offset in offsets_of_nothing(device.size_bytes()) {
        device.write_at(&[], offset).expect("write of nothing");
        device.write_zeroes(offset..offset).expect("zeroes of nothing");
        device.trim(offset..offset).expect("trim of nothing");
        // A range whose end is before its start is empty, too.
        device.write_zeroes(offset..0).expect("zeroes of a backward range");
        device.trim(offset..0).expect("trim of a backward range");
    }
    check_contents(device, model);
}

fn check_writes_at_every_alignment(device: &dyn BlockDeviceMut, model: &mut [u8]) {
    let mut random = SeededRandom::new(7);
    for range in awkward_ranges(device.size_bytes()) {
        let part = &mut model[to_usize(range.start)..to_usize(range.end)];
        random.fill(part);
        device.write_at(part, range.start).expect("write");
    }
    check_contents(device, model);
    for range in awkward_ranges(device.size_bytes()).into_iter().step_by(5) {
        device.write_zeroes(range.clone()).expect("write zeroes");
        model[to_usize(range.start)..to_usize(range.end)].fill(0);
    }
    check_contents(device, model);
}

/// Checks that extents cover the query in order, without gaps, within the limit, and that ranges reported as zero are
/// zero.
fn check_extents(device: &dyn BlockDevice, expected: &[u8]) {
    let size_bytes = device.size_bytes();
    let mut questions = awkward_ranges(size_bytes);
    questions.push(0..size_bytes);
    for extent_count_max in [1, 2, 1000] {
        for question in &questions {
            let list = device.extents(question.clone(), extent_count_max).expect("extents");
            check_extent_list(&list, question, extent_count_max, expected);
        }
    }
    let mut end = 0;
    for_each_extent(device, 0..size_bytes, |extent| {
        assert_eq!(extent.offset, end, "a gap in the extents");
        end = extent.end();
        Ok(())
    })
    .expect("extents");
    assert_eq!(end, size_bytes, "extents end early");
}

fn check_extent_list(list: &crate::ExtentList, question: &Range<u64>, extent_count_max: usize, expected: &[u8]) {
    let case = format!("extents of {question:?} (at most {extent_count_max}) are {list:?}");
    assert_eq!(list.start(), question.start, "{case}");
    assert!(list.end() <= question.end, "they reach past the question: {case}");
    assert!(
        list.end() > question.start || question.is_empty(),
        "they cover nothing: {case}"
    );
    assert!(list.as_slice().len() <= extent_count_max, "there are too many: {case}");
    let mut at = question.start;
    for extent in list {
        assert!(extent.offset == at && extent.length > 0, "gap or empty extent: {case}");
        at = extent.end();
        if extent.kind == ExtentKind::Zero {
            let bytes = &expected[to_usize(extent.offset)..to_usize(extent.end())];
            assert!(bytes.iter().all(|byte| *byte == 0), "{extent:?} is not zero: {case}");
        }
    }
    assert_eq!(at, list.end(), "{case}");
}

#[cfg(test)]
mod tests {
    //! The suite must detect devices that violate the contract; otherwise it proves nothing.

    use std::ops::Range;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::Conformance;
    use crate::{BlockDevice, BlockDeviceMut, ExtentKind, ExtentList, MemoryDevice, Result};

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum ContractViolation {
        None,
        ReadsShort,
        AcceptsPastTheEnd,
        CallsDataZero,
        ExceedsTheBound,
        LeavesAGap,
        ZeroesTooMuch,
        TrimsToGarbage,
        LosesTheTail,
        RefusesNothing,
    }

    struct Breaching(MemoryDevice, ContractViolation);

    impl BlockDevice for Breaching {
        fn size_bytes(&self) -> u64 {
            self.0.size_bytes()
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            match self.1 {
                ContractViolation::ReadsShort if buffer.len() > 600 => self.0.read_at(&mut buffer[..600], offset),
                ContractViolation::AcceptsPastTheEnd if offset > self.size_bytes() => Ok(()),
                ContractViolation::RefusesNothing if buffer.is_empty() => self.check_bounds(offset, 1),
                _ => self.0.read_at(buffer, offset),
            }
        }
        fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
            self.check_bounds(range.start, range.end - range.start)?;
            let mut list = ExtentList::new(range.start, extent_count_max + 1);
            match self.1 {
                ContractViolation::CallsDataZero => {
                    list.push(range.end - range.start, ExtentKind::Zero);
                }
                ContractViolation::ExceedsTheBound if range.end - range.start > 1 => {
                    list.push(1, ExtentKind::Data);
                    list.push(range.end - range.start - 1, ExtentKind::Absent);
                }
                ContractViolation::LeavesAGap if range.end > range.start => {
                    list = ExtentList::new(range.start + 1, extent_count_max);
                    list.push(range.end - range.start - 1, ExtentKind::Data);
                }
                _ => return self.0.extents(range, extent_count_max),
            }
            Ok(list)
        }
    }

    impl BlockDeviceMut for Breaching {
        fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
            match self.1 {
                ContractViolation::LosesTheTail if data.len() == 513 => self.0.write_at(&data[..512], offset),
                _ => self.0.write_at(data, offset),
            }
        }
        fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
            match self.1 {
                ContractViolation::ZeroesTooMuch if range.end < self.size_bytes() && !range.is_empty() => {
                    self.0.write_zeroes(range.start..range.end + 1)
                }
                _ => self.0.write_zeroes(range),
            }
        }
        fn trim(&self, range: Range<u64>) -> Result<()> {
            match self.1 {
                ContractViolation::TrimsToGarbage if range.start < range.end && range.end <= self.size_bytes() => {
                    self.0.write_at(&[0xAA], range.start)
                }
                _ => self.0.trim(range),
            }
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn every_breach_is_caught_and_a_faithful_device_passes() {
        use ContractViolation as B;
        for breach in [
            B::None,
            B::ReadsShort,
            B::AcceptsPastTheEnd,
            B::CallsDataZero,
            B::ExceedsTheBound,
            B::LeavesAGap,
            B::ZeroesTooMuch,
            B::TrimsToGarbage,
            B::LosesTheTail,
            B::RefusesNothing,
        ] {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                Conformance::new().check_mutable(|size| Breaching(MemoryDevice::new(size), breach));
            }));
            assert_eq!(outcome.is_ok(), breach == ContractViolation::None, "{breach:?}");
        }
    }
}
