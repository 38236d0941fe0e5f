//! The manifest of a package: a digest for each file.
//!
//! Source: DSP0243 1.1, section 5.1: lines of the form `SHA1(web1.ovf)= 0a1b...`; version 2 has SHA256 and SHA512.
//! OpenSSL 3, which many tools write manifests with, has `SHA2-256(web1.ovf)= ...`.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::collections::BTreeSet;

use aws_lc_rs::digest::{self, Context};

use crate::Result;
use crate::checksum::hex;
use crate::tar::{corrupt, plain_name};

/// A digest algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    Sha1,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
}

impl Algorithm {
    const ALL: [Self; 5] = [Self::Sha1, Self::Sha256, Self::Sha512, Self::Sha384, Self::Sha224];

    /// The algorithm with this name: `SHA256`, `SHA2-256` in OpenSSL 3, `SHA-256` in other programs.
    fn of_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_uppercase().replace(['-', '_', ' '], "");
        Some(match name.as_str() {
            "SHA1" | "SHA" => Self::Sha1,
            "SHA224" | "SHA2224" => Self::Sha224,
            "SHA256" | "SHA2256" => Self::Sha256,
            "SHA384" | "SHA2384" => Self::Sha384,
            "SHA512" | "SHA2512" => Self::Sha512,
            _ => return None,
        })
    }

    /// The algorithm whose digests have this many hexadecimal digits, for lines that do not name it.
    fn of_length(digit_count: usize) -> Option<Self> {
        let has_length = |algorithm: &Self| algorithm.implementation().output_len() * 2 == digit_count;
        Self::ALL.into_iter().find(has_length)
    }

    fn implementation(self) -> &'static digest::Algorithm {
        match self {
            Self::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha224 => &digest::SHA224,
            Self::Sha256 => &digest::SHA256,
            Self::Sha384 => &digest::SHA384,
            Self::Sha512 => &digest::SHA512,
        }
    }
}

/// A digest of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ManifestDigest {
    algorithm: Algorithm,
    name: String,
    digest: String,
}

/// A parsed manifest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Manifest {
    lines: Vec<ManifestDigest>,
    /// Files in lines with an unsupported algorithm.
    unknown: Vec<String>,
}

/// A parsed line.
enum ManifestLine {
    Digest(ManifestDigest),
    /// A file name with an unsupported algorithm.
    UnknownAlgorithm(String),
}

impl Manifest {
    pub(super) fn parse(content: &[u8], offset: u64) -> Result<Self> {
        let text = String::from_utf8_lossy(content);
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let (mut lines, mut unknown) = (Vec::new(), Vec::new());
        for text in text.lines().map(str::trim).filter(|text| !text.is_empty()) {
            match Self::line(text).ok_or_else(|| {
                let shown: String = text.chars().take(100).collect();
                corrupt("manifest", offset, format!("a line is not understood: {shown:?}"))
            })? {
                ManifestLine::Digest(line) => lines.push(line),
                ManifestLine::UnknownAlgorithm(name) => unknown.push(name),
            }
        }
        Ok(Self { lines, unknown })
    }

    /// `SHA256(NAME)= DIGEST`, or `DIGEST  NAME` as sha256sum writes it.
    fn line(text: &str) -> Option<ManifestLine> {
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if let Some((digest, name)) = text.split_once(char::is_whitespace)
            && is_digits(digest)
            && let Some(algorithm) = Algorithm::of_length(digest.len())
        {
            let name = name.trim_start();
            return Some(ManifestLine::Digest(ManifestDigest {
                algorithm,
                name: plain_name(name.strip_prefix('*').unwrap_or(name).to_owned()),
                digest: digest.to_ascii_lowercase(),
            }));
        }
        let (head, digest) = text.rsplit_once('=')?;
        let (algorithm, name) = head.trim_end().strip_suffix(')')?.split_once('(')?;
        let digest = digest.trim().to_ascii_lowercase();
        if !is_digits(&digest) {
            return None;
        }
        let name = plain_name(name.to_owned());
        let Some(algorithm) = Algorithm::of_name(algorithm.trim()) else {
            return Some(ManifestLine::UnknownAlgorithm(name));
        };
        let length = algorithm.implementation().output_len() * 2;
        (digest.len() == length).then_some(ManifestLine::Digest(ManifestDigest {
            algorithm,
            name,
            digest,
        }))
    }

