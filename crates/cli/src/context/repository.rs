//! Location and opening of a verb's repository.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use holdfast_engine::{Location, Protection, Unlock, check_sighting, protection};
use holdfast_repo::key::SystemRandomness;
use holdfast_repo::{Environment, Repository, SystemProcesses};

use super::Context;
use crate::args::ToPasswordArgs;
use crate::context::holdfast_file;
use crate::context::password::{Password, PasswordSource, PasswordUse};
use crate::errors::{Error, PasswordError};
use crate::process::environment;
use crate::process::terminal::ControllingTerminal;
use crate::process::time;

impl Context {
    /// Whether the command line names a repository; a repository in the environment applies to all commands.
    pub fn is_repository_named(&self) -> bool {
        self.global.repository.repository.is_some()
    }

    /// The word for the repository: from the option, the environment, or the only repository in
    /// holdfast.toml.
    fn repository_word(&self) -> Result<OsString, Error> {
        match self.global.repository.location(&self.environment) {
            Err(Error::NoRepository) => holdfast_file::only_repository(self).ok_or(Error::NoRepository),
            word => word,
        }
    }

    /// The location of the repository: a path, or the location of a name in holdfast.toml.
    pub fn repository(&self) -> Result<OsString, Error> {
        let word = self.repository_word()?;
        let configured = holdfast_file::repository(&word, self)?;
        Ok(configured.map_or(word, |repository| repository.path.into()))
    }

    /// The source of the repository's password: an option, otherwise holdfast.toml for a named repository, otherwise
    /// the environment or a prompt.
    pub(super) fn password_source(&self) -> Result<PasswordSource, Error> {
        let args = &self.global.repository.password;
        if args.password_file.is_none() && args.password_command.is_none() {
            let word = self.repository_word()?;
            if let Some(source) = holdfast_file::password_of(&word, self)? {
                return Ok(source);
            }
        }
        Ok(PasswordSource::choose(args, &self.environment)?)
    }

    /// Whether the password is meant for this repository: it comes from an option, holdfast.toml, or a variable with
    /// the password itself. A variable for a file or command is often set for everything that a user or service runs.
    pub fn is_password_of_this_repository(&self) -> Result<bool, Error> {
        let args = &self.global.repository.password;
        let is_said = self.variable(environment::PASSWORD).is_some();
        if is_said || args.password_file.is_some() || args.password_command.is_some() {
            return Ok(true);
        }
        let word = self.repository_word()?;
        Ok(holdfast_file::password_of(&word, self)?.is_some())
    }

    /// The services that a repository needs besides its store.
    pub fn environment(&self) -> Environment {
        Environment {
            randomness: Arc::new(SystemRandomness),
            processes: Arc::new(SystemProcesses),
            now_ms: Arc::new(|| time::now().as_millisecond()),
        }
    }

    /// The location of an existing repository.
    ///
    /// # Errors
    /// The word is neither an existing path nor a name in holdfast.toml.
    pub fn location(&self) -> Result<Location, Error> {
        let word = self.repository_word()?;
        let location = self.new_location()?;
        if holdfast_file::may_be_name(&word) && !location.path().exists() {
            let config = holdfast_file::path(self);
            let name = word.display().to_string();
            return Err(Error::NoRepositoryOfName { name, config });
        }
        Ok(location)
    }

    /// The location of a repository that need not exist yet.
    pub fn new_location(&self) -> Result<Location, Error> {
        let location = self.remembered(Location::parse(&self.repository()?)?);
        Ok(location.with_key_slot(self.global.repository.password.key_slot))
    }

    /// Adds what this host remembers of a location: the key slot that opened last, and the id of the
    /// repository.
    pub fn remembered(&self, location: Location) -> Location {
        let memory = self
            .journal_folder()
            .and_then(|runs| Some(runs.parent()?.join("slots")));
        location.with_slot_memory(memory.as_deref())
    }

    /// Opens the repository; asks for its password if needed.
    pub fn open_repository(&self) -> Result<Repository, Error> {
        let location = self.location()?;
        let password = self.unlocking_password(&location)?;
        self.open_with(&location, password.as_ref())
    }

