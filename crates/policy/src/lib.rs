//! Retention and schedules: which snapshots are kept and why, and when jobs run.
//!
//! [`plan`] is a pure function from a [`Policy`] and the snapshots of one machine to a [`RetentionPlan`]: a
//! [`Decision`] per snapshot, each with its reasons. It reads no clock and removes nothing; the caller shows the plan
//! and then executes it.
//!
//! For every policy and every set of snapshots:
//! - a policy without a rule keeps everything;
//! - a protected snapshot, one in the future, and the newest one are kept;
//! - adding a rule to a non-empty policy, or raising a count, never removes more;
//! - pruning again at once removes nothing, and pruning every day leaves the same as pruning once at the end;
//! - the order of the snapshots does not matter.
//!
//! The user's view is `docs/retention.md`.
//!
//! [`Calendar`] is a recurring event; [`simulate`] simulates taking and pruning snapshots over some days.
//! [`plan_replication`] decides what to send so that a replica has the same host snapshots. [`sanoid`] reads sanoid's
//! configuration and makes the same decisions as sanoid. [`config`] reads `holdfast.toml`, and [`schedule`] decides
//! when its jobs run.

mod calendar;
pub mod config;
mod fixed_duration;
mod glob;
mod nearest;
mod period;
mod plan;
mod policy;
mod reason;
mod replication;
pub mod sanoid;
pub mod schedule;
mod simulate;
mod span;

pub use calendar::{Calendar, ParseCalendarError};
pub use fixed_duration::{FixedDuration, ParseFixedDurationError};
pub use glob::Glob;
pub use jiff::Timestamp;
pub use jiff::tz::TimeZone;
pub use nearest::nearest;
pub use period::Period;
pub use plan::{Candidate, Decision, Protection, RetentionPlan, Verdict, plan};
pub use policy::Policy;
pub use reason::Reason;
pub use replication::{
    Divergence, Idle, PointKind, ReplicaPlan, ReplicaPoint, ReplicaRules, ReplicaStep, Replication, SnapshotChoice,
    Streams, TargetOrder, plan_replication,
};
pub use simulate::{
    Band, DAY_COUNT_MAX, KeptPoint, Pruning, Scenario, SimulatedDay, Simulation, SimulationError, simulate,
};
pub use span::{ParseSpanError, Span};
