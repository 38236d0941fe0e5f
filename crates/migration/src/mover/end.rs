//! The end of a migration: the machine runs there, or here.

use std::sync::atomic::Ordering;

use holdfast_block::error_text;
use holdfast_engine::Unit;
use holdfast_host::ConfigurationLanguage;

use super::{BreakReason, Mover, Stage};
use crate::error::{Error, Result};
use crate::far::FarRequest;
use crate::memory_relay::MemoryRelay;
use crate::report::MigrationPhase;
use crate::resolution::{AskedHost, Resolution};

impl Mover<'_, '_, '_> {
    /// The machine runs there.
    pub(super) fn moved(&mut self) -> u64 {
        self.watch_end.store(true, Ordering::Release);
        self.times.end(MigrationPhase::End, self.tools.common.clock.now());
        self.relay.as_ref().map_or(0, MemoryRelay::sent_bytes)
    }

    /// The hypervisor has resumed the machine here, or it has ended.
    pub(super) fn not_moved(&mut self, error: holdfast_host::Error) -> Result<Option<u64>> {
        self.watch_end.store(true, Ordering::Release);
        self.relay = None;
        if let Some(how) = self.tools.watched.ended()
            && self.stage != Stage::Opened
        {
            return Err(Error::Ended {
                machine: self.plan.machine.clone(),
                how: how.to_string(),
            });
        }
        match self.stage {
            Stage::Opened => self.resolve(error),
            // Files that its hypervisor there does not have open will not become those: each attempt stops the machine.
            Stage::Breaking {
                reason: BreakReason::Late,
            } if self.attempt_count < self.tools.attempt_count_max && self.unverified.is_none() => {
                self.stage = Stage::Disks;
                self.times.since = self.tools.common.clock.now();
                if self.source.is_none() {
                    self.tools.common.observer.phase(MigrationPhase::Disks);
                    let progress = self.job.progress;
                    progress.phase("copying what was written meanwhile", Unit::Bytes);
                }
                // The copies may have been ready again before the hypervisor was.
                self.advance()?;
                Ok(None)
            }
            Stage::Breaking {
                reason: BreakReason::Late,
            } => Err(self.unverified.take().unwrap_or_else(|| self.frozen_too_long())),
            _ => Err(Error::of_hypervisor(&self.plan.machine, error)),
        }
    }

    /// The hypervisor has failed after the relay was opened: where the machine runs is asked of both hosts. It must not run
    /// on both.
    fn resolve(&mut self, error: holdfast_host::Error) -> Result<Option<u64>> {
        let (uuid, tools) = (&self.plan.uuid, &self.tools.common);
        let here = self
            .tools
            .watched
            .describe()
            .map(|description| description.summary.state);
        let here = here.ok();
        let mut asked = AskedHost::new(tools);
        let there = asked.state(uuid);
        match Resolution::of(here, there.as_ref().ok().copied()) {
            Resolution::Moved => {
                tools.observer.left(&error_text(&error));
                if self.plan.language == ConfigurationLanguage::CommandLine {
                    let ended = tools.control.power_off(uuid);
                    ended.map_err(|error| Error::of_hypervisor(&self.plan.machine, error))?;
                }
                Ok(Some(self.moved()))
            }
            Resolution::PowerOffThere => {
                asked.power_off(uuid)?;
                Err(Error::of_hypervisor(&self.plan.machine, error))
            }
            Resolution::StaysHere => Err(Error::of_hypervisor(&self.plan.machine, error)),
            Resolution::Unknown if self.plan.language == ConfigurationLanguage::CommandLine => {
                tools.observer.left(&error_text(&error));
                Err(Error::Interrupted {
                    machine: self.plan.machine.clone(),
                    destination: tools.pull.destination.clone(),
                })
            }
            Resolution::Unknown => Err(Error::Unresolved {
                machine: self.plan.machine.clone(),
                here: here.map_or_else(|| "unknown".to_owned(), |state| state.to_string()),
                host: tools.far.host().to_owned(),
                there: there.map_or_else(|error| error_text(&error), |state| state.to_string()),
                source: Box::new(error),
            }),
        }
    }

    /// Ends everything after a failure. The machine runs here when this returns.
    pub(super) fn give_up(&mut self) {
        if matches!(
            self.stage,
            Stage::Memory | Stage::Stopped { .. } | Stage::HandingOver { .. }
        ) {
            self.break_stream(BreakReason::GivingUp);
        }
        self.watch_end.store(true, Ordering::Release);
        self.relay = None;
        self.copies.revoke_freeze();
        self.copies.cancel();
        if self.attempt_count > 0 {
            let paths = self.plan.disks.iter().map(|disk| disk.path.clone()).collect();
            // When the relay was opened, the machine may be there.
            let undo = match self.source {
                Some(_) => FarRequest::DeleteOverlays { paths },
                None => FarRequest::UnnameDisks { paths },
            };
            let undo = (self.stage != Stage::Opened).then_some(undo);
            let path = self.tools.memory_socket.clone();
            for request in undo.into_iter().chain([FarRequest::RemoveSocket { path }]) {
                if let Err(error) = self.tools.common.far.ask(&request) {
                    self.tools.common.observer.left(&error_text(&error));
                    if matches!(error, Error::FarHost { .. }) {
                        break;
                    }
                }
            }
        }
    }
}
