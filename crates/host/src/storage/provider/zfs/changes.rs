//! Changes between two snapshots, from the stream of `zfs send -i`.

use std::fs::Metadata;
use std::io::Read;
use std::os::unix::fs::MetadataExt as _;

use super::super::{HostSnapshotName, ProviderError, ProviderResult};
use super::{ZFS, ZPOOL, Zfs, full, refusal};
use crate::storage::changed_blocks::{
    ChangedRanges, SendStreamError, SendStreamQuery, StreamObject, by_send_stream, guid_of_stream,
};
use crate::system::process::{LocalTools, PipedEnd, StreamTools as _};

/// Timeout for the exit of a sender that has sent everything.
const END_TIME_OUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Why a stream does not provide the changes. The fallback is to read everything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// ZFS cannot be called, or refuses.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// The stream is unusable.
    #[error(transparent)]
    Stream(#[from] SendStreamError),
}

/// The object whose changes are requested.
#[derive(Debug, Clone, Copy)]
pub enum SendQuery<'a> {
    /// A file with its metadata in both snapshots.
    File {
        /// In the older snapshot.
        before: &'a Metadata,
        /// In the newer snapshot.
        after: &'a Metadata,
    },
    /// A volume.
    Volume {
        /// The size in both snapshots.
        size_bytes: u64,
    },
}

impl Zfs {
    /// The ranges in which a file or volume may differ between two existing, held snapshots of a dataset.
    pub fn changes(
        &self,
        older: &HostSnapshotName,
        newer: &HostSnapshotName,
        query: SendQuery<'_>,
    ) -> Result<ChangedRanges, SendError> {
        let (from, to) = (full(older)?, full(newer)?);
        let query = SendStreamQuery {
            from_guid: self.guid(&from)?,
            to_guid: self.guid(&to)?,
            object: match query {
                SendQuery::File { before, after } if before.ino() != after.ino() => {
                    let reason = "it is another file now".to_owned();
                    return Err(SendStreamError::Unusable { reason }.into());
                }
                SendQuery::File { before, .. } => StreamObject::File {
                    number: before.ino(),
                    block_before_bytes: before.blksize(),
                    from_transaction: self.number_of("createtxg", &from),
                },
                SendQuery::Volume { .. } => StreamObject::Volume,
            },
            size_before_bytes: match query {
                SendQuery::File { before, .. } => before.len(),
                SendQuery::Volume { size_bytes } => size_bytes,
            },
            size_after_bytes: match query {
                SendQuery::File { after, .. } => after.len(),
                SendQuery::Volume { size_bytes } => size_bytes,
            },
        };
        let ask = |input: &mut dyn Read| by_send_stream(input, &query);
        let (found, ended) = self.read_stream(&["send", "-i", &from, &to], &ask)?;
        // The sender's error has more details than the error of its incomplete stream.
        if !ended.is_success() {
            return Err(refusal("send the changes of", &to, &ended.stderr).into());
        }
        Ok(found?.ranges)
    }

    /// Bytes that were written to a dataset between two of its snapshots; none if ZFS does not report them. The
    /// number is about the size of a stream.
    pub fn written_between(&self, older: &HostSnapshotName, newer: &HostSnapshotName) -> Option<u64> {
        let property = format!("written@{}", older.name);
        self.number_of(&property, &full(newer).ok()?)
    }

    /// Whether a volume was not written since a snapshot of it. The pool is synced first, so that flushed writes
    /// count.
    pub fn is_volume_unchanged(&self, since: &HostSnapshotName) -> ProviderResult<bool> {
        let volume = &since.dataset.name;
        full(since)?;
        let pool = volume.split('/').next().unwrap_or_default();
        let synced = self.tools.ask(ZPOOL, &["sync", pool])?;
        if !synced.is_success {
            return Err(refusal("write out", pool, &synced.stderr));
        }
        let written = self.number_of(&format!("written@{}", since.name), volume);
        Ok(written == Some(0))
    }

    /// The GUID of a snapshot. zfs-fuse has no property for it, so the GUID is then read from the begin record of the
    /// snapshot's stream.
    fn guid(&self, snapshot: &str) -> Result<u64, SendError> {
        if let Some(guid) = self.number_of("guid", snapshot) {
            return Ok(guid);
        }
        let mut sender = LocalTools::new(self.clock.clone(), END_TIME_OUT)
            .start(ZFS, &["send", snapshot])
            .map_err(ProviderError::from)?;
        let mut output = sender.take_output().expect("the output was not taken before");
        Ok(guid_of_stream(&mut output)?)
    }

    fn number_of(&self, property: &str, of: &str) -> Option<u64> {
        let arguments = ["get", "-Hp", "-o", "value", property, of];
        let answer = self
            .tools
            .ask(ZFS, &arguments)
            .ok()
            .filter(|answer| answer.is_success)?;
        answer.output.trim().parse().ok()
    }

    /// Starts a sender, and returns the result of `ask` on its stream and the outcome of the sender.
    fn read_stream<T>(&self, arguments: &[&str], ask: &dyn Fn(&mut dyn Read) -> T) -> ProviderResult<(T, PipedEnd)> {
        let tools = LocalTools::new(self.clock.clone(), END_TIME_OUT);
        let mut sender = tools.start(ZFS, arguments)?;
        let mut output = sender.take_output().expect("the output was not taken before");
        let found = ask(&mut output);
        // If the stream is not read to its end, the sender must not block on the pipe.
        drop(output);
        let (ended, _) = sender.answer(&*self.clock, END_TIME_OUT)?;
        Ok((found, ended))
    }
}
