//! State that all connections of a target server share.

use std::sync::Arc;

use super::super::login::Authentication;
use super::super::target_set::TargetSet;
use super::RandomSource;
use super::directory::SessionDirectory;
use super::event::TargetEventSink;
use crate::server::client::ServerCore;

/// State that all connections of a target server share.
pub(super) struct TargetShared {
    pub(super) core: ServerCore,
    pub(super) targets: Arc<TargetSet>,
    pub(super) authentication: Authentication,
    pub(super) events: Arc<dyn TargetEventSink>,
    pub(super) randomness: Arc<dyn RandomSource>,
    pub(super) sessions: SessionDirectory,
}
