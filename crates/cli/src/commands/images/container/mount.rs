//! `holdfast container mount` and `unmount`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use holdfast_engine::{
    ContainerMount, ContainerPlace, DiskTransport, MountedDisk, MountedSnapshot, ServeUntil, mount_snapshot,
    unmount_container, unmount_snapshot, wait_for_unmount,
};
use holdfast_host::provider::Mounts;
use serde::Serialize;

use super::container_tools;
use super::mount_args::{MountContainerArgs, TransportArg, server_words};
use super::server::{serve_container_mount, serve_snapshot};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::empty_mount_point;
use crate::context::mounts::started;
use crate::context::server_process::{ServerStart, start_server};
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

impl Verb for MountContainerArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Mount a container",
            line: "holdfast container mount /srv/web1 /mnt/web1",
        },
        Example {
            wish: "Look at a snapshot beside the container",
            line: "holdfast container mount /srv/web1 /mnt/yesterday --snapshot yesterday",
        },
        Example {
            wish: "Use the disk as a raw file, without root",
            line: "holdfast container mount /srv/web1 /mnt/disk --disk",
        },
        Example {
            wish: "Mount a container without FUSE and a loop device",
            line: "holdfast container mount /srv/web1 /mnt/web1 --through nbd",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let folder = empty_mount_point(&self.folder)?;
        let report = self.checked(&place, &folder, context)?;
        if let (Some(snapshot), false) = (&self.snapshot, self.disk) {
            return self.mount_snapshot(&place, snapshot, &folder, &report, context);
        }
        if self.options.foreground {
            let mut printed = Ok(Exit::Ok);
            let mut ready = || printed = context.report(&report);
            match &self.snapshot {
                Some(_) => serve_snapshot(self, &folder, ServeUntil::Unmounted, context, &mut ready)?,
                None => serve_container_mount(self, &folder, context, &mut ready)?,
            }
            return Ok(printed?.with_warning_count(context.console().warnings().len()));
        }
        match context.serve_in_background(self.server_words(&place, &folder), &folder, None)? {
            None => context.report(&report),
            Some(exit) => Ok(exit),
        }
    }
}

impl MountContainerArgs {
    /// Mounts the file system of a snapshot, whose disk another process serves.
    fn mount_snapshot(
        &self,
        place: &ContainerPlace,
        snapshot: &str,
        folder: &Path,
        report: &ContainerMounted,
        context: &Context,
    ) -> Result<Exit, Error> {
        let opened = MountedSnapshot::open(place, snapshot, MountedDisk::FileSystem)?;
        let mut serve = |disk_folder: &Path| {
            let mut words = self.server_words(place, disk_folder);
            words.push("--until-detached".into());
            started(context.serve_in_background(words, disk_folder, None))
        };
        let runtime = context.runtime_folder();
        context.work(1, |job| mount_snapshot(opened, folder, &runtime, &mut serve, job))?;
        let exit = context.report(report)?;
        if self.options.foreground {
            context.work(1, |job| wait_for_unmount(folder, job))?;
        }
        Ok(exit)
    }
}

impl MountContainerArgs {
    /// Checks in this process what the server would refuse, and makes the report.
    fn checked(&self, place: &ContainerPlace, folder: &Path, context: &Context) -> Result<ContainerMounted, Error> {
        if !self.disk && !rustix::process::geteuid().is_root() {
            return Err(Error::refused(
                Kind::Permission,
                "only root can mount the file system of a container",
                "use --disk to get its disk as a raw file, or run it as root",
            ));
        }
        let (size_bytes, filesystem) = if let Some(snapshot) = &self.snapshot {
            let snapshot = MountedSnapshot::open(place, snapshot, self.mounted_disk())?;
            (snapshot.size_bytes(), snapshot.file_system())
        } else {
            let tools = container_tools(context);
            let request = self.request(folder, context)?;
            let mount = ContainerMount::open(&request, &tools)?;
            (mount.size_bytes(), mount.file_system())
        };
        Ok(ContainerMounted {
            container: place.folder.display().to_string(),
            snapshot: self.snapshot.clone(),
            folder: folder.display().to_string(),
            is_writable: self.snapshot.is_none(),
            filesystem,
            size_bytes,
        })
    }
}

