//! Finds and reads the holdfast.toml for verbs that use it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use holdfast_host::xapi::{Fingerprint, XenAddress};
use holdfast_policy::config::{Channel, Config, ConfigError, ConfigWarning, ConfiguredPool, ConfiguredRepository, Job};
use holdfast_policy::sanoid::Origin;
use rustix::fs::{Access, access};

use crate::args::CommandLine;
use crate::context::Context;
use crate::context::password::PasswordSource;
use crate::context::sanoid_file;
use crate::errors::{Error, Kind};
use crate::process::environment;
use crate::process::time;

/// Its default path.
pub const HOLDFAST_TOML: &str = "/etc/holdfast/holdfast.toml";

/// Which file.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct HoldfastFileArgs {
    /// Configuration file [default: /etc/holdfast/holdfast.toml] [env: HOLDFAST_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Where the scheduler keeps what it knows from run to run.
#[derive(Debug, Clone, clap::Args)]
pub struct StateFileArgs {
    /// Folder for the journal of runs and other state [default: /var/lib/holdfast for root]
    #[arg(long, value_name = "FOLDER")]
    pub state: Option<PathBuf>,
}

impl HoldfastFileArgs {
    /// The path of the file.
    pub fn path(&self, context: &Context) -> PathBuf {
        self.config.clone().unwrap_or_else(|| path(context))
    }

    /// Reads the configuration.
    ///
    /// # Errors
    /// The file contains any error: a partial configuration must not be used.
    pub fn load(&self, context: &Context) -> Result<Config, Error> {
        let path = self.path(context);
        let text = sanoid_file::read_obeyed(&path)?;
        parse(&text, context.command_line()).map_err(|errors| {
            Error::refused(
                Kind::Refused,
                format!("{}: {}", path.display(), errors.first().map_or("", String::as_str)),
                format!(
                    "holdfast config check {} lists everything that is wrong with it",
                    path.display()
                ),
            )
        })
    }
}

impl StateFileArgs {
    /// The folder: from the option, otherwise from systemd, otherwise the user's own.
    pub fn folder(&self, context: &Context) -> Result<PathBuf, Error> {
        let of_service = || {
            let folders = context
                .variable(environment::STATE_DIRECTORY)?
                .to_string_lossy()
                .into_owned();
            folders.split(':').next().map(PathBuf::from)
        };
        let of_user = || Some(context.journal_folder()?.parent()?.to_owned());
        let folder = self.state.clone().or_else(of_service).or_else(of_user);
        folder.ok_or_else(|| {
            Error::usage(
                "there is no folder for what is kept from run to run",
                "use --state FOLDER",
            )
        })
    }
}

/// The path if no option gives one.
pub fn path(context: &Context) -> PathBuf {
    context
        .variable(environment::CONFIG)
        .map_or_else(|| HOLDFAST_TOML.into(), PathBuf::from)
}

/// Whether a word has the form of a repository name in holdfast.toml.
pub fn may_be_name(word: &OsStr) -> bool {
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || "_-".contains(letter);
    word.to_str()
        .is_some_and(|text| !text.is_empty() && text.chars().all(is_of_name))
}

/// The repository with this name in holdfast.toml. An existing path takes precedence over a name.
///
/// # Errors
/// The word may be a name, but the file is invalid.
pub fn repository(word: &OsStr, context: &Context) -> Result<Option<ConfiguredRepository>, Error> {
    let file = HoldfastFileArgs { config: None };
    let Some(name) = word.to_str().filter(|_| may_be_name(word)) else {
        return Ok(None);
    };
    if Path::new(name).symlink_metadata().is_ok() || !file.path(context).exists() {
        return Ok(None);
    }
    Ok(file.load(context)?.repository(name).cloned())
}

/// The name of the only repository in holdfast.toml, if the file can be read and has exactly one.
pub fn only_repository(context: &Context) -> Option<OsString> {
    let file = HoldfastFileArgs { config: None };
    access(file.path(context), Access::READ_OK).ok()?;
    let config = file.load(context).ok()?;
    match config.repositories.as_slice() {
        [only] => Some(only.name.clone().into()),
        _ => None,
    }
}

