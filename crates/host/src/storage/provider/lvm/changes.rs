//! Differences of two snapshots, and the space of one, from the metadata of their thin pool.
//!
//! The metadata of an active pool cannot be read directly, since the kernel keeps changing it. The kernel can reserve
//! a metadata snapshot (`reserve_metadata_snap`), which the programs read. Each pool has at most one, and it uses
//! space until it is released. So it is used under a lock, and the pool has a tag in the meantime. An unused metadata
//! snapshot of a pool with Holdfast's tag is the leftover of a killed process, and is released. Without the tag it
//! belongs to another program, and the query fails.
//!
//! Source: Linux, Documentation/admin-guide/device-mapper/thin-provisioning.rst; thin_delta(8), thin_ls(8).

use std::collections::BTreeMap;

use rustix::fs::FlockOperation;

use super::super::{HostSnapshot, HostSnapshotName, ProviderError, ProviderResult};
use super::names::METADATA;
use super::report::Volume;
use super::view::LockFile;
use super::{LVCHANGE, Lvm, Snapshot};
use crate::storage::changed_blocks::{ChangedRanges, ThinDeltaQuery, by_thin_delta};
use crate::system::process::ToolError;

const DMSETUP: &str = "dmsetup";
const THIN_DELTA: &str = "thin_delta";
const THIN_LS: &str = "thin_ls";

impl Lvm {
    /// The ranges in which a volume may differ between two of its existing, held host snapshots.
    pub fn changes(&self, older: &HostSnapshotName, newer: &HostSnapshotName) -> ProviderResult<ChangedRanges> {
        let volumes = self.volumes_of(&older.dataset.name)?;
        let (before, after) = (volumes.snapshot(older)?, volumes.snapshot(newer)?);
        let refused = |reason: &str| ProviderError::Refused {
            action: "compare",
            what: newer.to_string(),
            reason: reason.to_owned(),
        };
        // Snapshots of other programs may have been written before they became read-only.
        let are_from_holdfast = [&before, &after].into_iter().all(Snapshot::is_from_holdfast);
        if !are_from_holdfast || older.dataset != newer.dataset {
            return Err(refused("one of them is not a host snapshot of Holdfast"));
        }
        if before.volume.pool != after.volume.pool || before.volume.size_bytes != after.volume.size_bytes {
            return Err(refused("they are in different pools, or have different sizes"));
        }
        let unknown = || refused("its pool does not report it");
        let pool = volumes.pool_of(after.volume).ok_or_else(unknown)?;
        let query = ThinDeltaQuery {
            ids: (
                before.volume.thin_id.ok_or_else(unknown)?,
                after.volume.thin_id.ok_or_else(unknown)?,
            ),
            block_bytes: pool.chunk_bytes.ok_or_else(unknown)?,
            size_bytes: after.volume.size_bytes,
        };
        let (first, second) = (query.ids.0.to_string(), query.ids.1.to_string());
        let arguments = ["--metadata-snap", "--snap1", &first, "--snap2", &second];
        let answer = self.read_metadata(pool, THIN_DELTA, &arguments)?;
        by_thin_delta(&answer, &query).map_err(|error| ProviderError::Invalid {
            program: THIN_DELTA,
            detail: error.to_string(),
        })
    }

    /// Adds the total and exclusive bytes of snapshots. If the program for this is missing, they remain unknown.
    pub(super) fn measure_by_metadata(&self, snapshots: &mut [HostSnapshot]) -> ProviderResult<()> {
        let mut rooms: BTreeMap<String, BTreeMap<u64, (u64, u64)>> = BTreeMap::new();
        for snapshot in snapshots {
            let volumes = self.volumes_of(&snapshot.name.dataset.name)?;
            let volume = volumes.snapshot(&snapshot.name)?.volume;
            let (Some(pool), Some(id)) = (volumes.pool_of(volume), volume.thin_id) else {
                continue;
            };
            // The metadata of an inactive pool cannot be read.
            if !pool.is_active {
                continue;
            }
            if !rooms.contains_key(&pool.uuid) {
                let arguments = [
                    "--metadata-snap",
                    "--no-headers",
                    "--format",
                    "DEV,MAPPED_BYTES,EXCLUSIVE_BYTES",
                ];
                let answer = match self.read_metadata(pool, THIN_LS, &arguments) {
                    Err(ProviderError::Tool(ToolError::NotFound { .. })) => return Ok(()),
                    other => other?,
                };
                rooms.insert(pool.uuid.clone(), parse_space(&answer));
            }
            if let Some((mapped_bytes, own_bytes)) = rooms[&pool.uuid].get(&id) {
                snapshot.referenced_bytes = Some(*mapped_bytes);
                snapshot.used_bytes = Some(*own_bytes);
            }
        }
        Ok(())
    }

