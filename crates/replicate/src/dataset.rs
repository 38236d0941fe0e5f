//! Replicates one dataset.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;

use holdfast_host::PipedEnd;
use holdfast_host::provider::{
    KeepMethod, KeepRequest, PartialReceive, ProviderError, ReceiveRequest, ReplicaDataset, ReplicaScope, ReplicaSide,
    ReplicaSnapshot, SendRequest, SenderTrust, StreamForm,
};
use holdfast_policy::{ReplicaPlan, ReplicaStep, Replication};
use rustix::fs::{FlockOperation, flock};

use super::carry::{LinkFilter, Transfer, TransferOptions, WatchError, watch};
use super::peer_server::notes_in;
use super::{ReplicaOutcome, ReplicatedDataset, ReplicatedStream, ReplicationSides, fingerprint, tag};
use holdfast_engine::Execution;
use holdfast_engine::{Error, Result, Unit};

/// The exit code of ssh if the connection failed, and not the remote program.
const CODE_OF_SSH: i32 = 255;

/// Replicates a dataset.
///
/// # Errors
/// The user has stopped the job. All other failures are in the report.
pub(super) fn replicate(
    sides: &ReplicationSides<'_>,
    source: &ReplicaDataset,
    target: &str,
    there: Option<ReplicaDataset>,
) -> Result<ReplicatedDataset> {
    let plan = sides.plan(source, there.as_ref());
    let mut done = sides.described(source, target, there.as_ref(), &plan);
    if sides.request.execution == Execution::DryRun {
        sides.add_planned_streams(source, there.as_ref(), &plan, &mut done);
        return Ok(done);
    }
    let Some(_lock) = lock(sides, target)? else {
        done.outcome = ReplicaOutcome::Busy;
        return Ok(done);
    };
    let run = DatasetReplication {
        sides,
        source,
        target,
        tag: tag(sides.request, target),
    };
    match run.all(there, &mut done) {
        Ok(outcome) => done.outcome = outcome,
        Err(DatasetFailure::Dataset(reason)) => done.outcome = ReplicaOutcome::Failed(reason),
        Err(DatasetFailure::Run(error)) => return Err(error),
    }
    Ok(done)
}

/// Why a dataset was not replicated to the end.
enum DatasetFailure {
    /// The others are replicated all the same.
    Dataset(String),
    /// The run ends.
    Run(Error),
}

impl From<String> for DatasetFailure {
    fn from(reason: String) -> Self {
        Self::Dataset(reason)
    }
}

impl From<WatchError> for DatasetFailure {
    fn from(error: WatchError) -> Self {
        match error {
            WatchError::Interrupted(interrupted) => Self::Run(interrupted.into()),
            WatchError::Io(error) => Self::Dataset(error.to_string()),
        }
    }
}

impl From<ProviderError> for DatasetFailure {
    fn from(error: ProviderError) -> Self {
        Self::Dataset(error.to_string())
    }
}

/// Locks the target; `None` if another process has locked it. Dropping the file releases the lock.
fn lock(sides: &ReplicationSides<'_>, target: &str) -> Result<Option<File>> {
    let host = sides.request.target.side.host().unwrap_or_default();
    let folder = &sides.request.locks;
    let path = folder.join(format!(
        "replicate-{:016x}.lock",
        fingerprint(&format!("{host}:{target}"))
    ));
    let failed = |source| Error::File {
        action: "open",
        path: path.clone(),
        source,
    };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let mut options = File::options();
    let open = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = open.map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(failed(error.into())),
    }
}

/// The reason for which a program failed at `action` on `dataset`.
fn failure_reason(side: &dyn ReplicaSide, action: &'static str, dataset: &str, ended: &PipedEnd) -> String {
    let reason = ended.reason();
    match (ended.code, side.host()) {
        (Some(CODE_OF_SSH), Some(host)) => format!("the connection to {host} broke: {reason}"),
        _ => side.refusal(action, dataset, &reason).to_string(),
    }
}

struct DatasetReplication<'a> {
    sides: &'a ReplicationSides<'a>,
    source: &'a ReplicaDataset,
    target: &'a str,
    tag: String,
}

