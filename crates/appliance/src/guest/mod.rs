//! This program as process 1 of an appliance.

mod devices;
mod members;
mod modules;
mod mounted;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_guest_files::protocol::serve_appliance;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};

use self::devices::GuestDisks;
use self::modules::load;
use super::CHANNEL_NAME;

/// How often, and for how long, the channel is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
const LOOK_COUNT: u32 = 4000;

/// Serves the parent of this appliance, and powers it off. Call this only as process 1.
pub fn serve_as_init() {
    if let Err(error) = serve() {
        report(&format!("holdfast: {error}"));
    }
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        report(&format!("holdfast: {error}"));
    }
}

/// Writes a line to the console, which the parent shows if the appliance ends.
fn report(line: &str) {
    if let Ok(mut console) = File::options().write(true).open("/dev/console") {
        writeln!(console, "{line}").ok();
    }
}

fn serve() -> io::Result<()> {
    for (kind, folder) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
    ] {
        mount(kind, folder, kind, MountFlags::NOSUID | MountFlags::NOEXEC, None)?;
    }
    for module in ["virtio_pci", "virtio_console", "virtio_blk"] {
        load(module)?;
    }
    let channel = open_channel()?;
    // A panic becomes an answer.
    std::panic::set_hook(Box::new(|panic| report(&panic.to_string())));
    serve_appliance(
        Box::new(channel.try_clone()?),
        Box::new(channel),
        &mut GuestDisks::default(),
    )
}

fn open_channel() -> io::Result<File> {
    let clock = SystemClock::new();
    for _ in 0..LOOK_COUNT {
        if let Some(path) = channel_path() {
            return File::options().read(true).write(true).open(path);
        }
        clock.sleep(LOOK_INTERVAL);
    }
    Err(io::Error::other("there is no channel to the parent"))
}

fn channel_path() -> Option<PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    let mut ports = ports.flatten().filter(|port| {
        let name = fs::read_to_string(port.path().join("name"));
        name.is_ok_and(|name| name.trim() == CHANNEL_NAME)
    });
    ports
        .next()
        .map(|port| PathBuf::from("/dev").join(port.file_name()))
        .filter(|path| path.exists())
}
