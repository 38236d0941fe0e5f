//! Why a machine that was running has ended, according to the log of its QEMU.

use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Number of bytes at the end of a log that are read.
const LOG_BYTES: u64 = 16 << 10;
/// Limits on the lines that are shown, and on the characters of each.
const LINE_COUNT: usize = 3;
const LINE_CHARS: usize = 300;
/// Part of the line that libvirt writes when it starts a QEMU.
const STARTS: &str = ": starting up libvirt version";
/// Part of the line that libvirt writes after a QEMU has ended.
const ENDS: &str = ": shutting down, reason=";

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineEnd {
    /// The guest or a user has shut the machine down.
    SwitchedOff,
    /// QEMU crashed.
    Crashed {
        /// The last lines of QEMU's log, if it can be read.
        last_log_lines: Option<String>,
    },
    /// QEMU has ended for an unknown reason.
    Gone,
}

impl fmt::Display for MachineEnd {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SwitchedOff => formatter.write_str("was switched off"),
            Self::Crashed { last_log_lines: None } => formatter.write_str("has crashed"),
            Self::Crashed {
                last_log_lines: Some(words),
            } => write!(formatter, "has crashed (last lines of its log: {words})"),
            Self::Gone => formatter.write_str("has ended: its QEMU exited"),
        }
    }
}

/// The last lines that a QEMU wrote to its log at `path`; none if the log does not exist or is not readable.
pub(crate) fn last_log_lines(path: &Path) -> Option<String> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut file = File::options()
        .read(true)
        .custom_flags(i32::try_from(flags.bits()).ok()?)
        .open(path)
        .ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() {
        return None;
    }
    file.seek(SeekFrom::Start(metadata.len().saturating_sub(LOG_BYTES)))
        .ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes).ok()?;
    lines_of_qemu(&String::from_utf8_lossy(&bytes))
}

/// The last lines that QEMU itself has written since its last start.
fn lines_of_qemu(text: &str) -> Option<String> {
    let since_start = text.rfind(STARTS).map_or(text, |at| &text[at..]);
    let is_said =
        |line: &&str| !line.is_empty() && !line.ends_with('\\') && !line.contains(STARTS) && !line.contains(ENDS);
    let clean = |line: &str| -> String {
        line.chars()
            .filter(|letter| !letter.is_control())
            .take(LINE_CHARS)
            .collect()
    };
    let mut lines: Vec<String> = since_start
        .lines()
        .rev()
        .map(str::trim)
        .filter(is_said)
        .take(LINE_COUNT)
        .map(clean)
        .collect();
    lines.reverse();
    (!lines.is_empty()).then(|| lines.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::{MachineEnd, last_log_lines, lines_of_qemu};

    const LOG: &str = "2026-01-01 00:00:00.000+0000: starting up libvirt version: 9.0.0, qemu version: 7.2.22\n\
                       an older line\n\
                       2026-01-02 00:00:00.000+0000: shutting down, reason=destroyed\n\
                       2026-01-03 00:00:00.000+0000: starting up libvirt version: 9.0.0, qemu version: 7.2.22\n\
                       LC_ALL=C \\\n\
                       /usr/bin/qemu-system-x86_64 \\\n\
                       -name guest=web1\n\
                       qemu-system-x86_64: warning: \u{1b}[31mfirst\n\
                       qemu-system-x86_64: ../../blockdev-nbd.c:62: Assertion `x' failed.\n\
                       2026-01-04 00:00:00.000+0000: shutting down, reason=crashed\n";

    #[test]
    fn the_last_lines_are_those_of_the_last_qemu() {
        let words = lines_of_qemu(LOG).unwrap();
        assert!(words.ends_with("Assertion `x' failed."), "{words}");
        assert!(words.contains("[31mfirst") && !words.contains('\u{1b}'), "{words}");
        assert!(!words.contains("older") && !words.contains("reason"), "{words}");
        assert_eq!(
            lines_of_qemu("2026: starting up libvirt version: 9\n2026: shutting down, reason=crashed\n"),
            None
        );
    }

    #[test]
    fn only_a_regular_file_is_read_as_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("web1.log");
        std::io::Write::write_all(&mut std::fs::File::create(&log).unwrap(), LOG.as_bytes()).unwrap();
        assert!(last_log_lines(&log).unwrap().contains("Assertion"));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&log, &link).unwrap();
        assert_eq!((last_log_lines(&link), last_log_lines(folder.path())), (None, None));
    }

    #[test]
    fn each_end_has_a_description() {
        assert_eq!(MachineEnd::Crashed { last_log_lines: None }.to_string(), "has crashed");
        let words = Some("boom".to_owned());
        assert!(
            MachineEnd::Crashed { last_log_lines: words }
                .to_string()
                .contains("boom")
        );
    }
}