impl DatasetReplication<'_> {
    fn source_side(&self) -> &dyn ReplicaSide {
        self.sides.request.source.side
    }

    fn target_side(&self) -> &dyn ReplicaSide {
        self.sides.request.target.side
    }

    fn all(
        &self,
        there: Option<ReplicaDataset>,
        done: &mut ReplicatedDataset,
    ) -> std::result::Result<ReplicaOutcome, DatasetFailure> {
        let mut there = there;
        if let Some(partial) = there.as_ref().and_then(|there| there.partial.clone()) {
            self.resume_partial(&partial, there.as_ref(), done)?;
            there = self.target_side().datasets(self.target, ReplicaScope::Dataset)?.pop();
            self.identify_resumed(there.as_ref(), done)?;
        }
        let mut plan = self.sides.plan(self.source, there.as_ref());
        let is_sent = match &plan.plan {
            ReplicaPlan::Send(steps) => {
                let sent = steps.iter().try_for_each(|step| self.step(there.as_ref(), step, done));
                if done.streams.iter().any(|stream| !stream.is_resumed) {
                    there = self.target_side().datasets(self.target, ReplicaScope::Dataset)?.pop();
                    plan = self.sides.plan(self.source, there.as_ref());
                }
                sent.map(|()| true)
            }
            _ => Ok(!done.streams.is_empty()),
        };
        self.keep(there.as_ref(), &plan, done);
        let now = self.sides.described(self.source, self.target, there.as_ref(), &plan);
        *done = ReplicatedDataset {
            streams: std::mem::take(&mut done.streams),
            notes: std::mem::take(&mut done.notes),
            ..now
        };
        let is_sent = is_sent?;
        Ok(match self.sides.outcome(self.target, &plan) {
            ReplicaOutcome::UpToDate if is_sent => ReplicaOutcome::Sent,
            other => other,
        })
    }

    /// Resumes an interrupted stream, or discards the received part.
    fn resume_partial(
        &self,
        partial: &PartialReceive,
        there: Option<&ReplicaDataset>,
        done: &mut ReplicatedDataset,
    ) -> std::result::Result<(), DatasetFailure> {
        let token = match partial {
            PartialReceive::Token(token) => token,
            PartialReceive::NotResumable(name) => {
                let note = format!("{name} was received in part, and is received from its beginning");
                done.notes.push(note);
                return Ok(self.target_side().discard(self.target)?);
            }
        };
        let sending = SendRequest {
            dataset: self.source.name.clone(),
            base: None,
            to: String::new(),
            has_intermediates: false,
            form: StreamForm::Plain,
            token: Some(token.clone()),
            compression: self.sides.sender_compression,
        };
        let size = match self.source_side().estimate(&sending) {
            Ok(size) => size,
            Err(error) => {
                done.notes
                    .push(format!("what was received in part is of no use any more: {error}"));
                return Ok(self.target_side().discard(self.target)?);
            }
        };
        let receiving = ReceiveRequest {
            dataset: self.target.to_owned(),
            snapshots: self.missing(there),
            is_compressed: false,
        };
        let stream = ReplicatedStream {
            base: None,
            to: None,
            count: 1,
            is_resumed: true,
            stream_bytes: None,
            link_bytes: None,
        };
        self.carry(&sending, receiving, size, stream, done)
    }

    /// Snapshots of the source that the target lacks: the interrupted stream contains one of them.
    fn missing(&self, there: Option<&ReplicaDataset>) -> Vec<ReplicaSnapshot> {
        let known = there.map(|there| &there.snapshots[..]).unwrap_or_default();
        let is_known = |one: &&ReplicaSnapshot| {
            known
                .iter()
                .any(|known| known.name == one.name || !one.identity.is_empty() && known.identity == one.identity)
        };
        let snapshots = self.source.snapshots.iter().filter(|one| !one.is_bookmark);
        snapshots.filter(|one| !is_known(one)).cloned().collect()
    }

    /// A resumed stream does not name its snapshot. Finds the snapshot at the target, and settles it.
    fn identify_resumed(
        &self,
        there: Option<&ReplicaDataset>,
        done: &mut ReplicatedDataset,
    ) -> std::result::Result<(), DatasetFailure> {
        let Some(stream) = done.streams.last_mut() else {
            return Ok(());
        };
        let newest = there.and_then(|there| there.snapshots.iter().rfind(|one| !one.is_bookmark));
        let sent = newest.and_then(|newest| self.source.snapshots.iter().find(|one| one.identity == newest.identity));
        let Some(sent) = sent else { return Ok(()) };
        stream.to = Some(sent.name.clone());
        Ok(self.target_side().settle(&ReceiveRequest {
            dataset: self.target.to_owned(),
            snapshots: vec![sent.clone()],
            is_compressed: false,
        })?)
    }

    fn step(
        &self,
        there: Option<&ReplicaDataset>,
        step: &ReplicaStep,
        done: &mut ReplicatedDataset,
    ) -> std::result::Result<(), DatasetFailure> {
        let sending = self.sides.sending(self.source, there, step);
        let size = self.source_side().estimate(&sending)?;
        // The snapshot is held until it was received, so that prune does not remove it.
        let held = self
            .source_side()
            .keep(&self.keeping(&self.source.name, &step.to, KeepMethod::AddHold));
        if let Err(error) = held {
            done.notes
                .push(format!("{} is not held while it is sent: {error}", step.to));
        }
        let snapshots = self.source.snapshots.iter().filter(|snapshot| !snapshot.is_bookmark);
        let (until, _) = snapshots
            .clone()
            .enumerate()
            .find(|(_, one)| one.name == step.to)
            .unzip();
        let until = until.map_or(0, |at| at + 1);
        let receiving = ReceiveRequest {
            dataset: self.target.to_owned(),
            snapshots: snapshots
                .take(until)
                .skip(until - step.count.min(until))
                .cloned()
                .collect(),
            is_compressed: false,
        };
        let stream = ReplicatedStream {
            base: step.base.as_ref().map(|(name, _)| name.clone()),
            to: Some(step.to.clone()),
            count: step.count,
            is_resumed: false,
            stream_bytes: None,
            link_bytes: None,
        };
        self.carry(&sending, receiving, size, stream, done)
    }

    fn keeping(&self, dataset: &str, snapshot: &str, method: KeepMethod) -> KeepRequest {
        KeepRequest {
            dataset: dataset.to_owned(),
            snapshot: snapshot.to_owned(),
            tag: self.tag.clone(),
            method,
        }
    }

    /// Transfers a stream, and reports its progress.
    fn carry(
        &self,
        sending: &SendRequest,
        mut receiving: ReceiveRequest,
        size: Option<u64>,
        mut stream: ReplicatedStream,
        done: &mut ReplicatedDataset,
    ) -> std::result::Result<(), DatasetFailure> {
        receiving.is_compressed = matches!(self.sides.filter, LinkFilter::Compress | LinkFilter::CompressAdaptively);
        let job = self.sides.job;
        let what = match &stream.to {
            Some(to) => format!("{}@{to}", self.source.name),
            None => format!("the rest of {}", self.source.name),
        };
        job.progress.phase(&format!("sending {what}"), Unit::Bytes);
        if let Some(size) = size {
            job.progress.total(size);
        }
        let (transfer, notes) = self.pump(sending, &receiving, &what)?;
        stream.stream_bytes = Some(transfer.stream_bytes());
        stream.link_bytes = Some(transfer.link_bytes());
        done.notes
            .extend(notes.into_iter().map(|note| format!("{what}: {note}")));
        if stream.is_resumed {
            // The snapshot of a resumed stream is determined after the transfer.
            receiving.snapshots.clear();
        }
        self.target_side().settle(&receiving)?;
        done.streams.push(stream);
        Ok(())
    }

    /// A stream from this host is the requested one; another host may send anything.
    fn trust(&self) -> SenderTrust {
        match self.source_side().host() {
            None => SenderTrust::Full,
            Some(_) => SenderTrust::AddOnly,
        }
    }

    /// Transfers a stream; also returns notes about parts of it that were left out.
    fn pump(
        &self,
        sending: &SendRequest,
        receiving: &ReceiveRequest,
        what: &str,
    ) -> std::result::Result<(Transfer, Vec<String>), DatasetFailure> {
        let request = self.sides.request;
        let job = self.sides.job;
        let options = TransferOptions {
            filter: self.sides.filter,
            limit: request.limit,
            clock: Arc::clone(&request.clock),
        };
        let mut receiver = self.target_side().receive(receiving, self.trust())?;
        let mut sender = self.source_side().send(sending)?;
        let ends = sender.take_output().zip(receiver.take_input());
        let (from, (to, check)) = ends.ok_or_else(|| "a program has no ends".to_owned())?;
        let transfer = options.start_into(from, to, check).map_err(|error| error.to_string())?;
        let mut reported = 0;
        let ends = watch(&transfer, &mut sender, &mut receiver, job.clock, |transfer| {
            let bytes = transfer.stream_bytes();
            job.progress.advance(bytes - reported);
            reported = bytes;
            job.interrupt.check()
        })?;
        if let Some(refusal) = transfer.refusal() {
            let error = ProviderError::Refused {
                action: "receive",
                what: self.target.to_owned(),
                reason: refusal,
            };
            return Err(error.into());
        }
        if ends.receiver.is_success() {
            // The receiver has read the stream to its end; now check that it has received the right snapshots.
            let mut notes = notes_in(&ends.receiver.stderr);
            notes.extend(receiver.finish()?);
            return Ok((transfer, notes));
        }
        let target = failure_reason(self.target_side(), "receive", self.target, &ends.receiver);
        // A sender without a receiver reports only the broken pipe.
        let why = if ends.sender.is_success() || ends.receiver_was_first {
            target
        } else {
            let source = failure_reason(self.source_side(), "send", what, &ends.sender);
            format!("{source}; {target}")
        };
        Err(DatasetFailure::Dataset(match transfer.failure() {
            Some(failure) if ends.sender.is_success() && !ends.receiver_was_first => format!("{failure}; {why}"),
            _ => why,
        }))
    }

    /// Keeps the common snapshot, and releases those that were kept before. If this fails, the replica is still valid;
    /// a note reports the failure.
    fn keep(&self, there: Option<&ReplicaDataset>, plan: &Replication, done: &mut ReplicatedDataset) {
        let (Some(there), Some(common)) = (there, &plan.common) else {
            return;
        };
        let Some(copy) = there.snapshots.iter().find(|one| one.name == *common) else {
            return;
        };
        let is_same = |one: &&ReplicaSnapshot| {
            !one.is_bookmark && (one.identity == copy.identity) && (!one.identity.is_empty() || one.name == copy.name)
        };
        let here = self.source.snapshots.iter().find(is_same);
        let bookmark = here.map(|here| format!("{}_{}", self.tag, here.name));
        let bookmarks = self.sides.source.bookmarks;
        let is_new = !done.streams.is_empty();
        let mut failures = Vec::new();
        if is_new || copy.hold_count == 0 {
            let kept = self
                .target_side()
                .keep(&self.keeping(self.target, common, KeepMethod::ReplaceHolds));
            failures.extend(
                kept.err()
                    .map(|error| format!("{common} is not held at the target: {error}")),
            );
        }
        let is_kept = |here: &ReplicaSnapshot| match &bookmark {
            Some(name) if bookmarks => self
                .source
                .snapshots
                .iter()
                .any(|one| one.is_bookmark && one.name == *name),
            _ => here.hold_count > 0,
        };
        // Release nothing at the source until the target holds the snapshot.
        if let Some(here) = here.filter(|here| failures.is_empty() && (is_new || !is_kept(here))) {
            let method = if bookmarks {
                KeepMethod::Bookmark
            } else {
                KeepMethod::ReplaceHolds
            };
            let kept = self
                .source_side()
                .keep(&self.keeping(&self.source.name, &here.name, method));
            failures.extend(
                kept.err()
                    .map(|error| format!("{common} is not kept at the source: {error}")),
            );
        }
        done.notes.extend(failures);
    }
}