/// Mounts a container in the background. Nothing is printed.
///
/// # Errors
/// It cannot be mounted, for the reason that its server gives.
pub(crate) fn start_mount(
    place: &ContainerPlace,
    point: &Path,
    transport: DiskTransport,
    context: &Context,
) -> Result<(), Error> {
    let folder = empty_mount_point(point)?;
    let mut words = server_words("mount-server", place, &folder);
    words.extend(TransportArg::of(transport).words().iter().map(OsString::from));
    words.push("--json".into());
    let failed = |reason: String| Error::refused(Kind::Io, reason, "holdfast container mount shows more");
    match start_server(&words, None, &**context.clock()) {
        Ok(ServerStart::Ready) => Ok(()),
        Ok(ServerStart::Silent) => Err(failed("the process that serves the disk does not answer".to_owned())),
        Ok(ServerStart::Ended { output, .. }) => Err(failed(error_in(&output))),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// The message of an error, with its reasons, in the output of a process.
fn error_in(output: &[String]) -> String {
    let document = serde_json::from_str::<serde_json::Value>(&output.join("\n")).unwrap_or_default();
    let causes = document["error"]["causes"].as_array().into_iter().flatten();
    let texts = std::iter::once(&document["error"]["message"]).chain(causes);
    let texts: Vec<&str> = texts.filter_map(serde_json::Value::as_str).collect();
    if texts.is_empty() {
        return "the process that serves the disk has ended".to_owned();
    }
    texts.join(": ")
}

/// Report of `container mount`.
#[derive(Debug, Serialize)]
struct ContainerMounted {
    container: String,
    snapshot: Option<String>,
    folder: String,
    is_writable: bool,
    filesystem: Option<&'static str>,
    size_bytes: u64,
}

impl Report for ContainerMounted {
    fn command(&self) -> &'static str {
        "container mount"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let what = match &self.snapshot {
            Some(snapshot) => format!("the snapshot {snapshot} of {}", self.container),
            None => self.container.clone(),
        };
        let size = units::bytes(self.size_bytes);
        let writable = if self.is_writable { "writable" } else { "read-only" };
        page.line(&match self.filesystem {
            Some(kind) => format!("{what} is mounted on {}: {kind}, {size}, {writable}", self.folder),
            None => format!("{what} is mounted as {}/disk.raw, {size}, {writable}", self.folder),
        });
    }
}

/// Arguments of `container unmount`.
#[derive(Debug, clap::Args)]
pub(super) struct UnmountContainerArgs {
    /// The container, or the folder where it is mounted
    #[arg(value_name = "CONTAINER")]
    container: PathBuf,
}

impl Verb for UnmountContainerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Unmount a container",
        line: "holdfast container unmount /srv/web1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let is_container = self.place_of_mount(&context.runtime_folder()).is_some();
        if !is_container
            && let Ok(folder) = self.container.canonicalize()
            && context.work(1, |job| unmount_snapshot(&folder, job))?
        {
            return context.report(&ContainerUnmounted {
                container: self.container.display().to_string(),
                folders: vec![folder.display().to_string()],
            });
        }
        let place = self.place(context)?;
        let unmounted = context.work(1, |job| unmount_container(&place, job))?;
        if !unmounted.is_complete {
            return Err(Error::refused(
                Kind::Locked,
                format!("the processes of {} have not ended", place.folder.display()),
                "they end when no program uses the disk any more; try again",
            ));
        }
        context.report(&ContainerUnmounted {
            container: place.folder.display().to_string(),
            folders: unmounted
                .points
                .iter()
                .map(|point| point.display().to_string())
                .collect(),
        })
    }
}

impl UnmountContainerArgs {
    /// The container itself, or that of a mount point.
    fn place(&self, context: &Context) -> Result<ContainerPlace, Error> {
        let runtime = context.runtime_folder();
        if let Some(place) = self.place_of_mount(&runtime) {
            return Ok(place);
        }
        Ok(ContainerPlace::find(&self.container, &runtime)?)
    }

    fn place_of_mount(&self, runtime: &Path) -> Option<ContainerPlace> {
        let folder = self.container.canonicalize().ok()?;
        let mounts = Mounts::read().ok()?;
        ContainerPlace::mounted_on(&folder, runtime, &mounts)
    }
}

/// Report of `container unmount`.
#[derive(Debug, Serialize)]
struct ContainerUnmounted {
    container: String,
    folders: Vec<String>,
}

impl Report for ContainerUnmounted {
    fn command(&self) -> &'static str {
        "container unmount"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!("{} is unmounted", self.container));
    }
}
