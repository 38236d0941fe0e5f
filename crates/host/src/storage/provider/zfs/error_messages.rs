//! Classifies the error messages of ZFS. They have been the same since 2008; ZFS provides no error numbers.

use super::super::ProviderError;

/// Messages that are printed if no kernel module is loaded and zfs-fuse does not run.
const NO_SERVICE: [&str; 4] = [
    "modules are not loaded",
    "module is not loaded",
    "zfs-fuse daemon is running",
    "Unable to open /dev/zfs",
];

/// The error for a message.
pub(super) fn refusal(action: &'static str, what: &str, stderr: &str) -> ProviderError {
    let has = |words: &str| stderr.contains(words);
    let what = what.to_owned();
    let reason = stderr.trim().lines().map(str::trim).collect::<Vec<_>>().join("; ");
    match () {
        () if NO_SERVICE.iter().any(|words| has(words)) => ProviderError::NoService {
            provider: "ZFS",
            reason,
        },
        () if has("does not exist") || has("no such pool") || has("could not find any snapshots") => {
            ProviderError::NotFound { what }
        }
        () if has("has dependent clones") => {
            // The clones are listed after a line that explains how to destroy all of them.
            let clones: Vec<&str> = stderr.lines().skip(2).map(str::trim).collect();
            let clones = clones.join(", ");
            ProviderError::HasClones { what, clones }
        }
        () if has("dataset is busy") || has("snapshot has holds") || has("tag already exists") => {
            ProviderError::Held { what, reason }
        }
        () if has("already exists") => ProviderError::Exists { what },
        () if has("out of space") || has("No space left") => ProviderError::Full { action, what },
        () if has("suspended") => ProviderError::Suspended { action, what },
        () => ProviderError::Refused { action, what, reason },
    }
}
