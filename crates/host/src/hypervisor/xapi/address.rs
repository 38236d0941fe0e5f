//! The address of a pool: `xen://[USER@]HOST[:PORT][/MACHINE]`.

use std::fmt;
use std::str::FromStr;

use super::{XapiError, XapiResult};

/// Prefix of the address of a pool.
const SCHEME: &str = "xen://";
/// The default user name at a pool.
const USER: &str = "root";
const PORT: u16 = 443;

/// A pool, and optionally an object in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenAddress {
    /// The user name, if given.
    pub user: Option<String>,
    /// The master or any other host of the pool: a name or an address.
    pub host: String,
    /// The HTTPS port.
    pub port: u16,
    /// The path: name or UUID of a machine or of a storage repository; none for the pool itself.
    pub item: Option<String>,
}

impl XenAddress {
    /// Whether a text begins with the scheme of a pool's address.
    pub fn has_scheme(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// The user name, or the default one.
    pub fn user(&self) -> &str {
        self.user.as_deref().unwrap_or(USER)
    }

    /// Whether the host may be the configured name of a pool rather than an address.
    pub fn may_be_name(&self) -> bool {
        self.port == PORT
    }

    /// The address of the pool, without the object.
    pub fn pool(&self) -> String {
        let host = host_and_port(&self.host, self.port);
        match self.user() {
            USER => format!("{SCHEME}{host}"),
            user => format!("{SCHEME}{user}@{host}"),
        }
    }
}

/// Host and port; the default port is omitted.
pub(super) fn host_and_port(host: &str, port: u16) -> String {
    let host = if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    };
    if port == PORT { host } else { format!("{host}:{port}") }
}

/// Parses `HOST`, `HOST:PORT`, `[ADDRESS]:PORT`.
pub(super) fn split_host(text: &str, default_port: u16) -> Result<(String, u16), &'static str> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or("the bracket of the address is not closed")?;
        (host, rest.strip_prefix(':').unwrap_or(rest))
    } else if text.matches(':').count() > 1 {
        // A link-local address may have a zone.
        let address = text.split('%').next().unwrap_or_default();
        if address.parse::<std::net::Ipv6Addr>().is_err() {
            return Err("it has several colons, but is not an IPv6 address");
        }
        (text, "")
    } else {
        text.split_once(':').unwrap_or((text, ""))
    };
    if host.is_empty() {
        return Err("it has no host");
    }
    if host.contains(|character: char| character.is_control() || character.is_whitespace()) {
        return Err("the host name is invalid");
    }
    let port = match port {
        "" => default_port,
        digits => digits.parse().map_err(|_| "the port is not a number")?,
    };
    Ok((host.to_owned(), port))
}

impl FromStr for XenAddress {
    type Err = XapiError;

    fn from_str(text: &str) -> XapiResult<Self> {
        let wrong = |detail| XapiError::Address {
            text: without_password(text),
            detail,
        };
        let rest = text
            .strip_prefix(SCHEME)
            .ok_or_else(|| wrong("it does not begin with xen://"))?;
        let (authority, item) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, authority),
        };
        if user.is_some_and(str::is_empty) {
            return Err(wrong("the user name is empty"));
        }
        if user.is_some_and(|user| user.contains(':')) {
            return Err(wrong("remove the password: other users could see it"));
        }
        let (host, port) = split_host(host, PORT).map_err(wrong)?;
        Ok(Self {
            user: user.map(str::to_owned),
            host,
            port,
            item: Some(item.to_owned()).filter(|item| !item.is_empty()),
        })
    }
}

/// The text for messages. A password in it is replaced by dots.
fn without_password(text: &str) -> String {
    let hidden = text.rsplit_once('@').and_then(|(before, host)| {
        let (scheme, user) = before.split_once("://")?;
        let (user, _) = user.split_once(':')?;
        Some(format!("{scheme}://{user}:...@{host}"))
    });
    hidden.unwrap_or_else(|| text.to_owned())
}

impl fmt::Display for XenAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.pool())?;
        match &self.item {
            Some(item) => write!(formatter, "/{item}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::XenAddress;

    #[test]
    fn addresses_are_read_and_written() {
        let read = |text: &str| text.parse::<XenAddress>();
        let address = read("xen://lab1/web 1").unwrap();
        assert_eq!(
            (address.user(), address.host.as_str(), address.port),
            ("root", "lab1", 443)
        );
        assert_eq!(address.item.as_deref(), Some("web 1"));
        for text in [
            "xen://lab1",
            "xen://backup@10.0.0.1:8443/web1",
            "xen://[fd00::1]:444",
            "xen://[fd00::1]/a/b",
        ] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        assert_eq!(read("xen://fd00::1/").unwrap().to_string(), "xen://[fd00::1]");
        for wrong in [
            "lab1",
            "xen://",
            "xen:///web1",
            "xen://root:secret@lab1",
            "xen://lab1:x/web1",
            "xen://@lab1",
            "xen://[fd00",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
