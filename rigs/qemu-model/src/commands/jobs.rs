//! Backup jobs, which copy the ranges in a bitmap. A job is complete when it is queried for the second time.

use holdfast_block::to_usize;
use serde_json::{Value, json};

use crate::node::{Driver, Node, SavedClusters};
use crate::refusal::{Answer, Refusal, text};
use crate::state::{Job, JobStatus, State};

impl State {
    pub(super) fn begin_backup(&mut self, arguments: &Value) -> Answer<()> {
        let of = |key: &str| text(arguments, key).map(str::to_owned);
        let job = Job {
            id: of("job-id")?,
            source: of("device")?,
            target: of("target")?,
            filter: of("filter-node-name")?,
            bitmap: of("bitmap")?,
            status: JobStatus::Running,
        };
        if self.jobs.iter().any(|other| other.id == job.id) {
            return Err(Refusal::generic(format!("Job ID '{}' already in use", job.id)));
        }
        let size_bytes = self.node(&job.source)?.size_bytes;
        self.node(&job.target)?;
        self.bitmap_mut(&job.source, &job.bitmap)?.user_count += 1;
        let mut filter = Node::new(Driver::CopyBeforeWrite(SavedClusters::default()), size_bytes);
        filter.is_monitor_owned = false;
        filter.children = vec![("file", job.source.clone()), ("target", job.target.clone())];
        self.insert_node(job.filter.clone(), filter);
        self.jobs.push(job);
        Ok(())
    }

    pub(super) fn cancel_job(&mut self, arguments: &Value) -> Answer<()> {
        let id = text(arguments, "id")?;
        let at = self.position_of(id)?;
        if !self.jobs[at].is_running() {
            return Err(wrong_state("cancel"));
        }
        self.end_job(at, JobStatus::Cancelled);
        Ok(())
    }

    pub(super) fn dismiss_job(&mut self, arguments: &Value) -> Answer<()> {
        let at = self.position_of(text(arguments, "id")?)?;
        if self.jobs[at].is_running() {
            return Err(wrong_state("dismiss"));
        }
        self.jobs.remove(at);
        Ok(())
    }

    fn position_of(&self, id: &str) -> Answer<usize> {
        let found = self.jobs.iter().position(|job| job.id == id);
        found.ok_or_else(|| Refusal::generic("Job not found"))
    }

    fn end_job(&mut self, at: usize, status: JobStatus) {
        self.jobs[at].status = status;
        let (source, bitmap, filter) = {
            let job = &self.jobs[at];
            (job.source.clone(), job.bitmap.clone(), job.filter.clone())
        };
        self.remove_node(&filter);
        if let Ok(bitmap) = self.bitmap_mut(&source, &bitmap) {
            bitmap.user_count -= 1;
        }
    }

    pub(super) fn describe_jobs(&mut self) -> Value {
        let described = self.jobs.iter().map(|job| {
            let status = if job.is_running() { "running" } else { "concluded" };
            let mut described = json!({ "id": job.id, "type": "backup", "status": status });
            if job.status == JobStatus::Cancelled {
                described["error"] = json!("Operation canceled");
            }
            described
        });
        let described: Value = described.collect();
        for at in 0..self.jobs.len() {
            if self.jobs[at].is_running() {
                self.copy(at);
                self.end_job(at, JobStatus::Done);
            }
        }
        described
    }

    fn copy(&mut self, at: usize) {
        let job = &self.jobs[at];
        let (source, target) = (job.source.clone(), job.target.clone());
        let Some(bitmap) = self.nodes.get(&source).and_then(|node| node.bitmap(&job.bitmap)) else {
            return;
        };
        let ranges: Vec<std::ops::Range<u64>> = bitmap.dirty.iter().collect();
        for range in ranges {
            let mut bytes = vec![0; to_usize(range.end - range.start)];
            // A range that cannot be read stays zero, so that a test detects a wrong snapshot.
            if self.read(&source, &mut bytes, range.start).is_ok() {
                self.write(&target, &bytes, range.start).ok();
            }
        }
    }

    pub(super) fn describe_block_jobs(&self) -> Value {
        let running = self.jobs.iter();
        running
            .map(|job| json!({ "device": job.id, "type": "backup", "io-status": "ok" }))
            .collect()
    }
}

fn wrong_state(verb: &str) -> Refusal {
    Refusal::generic(format!("Job in this state cannot accept the command verb '{verb}'"))
}