    /// Runs a program on a metadata snapshot of a pool.
    fn read_metadata(&self, pool: &Volume, program: &str, arguments: &[&str]) -> ProviderResult<String> {
        let full = pool.full_name();
        let path = self.locks.join(format!("lvm-metadata-{}.lock", pool.uuid));
        let _lock = LockFile::open(&path, FlockOperation::LockExclusive)?;
        // The pool may have been tagged in the meantime.
        let volumes = self.volumes(Some(&pool.group))?;
        let is_left = volumes
            .named(&pool.group, &pool.name)
            .is_some_and(|pool| pool.tags.has_metadata);
        let device = format!("{}-{}", escaped(&pool.group), escaped(&pool.name));
        let target = format!("{device}-tpool");
        match (self.kept_state(&target, &full)?, is_left) {
            (Some(_), true) => self.send_message(&target, &full, "release_metadata_snap")?,
            (Some(_), false) => {
                return Err(ProviderError::Refused {
                    action: "read the metadata of",
                    what: full,
                    reason: format!(
                        "another process has reserved a snapshot of them; if it is not needed any more, \
                         dmsetup message {target} 0 release_metadata_snap"
                    ),
                });
            }
            (None, _) => {}
        }
        let note = |change: &str| {
            self.ask("tag", &full, LVCHANGE, &["-qq", change, METADATA, &full])
                .map(drop)
        };
        note("--addtag")?;
        let answer = self
            .send_message(&target, &full, "reserve_metadata_snap")
            .and_then(|()| {
                let state = self.kept_state(&target, &full)?;
                let place = format!("/dev/mapper/{device}_tmeta");
                let mut arguments = arguments.to_vec();
                arguments.push(&place);
                let answer = self.ask("read the metadata of", &full, program, &arguments);
                // A released metadata snapshot may have been overwritten while it was read.
                let is_kept = state.is_some() && self.kept_state(&target, &full)? == state;
                self.send_message(&target, &full, "release_metadata_snap")?;
                if is_kept {
                    return answer;
                }
                Err(ProviderError::Refused {
                    action: "read the metadata of",
                    what: full.clone(),
                    reason: "another process has released it in the meantime".to_owned(),
                })
            });
        // If the release failed, the tag still marks the metadata snapshot as Holdfast's own.
        if self.kept_state(&target, &full)?.is_none() {
            note("--deltag")?;
        }
        answer
    }

    /// The block of a pool's metadata snapshot; none if the pool has no metadata snapshot.
    fn kept_state(&self, target: &str, full: &str) -> ProviderResult<Option<u64>> {
        let answer = self.ask("inspect", full, DMSETUP, &["status", target])?;
        // "0 4194304 thin-pool 17 123/1024 1027/32768 138 rw ...": the field is a hyphen without a metadata snapshot.
        let mut fields = answer
            .split_ascii_whitespace()
            .skip_while(|field| *field != "thin-pool");
        match fields.nth(4) {
            Some("-") => Ok(None),
            Some(block) if block.parse::<u64>().is_ok() => Ok(block.parse().ok()),
            _ => Err(ProviderError::Invalid {
                program: DMSETUP,
                detail: format!("the status of {target} is {:?}", answer.trim()),
            }),
        }
    }

    fn send_message(&self, target: &str, full: &str, message: &str) -> ProviderResult<()> {
        self.ask(
            "read the metadata of",
            full,
            DMSETUP,
            &["message", target, "0", message],
        )
        .map(drop)
    }
}

/// Escapes a name of LVM for the name of a device.
fn escaped(name: &str) -> String {
    name.replace('-', "--")
}

/// Parses the total and exclusive bytes of volumes, by their thin ids.
fn parse_space(answer: &str) -> BTreeMap<u64, (u64, u64)> {
    let row = |line: &str| {
        let mut fields = line.split_ascii_whitespace().map(|field| field.parse::<u64>().ok());
        Some((fields.next()??, (fields.next()??, fields.next()??)))
    };
    answer.lines().filter_map(row).collect()
}
