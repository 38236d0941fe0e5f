//! What is done with the source: reads, and in another thread the tracker, freeze and thaw, one after another.

use std::ops::Range;
use std::sync::mpsc::{Receiver as Inbox, Sender as Outbox};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::{Clock, ExtentKind, error_text, for_each_extent, is_zero, to_usize};
use holdfast_transfer::{RangeContent, SenderAction, SenderEvent};

use super::Event;
use crate::error::Result;
use crate::send_rate::{LiftedRate, SendRate};
use crate::source::{LiveSource, ReadContent, timed};

/// Attempts to thaw before the error is reported.
const THAW_COUNT: u32 = 5;
const THAW_INTERVAL: Duration = Duration::from_millis(200);

/// A range to read.
pub(super) struct ReadTask {
    pub(super) read: u64,
    pub(super) range: Range<u64>,
}

/// Reads ranges until there are none left.
pub(super) fn read_ranges(source: &dyn LiveSource, queue: &Mutex<Inbox<ReadTask>>, events: &Outbox<Event>) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(ReadTask { read, range }) = next else { return };
        let event = match read_range(source, &range) {
            Ok(content) => SenderEvent::Read { read, content },
            Err(error) => SenderEvent::SourceFailed {
                detail: error_text(&error),
            },
        };
        if events.send(Event::Sender(event)).is_err() {
            return;
        }
    }
}

/// Reads a range. What the source reports as zero or absent is not read.
fn read_range(source: &dyn LiveSource, range: &Range<u64>) -> Result<RangeContent> {
    let device = source.device();
    let length = range.end - range.start;
    let mut has_data = false;
    let asked = for_each_extent(device, range.clone(), |extent| {
        has_data |= extent.kind == ExtentKind::Data;
        Ok(())
    });
    // QEMU 10 answers reads only when it has given up the disk of a machine that moves.
    if asked.is_ok() && !has_data {
        source.was_read(range.start, ReadContent::Zero(length));
        return Ok(RangeContent::Hole);
    }
    let mut bytes = vec![0; to_usize(length)];
    device.read_at(&mut bytes, range.start)?;
    source.was_read(range.start, ReadContent::Data(&bytes));
    Ok(if is_zero(&bytes) {
        RangeContent::Zero
    } else {
        RangeContent::Data(bytes)
    })
}

/// The tracker of a source, and what writes to it.
pub(super) struct ControlledSource<'a> {
    pub(super) source: &'a dyn LiveSource,
    pub(super) events: Outbox<Event>,
    pub(super) rate: &'a SendRate,
    pub(super) clock: &'a dyn Clock,
}

impl<'a> ControlledSource<'a> {
    /// Carries out what concerns the tracker and the guest, in order.
    pub(super) fn control(&self, queue: &Inbox<SenderAction>) {
        let mut lifted = None;
        while let Ok(action) = queue.recv() {
            let event = match self.control_once(&action, &mut lifted) {
                Ok(Some(event)) => event,
                Ok(None) => continue,
                Err(error) => SenderEvent::SourceFailed {
                    detail: error_text(&error),
                },
            };
            self.events.send(Event::Sender(event)).ok();
        }
    }

    /// `lifted` is kept while the source is frozen.
    fn control_once(&self, action: &SenderAction, lifted: &mut Option<LiftedRate<'a>>) -> Result<Option<SenderEvent>> {
        let source = self.source;
        Ok(Some(match *action {
            SenderAction::StartTracker => {
                source.start_tracking()?;
                SenderEvent::TrackerStarted
            }
            SenderAction::TakeDirty { query } => {
                let (marks, took) = timed(self.clock, || source.take_marks());
                SenderEvent::DirtyTaken {
                    query,
                    marks: marks?,
                    took,
                }
            }
            SenderAction::CountDirty { query } => SenderEvent::DirtyCounted {
                query,
                dirty_bytes: source.count_marks()?,
            },
            SenderAction::CheckTracker { query } => SenderEvent::TrackerChecked {
                query,
                check: source.check()?,
            },
            SenderAction::Freeze { attempt } => {
                *lifted = Some(self.rate.lift());
                match source.freeze() {
                    Ok(()) => SenderEvent::Frozen { attempt },
                    Err(error) => {
                        self.events.send(Event::NotFrozen(error_text(&error))).ok();
                        source.thaw().ok();
                        *lifted = None;
                        SenderEvent::FreezeFailed { attempt }
                    }
                }
            }
            SenderAction::Thaw => {
                *lifted = None;
                thaw(source, self.clock)?;
                return Ok(None);
            }
            SenderAction::Throttle { dirty_bytes_per_s_max } => {
                if !source.throttle(dirty_bytes_per_s_max)? {
                    self.events.send(Event::NotThrottled).ok();
                }
                return Ok(None);
            }
            SenderAction::Unthrottle => {
                source.unthrottle()?;
                return Ok(None);
            }
            // The caller notes a handover, and forgets it.
            _ => return Ok(None),
        }))
    }
}

fn thaw(source: &dyn LiveSource, clock: &dyn Clock) -> Result<()> {
    let mut result = source.thaw();
    for _ in 1..THAW_COUNT {
        if result.is_ok() {
            break;
        }
        clock.sleep(THAW_INTERVAL);
        result = source.thaw();
    }
    result
}

#[cfg(test)]
mod tests {
    use holdfast_block::{BlockDeviceMut as _, Fault, FaultRule, FaultyDevice, MemoryDevice, RequestKind};
    use holdfast_transfer::RangeContent;

    use super::read_range;
    use crate::source::StillSource;

    /// QEMU 10 refuses to say what a disk has that it has given up, and answers reads.
    #[test]
    fn what_the_source_does_not_describe_is_read() {
        let device = FaultyDevice::new(MemoryDevice::new(16384));
        device.write_at(&[7; 4096], 4096).unwrap();
        let source = StillSource::new(&device);
        assert!(matches!(read_range(&source, &(8192..16384)), Ok(RangeContent::Hole)));
        device.add(FaultRule::every(RequestKind::Extents, Fault::Io));
        assert!(matches!(read_range(&source, &(4096..8192)), Ok(RangeContent::Data(bytes)) if bytes == [7; 4096]));
        assert!(matches!(read_range(&source, &(8192..16384)), Ok(RangeContent::Zero)));
        device.add(FaultRule::every(RequestKind::Read, Fault::Io));
        assert!(read_range(&source, &(4096..8192)).is_err());
    }
}
