//! The manifest of a package: a digest for each file.
//!
//! Source: DSP0243 1.1, section 5.1: lines of the form `SHA1(web1.ovf)= 0a1b...`; version 2 has SHA256 and SHA512.

use std::collections::BTreeSet;

use aws_lc_rs::digest::{self, Context};

use crate::Result;
use crate::checksum::hex;
use crate::tar::{corrupt, plain_name};

/// An algorithm, as manifests call it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    Sha1,
    Sha256,
    Sha512,
}

impl Algorithm {
    const ALL: [(&str, Self); 3] = [("SHA1", Self::Sha1), ("SHA256", Self::Sha256), ("SHA512", Self::Sha512)];

    fn implementation(self) -> &'static digest::Algorithm {
        match self {
            Self::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => &digest::SHA256,
            Self::Sha512 => &digest::SHA512,
        }
    }
}

/// A line of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    algorithm: Algorithm,
    name: String,
    digest: String,
}

/// What a manifest says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Manifest {
    lines: Vec<Line>,
}

impl Manifest {
    pub(super) fn parse(content: &[u8], offset: u64) -> Result<Self> {
        let text = String::from_utf8_lossy(content);
        let mut lines = Vec::new();
        for text in text.lines().map(str::trim).filter(|text| !text.is_empty()) {
            let line = Self::line(text);
            lines.push(line.ok_or_else(|| {
                let shown: String = text.chars().take(100).collect();
                corrupt("manifest", offset, format!("a line is not understood: {shown:?}"))
            })?);
        }
        Ok(Self { lines })
    }

    fn line(text: &str) -> Option<Line> {
        let (head, digest) = text.rsplit_once('=')?;
        let (algorithm, name) = head.trim_end().strip_suffix(')')?.split_once('(')?;
        let (_, algorithm) = Algorithm::ALL
            .into_iter()
            .find(|(word, _)| word.eq_ignore_ascii_case(algorithm.trim()))?;
        let digest = digest.trim().to_ascii_lowercase();
        let length = algorithm.implementation().output_len() * 2;
        let is_digest = digest.len() == length && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_digest.then(|| Line {
            algorithm,
            name: plain_name(name.to_owned()),
            digest,
        })
    }

    /// The files that have digests, each once.
    pub(super) fn names(&self) -> BTreeSet<&str> {
        self.lines.iter().map(|line| &line.name[..]).collect()
    }

    /// The algorithms that a file has digests by.
    pub(super) fn algorithms_of(&self, name: &str) -> Vec<Algorithm> {
        let lines = self.lines.iter().filter(|line| line.name == name);
        lines.map(|line| line.algorithm).collect()
    }

    /// Compares a file of the package.
    pub(super) fn check(&self, file: &Digested, offset: u64) -> Result<()> {
        for line in self.lines.iter().filter(|line| line.name == file.name) {
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

/// A file that was read, and its digests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Digested {
    pub(super) name: String,
    pub(super) digests: Vec<(Algorithm, String)>,
}

/// Digests of a file that is being read.
pub(super) struct Digests {
    name: String,
    contexts: Vec<(Algorithm, Context)>,
}

impl Digests {
    /// By the algorithms that the manifest has for it, or by those that one may have that comes later.
    pub(super) fn new(name: &str, manifest: Option<&Manifest>) -> Self {
        let algorithms = match manifest {
            Some(manifest) => manifest.algorithms_of(name),
            None => vec![Algorithm::Sha1, Algorithm::Sha256, Algorithm::Sha512],
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

/// A line with the SHA-256 of a file that was written.
pub(super) fn line_of(name: &str, digest: &[u8]) -> String {
    format!("SHA256({name})= {}\n", hex(digest))
}