/// The source of the repository's password according to holdfast.toml, if it gives one.
pub fn password_of(word: &OsStr, context: &Context) -> Result<Option<PasswordSource>, Error> {
    let Some(repository) = repository(word, context)? else {
        return Ok(None);
    };
    let file = repository.password_file.map(|file| PasswordSource::File(file.into()));
    let command = repository.password_command;
    Ok(file.or_else(|| command.map(|command| PasswordSource::Command(command.into()))))
}

/// The pool that an address names in holdfast.toml, instead of a host. Jobs have all settings on their command
/// lines.
///
/// # Errors
/// The host may be such a name, but the file is invalid.
pub fn pool(address: &XenAddress, context: &Context) -> Result<Option<ConfiguredPool>, Error> {
    let file = HoldfastFileArgs { config: None };
    let is_job = context.variable(environment::JOB).is_some();
    if is_job || !address.may_be_name() || !may_be_name(OsStr::new(&address.host)) {
        return Ok(None);
    }
    // For a user who may not read the file, no names are defined.
    if access(file.path(context), Access::READ_OK).is_err() {
        return Ok(None);
    }
    Ok(file.load(context)?.pool(&address.host).cloned())
}

/// The source of the pool user's password according to holdfast.toml, if it gives one.
pub fn password_of_pool(pool: &ConfiguredPool) -> Option<PasswordSource> {
    let file = pool
        .password_file
        .as_ref()
        .map(|file| PasswordSource::File(file.into()));
    let command = || {
        let command = pool.password_command.as_ref()?;
        Some(PasswordSource::Command(command.into()))
    };
    file.or_else(command)
}

/// Invalid addresses and fingerprints of a pool, each with its line.
fn refusals_of_pool(pool: &ConfiguredPool) -> Vec<(u32, String)> {
    let place = format!("[pools.{}]", pool.name);
    let mut wrong = Vec::new();
    if let Err(error) = format!("xen://{}", pool.address).parse::<XenAddress>() {
        wrong.push((pool.address_line, format!("address in {place}: {error}")));
    }
    for text in &pool.certificates {
        if let Err(error) = text.parse::<Fingerprint>() {
            wrong.push((pool.certificates_line, format!("certificate in {place}: {error}")));
        }
    }
    wrong
}

/// Parses a configuration and checks its jobs' command lines; returns all errors as text.
pub fn parse(text: &str, line: &CommandLine) -> Result<Config, Vec<String>> {
    let words = |errors: Vec<ConfigError>| errors.iter().map(ToString::to_string).collect::<Vec<_>>();
    let config = Config::parse(text).map_err(words)?;
    let mut wrong: Vec<(u32, String)> = config.pools.iter().flat_map(refusals_of_pool).collect();
    if wrong.is_empty() {
        wrong.extend(config.jobs.iter().filter_map(|job| refusal(&config, job, line)));
    }
    wrong.sort();
    if wrong.is_empty() {
        return Ok(config);
    }
    Err(wrong
        .into_iter()
        .map(|(line, what)| format!("line {line}: {what}"))
        .collect())
}

/// The error that the command line of a job would cause, and the line of the responsible setting.
fn refusal(config: &Config, job: &Job, line: &CommandLine) -> Option<(u32, String)> {
    let words = std::iter::once("holdfast".to_owned()).chain(config.command(job));
    let error = line.tree().try_get_matches_from(words).err()?;
    let option = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) => option.split([' ', '=']).next().unwrap_or_default().to_owned(),
        _ => String::new(),
    };
    let at = match job.setting_of(&option).map(|setting| &setting.origin) {
        Some(Origin::Line { line, .. }) => *line,
        _ => job.line,
    };
    let text = error.to_string();
    let first = text
        .lines()
        .next()
        .unwrap_or_default()
        .trim_start_matches("error: ")
        .to_owned();
    Some((at, format!("[jobs.{}]: {first}", job.name)))
}

