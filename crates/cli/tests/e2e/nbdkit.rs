//! An nbdkit, whose filters slow a server down and whose plugins refuse what others can.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::host::text;
use crate::schedules::wait_until;

/// An nbdkit, which is killed on drop.
pub(crate) struct Nbdkit(Child);

impl Nbdkit {
    /// Serves at a new socket, by filters, a plugin and their parameters.
    #[expect(clippy::disallowed_methods, reason = "another program is the server")]
    pub(crate) fn serve(socket: &Path, words: &[&str]) -> Self {
        let child = Command::new("nbdkit")
            .args(["--foreground", "--exit-with-parent", "--unix", text(socket)])
            .args(words)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("nbdkit listens", || socket.exists());
        Self(child)
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
