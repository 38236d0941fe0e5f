//! Runs a server in the foreground, for all protocols.

use std::net::SocketAddr;
use std::num::NonZero;
use std::os::fd::OwnedFd;

use holdfast_daemon::ServiceState;
use holdfast_engine::{
    ControlPlace, ExportStatus, IscsiOptions, NbdOptions, ServeRequest, ServeSource, SourceChoice, VhostUserOptions,
    serve,
};
use holdfast_host::keep_request_buffers;

use super::sources::OVERLAY_DEFAULT;
use crate::context::Context;
use crate::context::service::Service;
use crate::errors::Error;
use crate::exit::Exit;

/// A server to run.
pub(super) struct ServerPlan {
    pub(super) choice: SourceChoice,
    pub(super) nbd: Option<NbdOptions>,
    pub(super) iscsi: Option<IscsiOptions>,
    pub(super) vhost_user: Option<VhostUserOptions>,
    /// The lines about the first exports.
    pub(super) lines: fn(&[ExportStatus]) -> String,
    pub(super) max_connections: NonZero<usize>,
    /// A control socket that systemd has opened.
    pub(super) control: Option<OwnedFd>,
    pub(super) repository: RepositoryUse,
}

/// When the repository is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RepositoryUse {
    /// If a snapshot is served.
    IfNeeded,
    /// Also if it is named: snapshots may be added later.
    IfNamed,
}

/// Runs a server until it is interrupted or stopped.
pub(super) fn run_server(plan: ServerPlan, context: &Context) -> Result<Exit, Error> {
    let needs_repository = plan
        .choice
        .sources
        .iter()
        .any(|source| matches!(source, ServeSource::Snapshot(_)));
    let is_named = plan.repository == RepositoryUse::IfNamed && context.is_repository_named();
    let repository = if needs_repository || is_named {
        Some(context.open_repository()?)
    } else {
        None
    };
    keep_request_buffers();
    let request = ServeRequest {
        choice: plan.choice,
        zone: context.zone().clone(),
        nbd: plan.nbd,
        iscsi: plan.iscsi,
        vhost_user: plan.vhost_user,
        connection_count_max: Some(plan.max_connections),
        control: Some(ControlPlace {
            runtime: context.runtime_folder(),
            inherited: plan.control,
            pid: std::process::id(),
            scratch: OVERLAY_DEFAULT.into(),
        }),
        clock: context.clock().clone(),
    };
    let service = Service::of(context);
    let mut printed = Ok(());
    context.work(1, |job| {
        serve(repository.as_ref(), request, job, &mut |exports| {
            printed = context.output().data((plan.lines)(exports).as_bytes());
            service.report(&ServiceState::Ready);
        })
    })?;
    service.report(&ServiceState::Stopping);
    printed?;
    Ok(Exit::Ok.with_warning_count(context.console().warnings().len()))
}

/// The users who can connect to an address.
pub(super) fn readers(address: SocketAddr) -> String {
    if address.ip().is_loopback() {
        "any user of this host".to_owned()
    } else {
        format!("anyone who can connect to {address}")
    }
}
