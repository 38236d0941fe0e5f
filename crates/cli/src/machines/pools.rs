//! Connections to pools of XenServer and XCP-ng.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use holdfast_engine::Interrupt;
use holdfast_host::xapi::{Login, Pool, Trust, XapiError, XenAddress, XenMachine, check_trust};
use holdfast_policy::Glob;
use holdfast_policy::config::ConfiguredPool;

use crate::args::PoolArgs;
use crate::context::Context;
use crate::context::holdfast_file;
use crate::errors::Error;
use crate::process::environment;

/// Prefix of a tag.
const TAG: &str = "tag:";

impl PoolArgs {
    /// The pool that an address names, and the credentials for it: from options, otherwise from holdfast.toml for a
    /// named pool, otherwise defaults.
    pub fn way(&self, address: &XenAddress, context: &Context) -> Result<PoolWay, Error> {
        match holdfast_file::pool(address, context)? {
            None => Ok(PoolWay {
                login: self.login(address, None, context)?,
                address: address.clone(),
                configured: None,
            }),
            Some(pool) => self.way_of(pool, address, context),
        }
    }

    /// The access to a pool that holdfast.toml names.
    ///
    /// # Errors
    /// An option or the pool's section of holdfast.toml is invalid.
    pub fn way_of(&self, pool: ConfiguredPool, named: &XenAddress, context: &Context) -> Result<PoolWay, Error> {
        let there: XenAddress = format!("xen://{}", pool.address).parse().map_err(job_error)?;
        let address = XenAddress {
            user: named.user.clone().or_else(|| pool.user.clone()),
            item: named.item.clone(),
            ..there
        };
        Ok(PoolWay {
            login: self.login(&address, Some(&pool), context)?,
            address,
            configured: Some(pool),
        })
    }

    fn login(
        &self,
        address: &XenAddress,
        configured: Option<&ConfiguredPool>,
        context: &Context,
    ) -> Result<Login, Error> {
        let trust = self.trust(configured, context)?;
        if trust.fingerprints.is_empty() && trust.authorities.is_none() {
            // The host will not be trusted, so no password is asked for first.
            let clock = Arc::clone(context.clock());
            check_trust(address, &trust, clock, context.stop_question()).map_err(job_error)?;
        }
        let password = context.pool_password(self, configured)?;
        let text = std::str::from_utf8(password.as_bytes());
        let password =
            text.map_err(|_| Error::usage("the password of the pool's user is no UTF-8", "choose another one"));
        Ok(Login {
            address: address.clone(),
            password: password?.to_owned(),
            trust,
        })
    }

    fn trust(&self, configured: Option<&ConfiguredPool>, context: &Context) -> Result<Trust, Error> {
        let mut trust = Trust {
            fingerprints: self.certificates.clone(),
            authorities: None,
        };
        let mut authorities = self.authorities.clone();
        if let Some(pool) = configured.filter(|_| self.certificates.is_empty() && self.authorities.is_none()) {
            for text in &pool.certificates {
                trust.fingerprints.push(text.parse().map_err(job_error)?);
            }
            authorities = pool.authorities.as_ref().map(PathBuf::from);
        }
        if let Some(list) = context.variable(environment::POOL_CERTIFICATE) {
            for text in list.to_string_lossy().split(',').filter(|text| !text.trim().is_empty()) {
                trust.fingerprints.push(text.trim().parse().map_err(job_error)?);
            }
        }
        if let Some(path) = &authorities {
            let text = std::fs::read_to_string(path).map_err(|source| holdfast_engine::Error::File {
                action: "read",
                path: path.clone(),
                source,
            })?;
            trust.authorities = Some(text);
        }
        Ok(trust)
    }
}

/// The access to a pool.
pub struct PoolWay {
    /// Its address, and the selection within it.
    pub address: XenAddress,
    /// The credentials.
    pub login: Login,
    /// Its section of holdfast.toml.
    pub configured: Option<ConfiguredPool>,
}

/// Converts an error of a pool to an error of a job.
pub fn job_error(error: XapiError) -> holdfast_engine::Error {
    error.into()
}

/// Logs in to a pool, for an interruptible job.
pub fn log_in(login: Login, context: &Context, interrupt: &Interrupt) -> Result<Arc<Pool>, Error> {
    let flag = interrupt.flag();
    let is_stopped = Arc::new(move || flag.load(Ordering::Relaxed));
    let pool = Pool::log_in(login, Arc::clone(context.clock()), is_stopped).map_err(job_error)?;
    Ok(Arc::new(pool))
}

/// The selected machines of a pool: one by its name or UUID; matching ones if it is a pattern and no machine has this
/// name; those with a tag; all if nothing is named.
///
/// # Errors
/// No machine matches.
pub fn machines(pool: &Pool, address: &XenAddress, excluded: &[Glob]) -> Result<Vec<XenMachine>, Error> {
    let wish = address.item.as_deref();
    let is_one = |word: &str| !Glob::is_one(word) && !word.starts_with(TAG);
    if let Some(name) = wish.filter(|word| is_one(word)) {
        return Ok(vec![pool.machine(name).map_err(job_error)?]);
    }
    let glob = match wish.filter(|word| !word.starts_with(TAG)) {
        None => None,
        Some(pattern) => Some(Glob::parse(pattern).map_err(|detail| {
            Error::usage(
                detail,
                "'xen://POOL/web*' matches all machines whose names begin with web",
            )
        })?),
    };
    let tag = wish.and_then(|word| word.strip_prefix(TAG));
    let mut machines = pool.machines().map_err(job_error)?;
    // It is not a pattern if a machine has this name.
    let mut called_so = machines.iter().filter(|machine| wish == Some(&machine.summary.name));
    if let Some(name) = called_so.next().map(|machine| machine.summary.name.clone()) {
        return Ok(vec![pool.machine(&name).map_err(job_error)?]);
    }
    machines.retain(|machine| {
        let name = &machine.summary.name;
        glob.as_ref().is_none_or(|glob| glob.matches(name))
            && tag.is_none_or(|tag| machine.tags.iter().any(|known| known == tag))
            && !excluded.iter().any(|glob| glob.matches(name))
    });
    if machines.is_empty() && (wish.is_some() || !excluded.is_empty()) {
        return Err(Error::NoMachines {
            said: address.to_string(),
            uri: pool.title(),
        });
    }
    Ok(machines)
}
