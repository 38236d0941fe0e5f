//! Plans what a backup of a machine of a pool would read.

use super::{XenCapture, way};
use crate::capture::plan::{PlannedCapture, PlannedMethod, PlannedRead};
use crate::job::Result;

impl XenCapture<'_> {
    pub(super) fn plan_reading(&self) -> Result<PlannedCapture> {
        let way = way::choose(&self.request, &self.taken, self.job)?;
        let disks = self.taken.iter().map(|taken| {
            let reason = way::why_everything(self.sink.history(), &self.request, taken, way)?;
            Ok(PlannedRead {
                name: taken.target.clone(),
                size_bytes: Some(taken.live.size_bytes),
                read_bytes: reason.as_ref().map(|_| taken.live.size_bytes),
                reason,
            })
        });
        Ok(PlannedCapture {
            method: PlannedMethod {
                word: way.name(),
                reason: format!("its disks come from a snapshot of the pool, read by {}", way.name()),
            },
            disks: disks.collect::<Result<_>>()?,
            left_out: self.left_out.clone(),
        })
    }
}
