//! The environment variables of the program, read once and passed in.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

/// The location of the repository.
pub const REPOSITORY: &str = "HOLDFAST_REPOSITORY";
/// File whose first line is the password.
pub const PASSWORD_FILE: &str = "HOLDFAST_PASSWORD_FILE";
/// Command whose first line of output is the password.
pub const PASSWORD_COMMAND: &str = "HOLDFAST_PASSWORD_COMMAND";
/// The password itself.
pub const PASSWORD: &str = "HOLDFAST_PASSWORD";
/// The location of the repository that is copied to.
pub const TO_REPOSITORY: &str = "HOLDFAST_TO_REPOSITORY";
/// File whose first line is the password of the repository that is copied to.
pub const TO_PASSWORD_FILE: &str = "HOLDFAST_TO_PASSWORD_FILE";
/// Command whose first line of output is the password of the repository that is copied to.
pub const TO_PASSWORD_COMMAND: &str = "HOLDFAST_TO_PASSWORD_COMMAND";
/// The password of the repository that is copied to.
pub const TO_PASSWORD: &str = "HOLDFAST_TO_PASSWORD";
/// File whose first line is the passphrase of encrypted volumes.
pub const LUKS_PASSWORD_FILE: &str = "HOLDFAST_LUKS_PASSWORD_FILE";
/// Command that prints the passphrase of encrypted volumes.
pub const LUKS_PASSWORD_COMMAND: &str = "HOLDFAST_LUKS_PASSWORD_COMMAND";
/// The passphrase of encrypted volumes.
pub const LUKS_PASSWORD: &str = "HOLDFAST_LUKS_PASSWORD";
/// Kernel of appliances.
pub const APPLIANCE_KERNEL: &str = "HOLDFAST_APPLIANCE_KERNEL";
/// File whose first line is the password of the user of a pool of XenServer.
pub const POOL_PASSWORD_FILE: &str = "HOLDFAST_POOL_PASSWORD_FILE";
/// Command whose first line of output is that password.
pub const POOL_PASSWORD_COMMAND: &str = "HOLDFAST_POOL_PASSWORD_COMMAND";
/// The password of the user of a pool of XenServer.
pub const POOL_PASSWORD: &str = "HOLDFAST_POOL_PASSWORD";
/// Fingerprints of certificates of hosts of pools, with commas between them.
pub const POOL_CERTIFICATE: &str = "HOLDFAST_POOL_CERTIFICATE";
/// Folder in which systemd puts the credentials of a service.
pub const CREDENTIALS_DIRECTORY: &str = "CREDENTIALS_DIRECTORY";

/// The address of libvirt, a variable of libvirt's own tools.
pub const LIBVIRT_URI: &str = "LIBVIRT_DEFAULT_URI";
/// The user's folder for sockets.
pub const RUNTIME_FOLDER: &str = "XDG_RUNTIME_DIR";

/// The user's VirtualBox folder, a variable of VirtualBox.
pub const VIRTUALBOX_HOME: &str = "VBOX_USER_HOME";
/// Where programs are searched.
pub const PATH: &str = "PATH";

/// The folder for the states of machines in host snapshots.
pub const STATES: &str = "HOLDFAST_STATES";

/// The user's folder for state that persists between runs.
pub const STATE_FOLDER: &str = "XDG_STATE_HOME";
/// The user's folder for configurations.
pub const CONFIGURATION_FOLDER: &str = "XDG_CONFIG_HOME";
/// The command that an ssh login requested.
pub const SSH_COMMAND: &str = "SSH_ORIGINAL_COMMAND";
/// Log filters: `debug`, `holdfast_host::qemu=trace`.
pub const LOG: &str = "HOLDFAST_LOG";
/// The path of the holdfast.toml.
pub const CONFIG: &str = "HOLDFAST_CONFIG";
/// Folder in which systemd stores the state of a service.
pub const STATE_DIRECTORY: &str = "STATE_DIRECTORY";
/// Socket at which systemd receives the state of a service.
pub const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
/// The process for which systemd has opened sockets.
pub const LISTEN_PID: &str = "LISTEN_PID";
/// Number of sockets that systemd has opened.
pub const LISTEN_FDS: &str = "LISTEN_FDS";
/// Names of these sockets.
pub const LISTEN_FDNAMES: &str = "LISTEN_FDNAMES";
/// Timeout of systemd's watchdog, in microseconds.
pub const WATCHDOG_USEC: &str = "WATCHDOG_USEC";
/// Set if standard error is systemd's journal.
pub const JOURNAL_STREAM: &str = "JOURNAL_STREAM";
/// The SSH key that templates are signed with.
pub const TEMPLATE_KEY: &str = "HOLDFAST_TEMPLATE_KEY";
/// The file of allowed signers of templates.
pub const ALLOWED_SIGNERS: &str = "HOLDFAST_ALLOWED_SIGNERS";
/// The file of revoked keys.
pub const REVOKED_SIGNERS: &str = "HOLDFAST_REVOKED_SIGNERS";
/// The id of a repository that is accepted although another one was seen at its location before.
pub const ACCEPT_REPOSITORY: &str = "HOLDFAST_ACCEPT_REPOSITORY";
/// The job; set for processes that a scheduler starts.
pub const JOB: &str = "HOLDFAST_JOB";
/// The user's own folder.
pub const HOME: &str = "HOME";

