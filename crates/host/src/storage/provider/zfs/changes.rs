//! What changed between two snapshots, as `zfs send -i` tells.

use std::fs::Metadata;
use std::io::Read;
use std::os::unix::fs::MetadataExt as _;

use super::super::{HostSnapshotName, ProviderError, ProviderResult};
use super::{ZFS, ZPOOL, Zfs, full, refusal};
use crate::storage::changed_blocks::{
    ChangedRanges, SendStreamError, SendStreamQuery, StreamObject, by_send_stream, guid_of_stream,
};
use crate::system::process::{LocalTools, PipedEnd, StreamTools as _};

/// How long a sender that has sent all may take to end.
const END_TIME_OUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Why a stream tells nothing. The way out is always to read everything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// ZFS cannot be asked, or refuses.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// The stream.
    #[error(transparent)]
    Stream(#[from] SendStreamError),
}

/// What changed of something may be asked for.
#[derive(Debug, Clone, Copy)]
pub enum SendQuery<'a> {
    /// A file, as it is in both snapshots.
    File {
        /// In the older one.
        before: &'a Metadata,
        /// In the newer one.
        after: &'a Metadata,
    },
    /// A volume.
    Volume {
        /// Its size, in both.
        size_bytes: u64,
    },
}

impl Zfs {
    /// Where a file or volume may differ between two snapshots of a dataset, which exist and are held.
    pub fn changes(
        &self,
        (older, newer): (&HostSnapshotName, &HostSnapshotName),
        question: SendQuery<'_>,
    ) -> Result<ChangedRanges, SendError> {
        let (from, to) = (full(older)?, full(newer)?);
        let question = SendStreamQuery {
            from_guid: self.guid(&from)?,
            to_guid: self.guid(&to)?,
            object: match question {
                SendQuery::File { before, after } if before.ino() != after.ino() => {
                    let reason = "it is another file now".to_owned();
                    return Err(SendStreamError::Unfit { reason }.into());
                }
                SendQuery::File { before, .. } => StreamObject::File {
                    number: before.ino(),
                    block_before_bytes: before.blksize(),
                    from_transaction: self.number_of("createtxg", &from),
                },
                SendQuery::Volume { .. } => StreamObject::Volume,
            },
            size_before_bytes: match question {
                SendQuery::File { before, .. } => before.len(),
                SendQuery::Volume { size_bytes } => size_bytes,
            },
            size_after_bytes: match question {
                SendQuery::File { after, .. } => after.len(),
                SendQuery::Volume { size_bytes } => size_bytes,
            },
        };
        let ask = |input: &mut dyn Read| by_send_stream(input, &question);
        let (found, ended) = self.listen(&["send", "-i", &from, &to], &ask)?;
        // What ended badly says more than what came of it.
        if !ended.is_well() {
            return Err(refusal("send the changes of", &to, &ended.complaint).into());
        }
        Ok(found?.ranges)
    }

    /// Bytes that were written to a dataset between two of its snapshots; none where ZFS does not tell. A stream is that long, about.
    pub fn written_between(&self, older: &HostSnapshotName, newer: &HostSnapshotName) -> Option<u64> {
        let property = format!("written@{}", older.name);
        self.number_of(&property, &full(newer).ok()?)
    }

    /// Whether nothing was written to a volume since a snapshot of it. What was flushed counts: it is made part of the pool first.
    pub fn is_volume_unchanged(&self, since: &HostSnapshotName) -> ProviderResult<bool> {
        let volume = &since.dataset.name;
        full(since)?;
        let pool = volume.split('/').next().unwrap_or_default();
        let synced = self.tools.ask(ZPOOL, &["sync", pool])?;
        if !synced.is_well {
            return Err(refusal("write out", pool, &synced.complaint));
        }
        let written = self.number_of(&format!("written@{}", since.name), volume);
        Ok(written == Some(0))
    }

    /// The identity of a snapshot. Where no property has it, as with zfs-fuse, it stands at the beginning of its stream.
    fn guid(&self, snapshot: &str) -> Result<u64, SendError> {
        if let Some(guid) = self.number_of("guid", snapshot) {
            return Ok(guid);
        }
        let mut sender = LocalTools::new(self.clock.clone(), END_TIME_OUT)
            .start(ZFS, &["send", snapshot])
            .map_err(ProviderError::from)?;
        let mut output = sender.take_output().expect("nobody has taken it");
        Ok(guid_of_stream(&mut output)?)
    }

    fn number_of(&self, property: &str, of: &str) -> Option<u64> {
        let words = ["get", "-Hp", "-o", "value", property, of];
        let answer = self.tools.ask(ZFS, &words).ok().filter(|answer| answer.is_well)?;
        answer.output.trim().parse().ok()
    }

    /// Starts a sender, and gives what `ask` makes of its stream, and how it ended.
    fn listen<T>(&self, words: &[&str], ask: &dyn Fn(&mut dyn Read) -> T) -> ProviderResult<(T, PipedEnd)> {
        let tools = LocalTools::new(self.clock.clone(), END_TIME_OUT);
        let mut sender = tools.start(ZFS, words)?;
        let mut output = sender.take_output().expect("nobody has taken it");
        let found = ask(&mut output);
        // A sender whose stream was of no use to its end must not wait for somebody to read it.
        drop(output);
        let (ended, _) = sender.answer(&*self.clock, END_TIME_OUT)?;
        Ok((found, ended))
    }
}