    /// The files with digests of unsupported algorithms only: they are not compared.
    pub(super) fn not_compared(&self) -> BTreeSet<&str> {
        let compared = self.names();
        let unknown = self.unknown.iter().map(String::as_str);
        unknown.filter(|name| !compared.contains(name)).collect()
    }

    /// The files that have digests.
    pub(super) fn names(&self) -> BTreeSet<&str> {
        self.lines.iter().map(|line| line.name.as_str()).collect()
    }

    /// The manifest's name of the file `name`: the same, or else the only name that differs just in case.
    pub(super) fn name_of<'a>(&'a self, name: &'a str) -> &'a str {
        let names = self.names();
        let mut others = names.iter().filter(|other| equals_ignoring_case(other, name));
        match (names.contains(name), others.next(), others.next()) {
            (false, Some(other), None) => other,
            _ => name,
        }
    }

    /// The algorithms of a file's digests.
    pub(super) fn algorithms_of(&self, name: &str) -> Vec<Algorithm> {
        let name = self.name_of(name);
        let lines = self.lines.iter().filter(|line| line.name == name);
        lines.map(|line| line.algorithm).collect()
    }

    /// Compares the digests of a file.
    pub(super) fn check(&self, file: &Digested, offset: u64) -> Result<()> {
        let name = self.name_of(&file.name);
        for line in self.lines.iter().filter(|line| line.name == name) {
            let found = file.digests.iter().find(|(algorithm, _)| *algorithm == line.algorithm);
            let digest = found.map(|(_, digest)| digest.as_str()).unwrap_or_default();
            if digest != line.digest {
                return Err(corrupt(
                    "file",
                    offset,
                    format!(
                        "the digest of {:?} is {digest}, and the manifest says {}",
                        file.name, line.digest
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Whether two names differ at most in case: on Windows they name one file.
pub(super) fn equals_ignoring_case(one: &str, other: &str) -> bool {
    one.chars()
        .flat_map(char::to_lowercase)
        .eq(other.chars().flat_map(char::to_lowercase))
}

/// The digests of a file that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Digested {
    pub(super) name: String,
    pub(super) digests: Vec<(Algorithm, String)>,
}

/// The digests of a file, while it is read.
pub(super) struct Digests {
    name: String,
    contexts: Vec<(Algorithm, Context)>,
}

impl Digests {
    /// Uses the algorithms of the manifest, or all supported ones if the manifest comes later.
    pub(super) fn new(name: &str, manifest: Option<&Manifest>) -> Self {
        let algorithms = match manifest {
            Some(manifest) => manifest.algorithms_of(name),
            None => Algorithm::ALL.to_vec(),
        };
        let context = |algorithm: Algorithm| (algorithm, Context::new(algorithm.implementation()));
        Self {
            name: name.to_owned(),
            contexts: algorithms.into_iter().map(context).collect(),
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.contexts.iter_mut().for_each(|(_, context)| context.update(bytes));
    }

    pub(super) fn finish(self) -> Digested {
        let digests = self.contexts.into_iter();
        Digested {
            name: self.name,
            digests: digests
                .map(|(algorithm, context)| (algorithm, hex(context.finish().as_ref())))
                .collect(),
        }
    }
}

/// A manifest line with the SHA-256 of a written file.
pub(super) fn line_of(name: &str, digest: &[u8]) -> String {
    format!("SHA256({name})= {}\n", hex(digest))
}