/// All variables, with their descriptions.
pub const VARIABLES: [(&str, &str); 33] = [
    (REPOSITORY, "like --repository"),
    (PASSWORD_FILE, "like --password-file"),
    (PASSWORD_COMMAND, "like --password-command"),
    (PASSWORD, "the password; less safe: other programs may see it"),
    (
        CREDENTIALS_DIRECTORY,
        "set by systemd; credentials holdfast.[to-|pool-]password",
    ),
    (
        ACCEPT_REPOSITORY,
        "id of a repository that may replace the one known at its place",
    ),
    (STATES, "like --states, for host snapshots of machines"),
    (TO_REPOSITORY, "like --to of holdfast copy"),
    (TO_PASSWORD_FILE, "like --to-password-file"),
    (TO_PASSWORD_COMMAND, "like --to-password-command"),
    (TO_PASSWORD, "the password of that repository; less safe"),
    (LUKS_PASSWORD_FILE, "like --luks-password-file"),
    (LUKS_PASSWORD_COMMAND, "like --luks-password-command"),
    (LUKS_PASSWORD, "the passphrase of encrypted volumes; less safe"),
    (APPLIANCE_KERNEL, "like --appliance-kernel"),
    (POOL_PASSWORD_FILE, "like --pool-password-file"),
    (POOL_PASSWORD_COMMAND, "like --pool-password-command"),
    (POOL_PASSWORD, "the password of a pool user; less safe"),
    (POOL_CERTIFICATE, "like --pool-certificate, with commas between several"),
    (TEMPLATE_KEY, "like --sign of holdfast template push"),
    (ALLOWED_SIGNERS, "like --allowed-signers of holdfast template"),
    (REVOKED_SIGNERS, "like --revoked-signers of holdfast template"),
    (CONFIG, "like --config; default /etc/holdfast/holdfast.toml"),
    (STATE_DIRECTORY, "set by systemd; like --state"),
    (JOB, "set by the daemon: the job that runs"),
    (LIBVIRT_URI, "like --connect, for machines"),
    (
        VIRTUALBOX_HOME,
        "VirtualBox's list of machines; default ~/.config/VirtualBox",
    ),
    (RUNTIME_FOLDER, "folder for sockets; default /run"),
    (
        CONFIGURATION_FOLDER,
        "folder of TPM states of qemu:///session; default ~/.config",
    ),
    (
        STATE_FOLDER,
        "folder for state: the journal of running jobs in holdfast/runs",
    ),
    (HOME, "without XDG_STATE_HOME: ~/.local/state, or /var/lib for root"),
    (SSH_COMMAND, "set by sshd: the command that the other host asks for"),
    ("NO_COLOR", "no colours unless --color always"),
];

/// The precedence of the password variables.
pub const PASSWORD_ORDER: &str = "The password comes from the first of: the options, the variables (only one may be \
    set), the systemd credential, a prompt on the terminal.";

/// The section of `holdfast --help` about them.
pub fn help() -> String {
    let width = VARIABLES.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let lines: Vec<String> = VARIABLES
        .iter()
        .map(|(name, meaning)| format!("  {name:<width$}  {meaning}"))
        .collect();
    format!("{}\n\n{PASSWORD_ORDER}", lines.join("\n"))
}

/// Environment variables at the start of the program.
#[derive(Clone, Default)]
pub struct Environment {
    variables: BTreeMap<OsString, OsString>,
}

impl Environment {
    /// The variables of this process.
    pub fn of_process() -> Self {
        std::env::vars_os().collect()
    }

    /// The value of `name`; an empty variable counts as not set.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.variables
            .get(OsStr::new(name))
            .map(OsString::as_os_str)
            .filter(|value| !value.is_empty())
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        Self {
            variables: pairs
                .into_iter()
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
        }
    }
}

/// Shows names only: a value may be a password.
impl std::fmt::Debug for Environment {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_set().entries(self.variables.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::{Environment, PASSWORD, VARIABLES};

    #[test]
    fn every_variable_fits_into_a_line_of_the_help() {
        let width = VARIABLES.iter().map(|(name, _)| name.len()).max().unwrap();
        for (name, meaning) in VARIABLES {
            assert!(width + meaning.len() <= 100 - 4, "{name}: {meaning}");
        }
    }

    #[test]
    fn an_empty_variable_is_not_set_and_no_value_is_shown() {
        let environment: Environment = [(PASSWORD, "secret"), ("EMPTY", "")].into_iter().collect();
        assert_eq!(environment.get(PASSWORD), Some(OsStr::new("secret")));
        assert_eq!(environment.get("EMPTY"), None);
        assert_eq!(environment.get("ABSENT"), None);
        assert!(!format!("{environment:?}").contains("secret"));
    }
}
