//! Retention: which snapshots are kept, and why; and calendars: when they are taken.
//!
//! One pure function, [`plan`], goes from a [`Policy`] and the snapshots of one machine to a [`RetentionPlan`]: a
//! [`Decision`] per snapshot, each with its reasons. It reads no clock and removes nothing; whoever prunes shows the plan
//! first and then carries it out.
//!
//! What holds for every policy and every set of snapshots:
//! - a policy without a rule keeps everything;
//! - a protected snapshot, one in the future, and the newest one are kept;
//! - adding a rule to a policy that has one, or raising a count, never removes more;
//! - pruning again at once removes nothing, and pruning every day leaves what pruning once at the end would;
//! - the order in which the snapshots are given does not matter.
//!
//! The user's view is `docs/retention.md`.
//!
//! [`Calendar`] says when something happens again and again; [`simulate`] plays taking and pruning for some days.
//! [`plan_replication`] decides what is sent so that a copy elsewhere has the same snapshots.
//! [`sanoid`] reads the configuration of that program, and decides as it does. [`config`] reads our own, and [`schedule`] says when its jobs
//! run.

mod calendar;
pub mod config;
mod glob;
mod lapse;
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
pub use glob::Glob;
pub use jiff::Timestamp;
pub use jiff::tz::TimeZone;
pub use lapse::{Lapse, ParseLapseError};
pub use nearest::nearest;
pub use period::Period;
pub use plan::{Candidate, Decision, Protection, RetentionPlan, Verdict, plan};
pub use policy::Policy;
pub use reason::Reason;
pub use replication::{
    Choice, Divergence, Idle, PointKind, ReplicaPlan, ReplicaPoint, ReplicaRules, ReplicaStep, Replication, Streams,
    TargetOrder, plan_replication,
};
pub use simulate::{
    Band, DAY_COUNT_MAX, KeptPoint, Pruning, Scenario, SimulatedDay, Simulation, SimulationError, simulate,
};
pub use span::{ParseSpanError, Span};