/// Settings that are probably mistakes on this host at this time.
pub fn doubts(config: &Config, context: &Context) -> Vec<String> {
    let mut doubts: Vec<String> = config.warnings().iter().map(ConfigWarning::to_string).collect();
    for job in config.jobs.iter().filter(|job| job.is_enabled) {
        let at = job.timing_warnings(time::now(), context.zone());
        doubts.extend(at.iter().map(ToString::to_string));
    }
    let mut needs = |line: u32, place: &str, path: &str, what: &str| {
        if let Err(error) = access(path, Access::READ_OK) {
            let why = std::io::Error::from(error);
            doubts.push(format!("line {line}: {what} {path} of {place} cannot be read: {why}"));
        }
    };
    for repository in &config.repositories {
        let place = format!("[repositories.{}]", repository.name);
        needs(repository.line, &place, &repository.path, "the folder");
        if let Some(file) = &repository.password_file {
            needs(repository.line, &place, file, "the password file");
        }
    }
    for pool in &config.pools {
        let place = format!("[pools.{}]", pool.name);
        if let Some(file) = &pool.password_file {
            needs(pool.line, &place, file, "the password file");
        }
        if let Some(file) = &pool.authorities {
            needs(pool.line, &place, file, "the authorities");
        }
    }
    for recipient in &config.recipients {
        let place = format!("[notify.{}]", recipient.name);
        if let Channel::Webhook {
            token_file: Some(file), ..
        }
        | Channel::Ntfy {
            token_file: Some(file), ..
        } = &recipient.channel
        {
            needs(recipient.line, &place, file, "the token file");
        }
    }
    doubts
}

/// Whether a file is a holdfast.toml rather than a sanoid.conf: by its extension, otherwise by its content.
pub fn is_holdfast_toml(path: &Path, text: &str) -> bool {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => true,
        Some("conf") => false,
        _ => {
            let mut lines = text
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty() && !line.starts_with('#'));
            lines.next().is_some_and(|line| line.starts_with("version"))
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_policy::config::Config;

    use super::{is_holdfast_toml, parse};
    use crate::commands::COMMAND_LINE;

    /// The shipped example is valid and contains every kind of job and every setting.
    #[test]
    fn the_example_is_right_and_complete() {
        let text = include_str!("../../../../packaging/holdfast.toml");
        let config = parse(text, COMMAND_LINE).unwrap();
        assert!(
            config.jobs.len() >= 5 && config.warnings().is_empty(),
            "{:?}",
            config.warnings()
        );
        // The settings that are commented out are valid, too.
        let all: Vec<String> = text.lines().map(uncommented).collect();
        let config = parse(&all.join("\n"), COMMAND_LINE).unwrap();
        for kind in Config::kind_names() {
            assert!(
                config.jobs.iter().any(|job| job.kind.name == kind),
                "no job does {kind}"
            );
        }
        for key in Config::key_names() {
            assert!(text.contains(&format!("{key} = ")), "{key} is not shown");
        }
    }

    /// `#key = value` and `#[section]` are disabled settings; `# words` is a comment.
    fn uncommented(line: &str) -> String {
        match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => rest.to_owned(),
            _ => line.to_owned(),
        }
    }

    #[test]
    fn a_value_that_the_verb_refuses_is_told_with_its_line() {
        let text = "version = 1\n[repositories.a]\npath = \"/a\"\n[jobs.b]\ndo = \"backup\"\nrepository = \"a\"\nall = true\nbwlimit = \"5 MB\"\n";
        let errors = parse(text, COMMAND_LINE).unwrap_err();
        assert!(
            errors[0].starts_with("line 8: [jobs.b]: invalid value '5 MB' for '--bwlimit <SIZE>'"),
            "{errors:?}"
        );
    }

    /// Each setting of each kind of job is an option of its verb.
    #[test]
    fn every_setting_of_every_kind_is_an_option_of_its_verb() {
        for line in Config::every_command() {
            let words = std::iter::once("holdfast".to_owned()).chain(line.iter().cloned());
            let parsed = COMMAND_LINE.tree().try_get_matches_from(words);
            if let Err(error) = parsed {
                let is_only_alone = matches!(
                    error.kind(),
                    clap::error::ErrorKind::ArgumentConflict | clap::error::ErrorKind::MissingRequiredArgument
                );
                assert!(is_only_alone, "{line:?}: {error}");
            }
        }
    }

    #[test]
    fn kinds_of_files_are_told_apart() {
        let of = |path: &str, text: &str| is_holdfast_toml(path.as_ref(), text);
        assert!(of("a.toml", "") && !of("a.conf", "version = 1") && !of("/dev/stdin", "[tank]\nhourly = 3"));
        assert!(of("/dev/stdin", "# words\n\nversion = 1\n"));
    }
}
