//! State that all connections of a target server share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use holdfast_block::Clock;

use super::super::login::Authentication;
use super::super::target::Target;
use super::RandomSource;
use super::directory::SessionDirectory;
use super::event::TargetEventSink;
use crate::server::budget::Budget;
use crate::server::limits::Limits;
use crate::server::workers::Workers;

/// State that all connections of a target server share.
pub(super) struct TargetShared {
    pub(super) targets: Arc<[Arc<Target>]>,
    pub(super) authentication: Authentication,
    pub(super) limits: Limits,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) events: Arc<dyn TargetEventSink>,
    pub(super) randomness: Arc<dyn RandomSource>,
    pub(super) workers: Workers,
    pub(super) budget: Arc<Budget>,
    pub(super) sessions: SessionDirectory,
    pub(super) is_stopping: AtomicBool,
}
