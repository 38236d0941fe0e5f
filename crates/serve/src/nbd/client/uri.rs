//! NBD URIs: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/uri.md>.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::str::FromStr;

use super::stream::PORT;
use super::{Endpoint, Error};
use crate::nbd::wire::STRING_BYTES_MAX;

/// Whether a connection is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Security {
    /// Not encrypted.
    Plain,
    /// TLS is requested (`nbds`).
    Tls,
}

/// An endpoint and the name of an export, as `nbd://host:port/name` or `nbd+unix:///name?socket=path`.
#[derive(Debug, Clone)]
pub struct NbdUri {
    /// The address of the server.
    pub endpoint: Endpoint,
    /// The name of the export; the default export has an empty name.
    pub export: String,
    /// Whether TLS is requested.
    pub security: Security,
}

impl FromStr for NbdUri {
    type Err = Error;

    fn from_str(uri: &str) -> Result<Self, Error> {
        parse(uri).map_err(|detail| Error::Uri {
            uri: uri.to_owned(),
            detail,
        })
    }
}

fn parse(uri: &str) -> Result<NbdUri, &'static str> {
    let (scheme, rest) = uri.split_once(':').ok_or("it has no scheme")?;
    let rest = rest.strip_prefix("//").ok_or("// is missing after the scheme")?;
    let (security, is_unix) = match scheme.to_ascii_lowercase().as_str() {
        "nbd" => (Security::Plain, false),
        "nbds" => (Security::Tls, false),
        "nbd+unix" => (Security::Plain, true),
        "nbds+unix" => (Security::Tls, true),
        "nbd+vsock" | "nbds+vsock" => return Err("sockets of virtual machines (vsock) are not supported"),
        _ => return Err("the scheme is not nbd, nbds, nbd+unix or nbds+unix"),
    };
    let (rest, _fragment) = rest.split_once('#').unwrap_or((rest, ""));
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = match rest.find('/') {
        Some(at) => (&rest[..at], &rest[at + 1..]),
        None => (rest, ""),
    };
    let export = String::from_utf8(decode(path)?).map_err(|_| "the name of the export is not UTF-8")?;
    if export.len() > STRING_BYTES_MAX {
        return Err("the name of the export is longer than 4096 bytes");
    }
    if export.contains('\0') {
        return Err("the name of the export contains NUL");
    }
    let socket = socket_of(query)?;
    let endpoint = match (is_unix, socket) {
        (true, Some(_)) if !authority.is_empty() => return Err("a Unix socket has no host: nbd+unix:///..."),
        (true, Some(socket)) => Endpoint::Unix(socket),
        (true, None) => return Err("?socket=PATH is missing"),
        (false, Some(_)) => return Err("?socket= goes with nbd+unix only"),
        (false, None) => tcp(authority)?,
    };
    Ok(NbdUri {
        endpoint,
        export,
        security,
    })
}

/// The path in `socket=`; other parameters concern TLS and are ignored here.
fn socket_of(query: &str) -> Result<Option<PathBuf>, &'static str> {
    let mut socket = None;
    for parameter in query.split(['&', ';']) {
        if let Some(path) = parameter.strip_prefix("socket=") {
            let path = decode(path)?;
            if path.is_empty() || path.contains(&0) {
                return Err("the path of the socket is invalid");
            }
            if socket.replace(PathBuf::from(OsString::from_vec(path))).is_some() {
                return Err("there are two socket parameters");
            }
        }
    }
    Ok(socket)
}

fn tcp(authority: &str) -> Result<Endpoint, &'static str> {
    // A user name may precede the host. Only TLS uses it.
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or("the bracket of the address is not closed")?;
        match rest.strip_prefix(':') {
            Some(port) => (host, port),
            None if rest.is_empty() => (host, ""),
            None => return Err("there is text between the address and the port"),
        }
    } else {
        authority.split_once(':').unwrap_or((authority, ""))
    };
    let host = match decode(host).map(String::from_utf8)? {
        Ok(host) if host.is_empty() => "localhost".to_owned(),
        Ok(host) if host.contains(char::is_control) => return Err("the host is not a name"),
        Ok(host) => host,
        Err(_) => return Err("the host is not UTF-8"),
    };
    let port = match port {
        "" => PORT,
        digits if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().map_err(|_| "the port is too large")?
        }
        _ => return Err("the port is not a number"),
    };
    Ok(Endpoint::Tcp(host, port))
}

/// Decodes percent-encoding.
fn decode(text: &str) -> Result<Vec<u8>, &'static str> {
    const DIGITS: &str = "two hexadecimal digits are missing after %";
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2).ok_or(DIGITS)?;
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let (high, low) = (digit(digits[0]).ok_or(DIGITS)?, digit(digits[1]).ok_or(DIGITS)?);
        bytes.push(high << 4 | low);
        rest = tail;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::{NbdUri, Security};

    /// Parses a URI to endpoint, export and security.
    fn parts(uri: &str) -> (String, String, Security) {
        let uri: NbdUri = uri.parse().unwrap();
        (uri.endpoint.to_string(), uri.export, uri.security)
    }

    #[test]
    fn places_and_names_are_read() {
        use Security::{Plain, Tls};
        for (uri, endpoint, export, security) in [
            ("nbd://example.org", "example.org:10809", "", Plain),
            ("NBD://example.org:99/", "example.org:99", "", Plain),
            ("nbd://[::1]:99/a/b", "[::1]:99", "a/b", Plain),
            ("nbd://[fe80::1]//abs", "[fe80::1]:10809", "/abs", Plain),
            ("nbds://user@host/x%20y?tls-verify-peer=true", "host:10809", "x y", Tls),
            ("nbd:///name", "localhost:10809", "name", Plain),
            ("nbd+unix:///?socket=/run/a.sock", "/run/a.sock", "", Plain),
            ("nbd+unix:///sda?socket=a%2fb", "a/b", "sda", Plain),
            (
                "nbds+unix:///%F0%9F%92%BE?tls-psk-file=x&socket=/s",
                "/s",
                "\u{1f4be}",
                Tls,
            ),
        ] {
            assert_eq!(parts(uri), (endpoint.to_owned(), export.to_owned(), security), "{uri}");
        }
    }

    #[test]
    fn unusable_uris_are_refused_with_the_reason() {
        for (uri, reason) in [
            ("", "no scheme"),
            ("nbd:host", "// is missing"),
            ("http://host", "scheme is not"),
            ("nbd+vsock://2", "vsock"),
            ("nbd+unix:///name", "?socket=PATH"),
            ("nbd+unix://host/name?socket=/s", "no host"),
            ("nbd+unix:///?socket=/a&socket=/b", "two socket parameters"),
            ("nbd+unix:///?socket=", "invalid"),
            ("nbd://host/?socket=/s", "nbd+unix only"),
            ("nbd://host:65536", "too large"),
            ("nbd://host:+5", "not a number"),
            ("nbd://[::1/x", "not closed"),
            ("nbd://[::1]5/x", "between"),
            ("nbd://host/%f", "two hexadecimal"),
            ("nbd://host/%zz", "two hexadecimal"),
            ("nbd://host/%ff", "not UTF-8"),
            ("nbd://host/%00", "NUL"),
        ] {
            let error = uri.parse::<NbdUri>().unwrap_err().to_string();
            assert!(error.contains(reason), "{uri}: {error}");
        }
        let long = format!("nbd://host/{}", "x".repeat(4097));
        assert!(long.parse::<NbdUri>().unwrap_err().to_string().contains("4096"));
    }
}