    /// Opens the repository at `location` with its password.
    pub fn open_with(&self, location: &Location, password: Option<&Password>) -> Result<Repository, Error> {
        let unlock = password.map_or(Unlock::Nothing, |password| Unlock::Password(password.as_bytes()));
        let repository = holdfast_engine::open(location, unlock, &self.environment(), &*self.progress())?;
        let seen = password.map_or(Protection::Open, |_| Protection::Encrypted);
        let accepted = self.variable(environment::ACCEPT_REPOSITORY).and_then(OsStr::to_str);
        check_sighting(location, &repository, seen, accepted, &*self.progress())?;
        self.warn_of_damage_of(&repository);
        Ok(repository)
    }

    /// Opens the repository at `location` with its key. Another Holdfast process started this one and has already
    /// verified the repository.
    pub fn open_by_key(&self, location: &Location, key: &Password) -> Result<Repository, Error> {
        let unlock = Unlock::Password(key.as_bytes());
        let repository = holdfast_engine::open(location, unlock, &self.environment(), &*self.progress())?;
        self.warn_of_damage_of(&repository);
        Ok(repository)
    }

    fn warn_of_damage_of(&self, repository: &Repository) {
        let console = Arc::clone(&self.console);
        repository.warn_of_damage(move |message| console.warning(&format!("{message}; run holdfast repair")));
    }

    /// The password that opens the repository at `location`; `None` if it needs none.
    ///
    /// A password from an option is always used: an attacker with write access to the store could make an encrypted
    /// repository look open. A file or command in the environment may be meant for other repositories.
    pub fn unlocking_password(&self, location: &Location) -> Result<Option<Password>, Error> {
        let source = self.password_source()?;
        if source == PasswordSource::Prompt && protection(location)? == Protection::Open {
            return Ok(None);
        }
        if !self.is_password_of_this_repository()? && protection(location)? == Protection::Open {
            self.console
                .note("the repository has no password; the one in the environment is not used");
            return Ok(None);
        }
        self.password(PasswordUse::Existing).map(Some)
    }

    /// Whether the repository opens without a prompt, and without a command that might prompt.
    pub fn opens_without_question(&self) -> bool {
        match self.password_source() {
            Ok(PasswordSource::File(_) | PasswordSource::Environment(_) | PasswordSource::Credential(_)) => true,
            Ok(PasswordSource::Command(_) | PasswordSource::Prompt) => {
                let protection = self.location().ok().and_then(|location| protection(&location).ok());
                protection == Some(Protection::Open)
            }
            Err(_) => false,
        }
    }

    /// Opens a second repository; asks for its password if needed. `options` are the options that provide the password.
    pub fn open_other(
        &self,
        location: &Location,
        source: &PasswordSource,
        options: &'static str,
    ) -> Result<Repository, Error> {
        if *source == PasswordSource::Prompt && protection(location)? == Protection::Open {
            return self.open_with(location, None);
        }
        let mut warn = |message: &str| self.console.warning(message);
        let read = source.read(PasswordUse::Other, &ControllingTerminal, &mut warn);
        let password = read.map_err(|error| match error {
            PasswordError::NoTerminal => PasswordError::NoTerminalForOther { options },
            other => other,
        })?;
        self.open_with(location, Some(&password))
    }

    /// The target of a copy: from the option, otherwise from the environment.
    pub fn other_location(&self, option: Option<&OsStr>) -> Result<Location, Error> {
        let location = option.or_else(|| self.variable(environment::TO_REPOSITORY));
        let missing = || {
            let hint = format!("use --to LOCATION, or set {}", environment::TO_REPOSITORY);
            Error::usage("no repository is given to copy to", hint)
        };
        let word = location.ok_or_else(missing)?;
        let location = match holdfast_file::repository(word, self)? {
            Some(repository) => Location::parse(OsStr::new(&repository.path))?,
            None => Location::parse(word)?,
        };
        Ok(self.remembered(location))
    }

    /// The source of the target repository's password.
    pub fn password_to(&self, to: Option<&OsStr>, args: &ToPasswordArgs) -> Result<PasswordSource, Error> {
        if args.to_password_file.is_none()
            && args.to_password_command.is_none()
            && let Some(word) = to.or_else(|| self.variable(environment::TO_REPOSITORY))
            && let Some(source) = holdfast_file::password_of(word, self)?
        {
            return Ok(source);
        }
        Ok(PasswordSource::choose_to(args, &self.environment)?)
    }
}
