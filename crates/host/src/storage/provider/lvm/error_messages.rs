//! Classifies the error messages of LVM, which has one exit code for nearly all of them.

use super::super::ProviderError;

/// Messages that are printed if only root may run LVM, or if the kernel lacks the device mapper.
const NO_SERVICE: [&str; 4] = [
    "Running as a non-root user",
    "Permission denied",
    "Is device-mapper driver missing from kernel",
    "device-mapper driver and/or vdo kernel module may be missing",
];

/// The error for a message.
pub(super) fn refusal(action: &'static str, what: &str, stderr: &str) -> ProviderError {
    let has = |words: &str| stderr.contains(words);
    let what = what.to_owned();
    // Any answer may contain warnings.
    let lines = stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let is_noise = |line: &&str| {
        ["WARNING:", "File descriptor", "/dev/"]
            .iter()
            .any(|beginning| line.starts_with(beginning))
            || line.contains("--help")
    };
    let kept: Vec<&str> = lines.clone().filter(|line| !is_noise(line)).collect();
    let reason = if kept.is_empty() { lines.collect() } else { kept };
    let reason = reason.join("; ");
    match () {
        () if NO_SERVICE.iter().any(|words| has(words)) => ProviderError::NoService {
            provider: "LVM",
            reason: stderr.trim().lines().map(str::trim).collect::<Vec<_>>().join("; "),
        },
        () if has("Failed to find logical volume")
            || has("not found in Volume group")
            || has("not found in volume group")
            || has("Volume group") && has("not found") =>
        {
            ProviderError::NotFound { what }
        }
        () if has("already exists in volume group") => ProviderError::Exists { what },
        () if has(" in use.") || has("is used by another device") || has("contains a filesystem in use") => {
            ProviderError::Held {
                what,
                reason: "a process has it open".to_owned(),
            }
        }
        () if has("free space in thin pool") || has("insufficient free space") || has("Insufficient free space") => {
            ProviderError::Full { action, what }
        }
        () => ProviderError::Refused { action, what, reason },
    }
}
