//! A qemu-nbd, which has an image open and serves it.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::host::text;
use crate::schedules::wait_until;

/// A qemu-nbd, which is killed on drop.
pub(crate) struct QemuNbd(Child);

impl QemuNbd {
    /// Serves an image at a new socket, by options of qemu-nbd.
    #[expect(clippy::disallowed_methods, reason = "another program has the image open")]
    pub(crate) fn serve(image: &Path, socket: &Path, options: &[&str]) -> Self {
        let child = Command::new("qemu-nbd")
            .args(["-t", "-k", text(socket)])
            .args(options)
            .arg(image)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("qemu-nbd listens", || socket.exists());
        Self(child)
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
