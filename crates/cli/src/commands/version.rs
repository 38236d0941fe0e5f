//! `holdfast version`: which build this is.

use serde::Serialize;

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Arguments of `version`.
#[derive(Debug, clap::Args)]
pub struct VersionArgs {
    /// Also show how it was built and what it uses of this machine's processor
    #[arg(short, long)]
    verbose: bool,
}

/// What a person may want of it.
pub(super) const EXAMPLES: &[Example] = &[
    Example {
        wish: "See the version",
        line: "holdfast version",
    },
    Example {
        wish: "Describe this build in a bug report",
        line: "holdfast version --verbose",
    },
];

/// What `version` answers.
#[derive(Debug, Serialize)]
struct VersionReport {
    version: &'static str,
    #[serde(flatten)]
    build: Option<Build>,
}

/// What `version --verbose` adds.
#[derive(Debug, Serialize)]
struct Build {
    /// Revision of the source; null where the build was not told.
    commit: Option<&'static str>,
    /// Version of the compiler; null where the build could not find out.
    rustc: Option<&'static str>,
    /// What it was built for.
    target: Option<&'static str>,
    /// "release" or "debug".
    profile: &'static str,
    /// What of the processor matters to speed, and whether this machine has it.
    cpu: Vec<CpuFeature>,
}

#[derive(Debug, Serialize)]
struct CpuFeature {
    name: &'static str,
    purpose: &'static str,
    present: bool,
}

impl Report for VersionReport {
    fn command(&self) -> &'static str {
        "version"
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!("holdfast {}", self.version));
        let Some(build) = &self.build else { return };
        let unknown = "unknown";
        page.fields(&[
            ("commit", build.commit.unwrap_or(unknown).to_owned()),
            ("compiler", build.rustc.unwrap_or(unknown).to_owned()),
            ("target", build.target.unwrap_or(unknown).to_owned()),
            ("profile", build.profile.to_owned()),
        ]);
        let cpu: Vec<(&str, String)> = build
            .cpu
            .iter()
            .map(|feature| {
                let present = if feature.present { "yes" } else { "no" };
                (feature.name, format!("{present} ({})", feature.purpose))
            })
            .collect();
        page.line("processor");
        page.fields(&cpu);
    }
}

/// Prints the version.
pub(super) fn run(args: &VersionArgs, context: &Context) -> Result<Exit, Error> {
    context.report(&VersionReport {
        version: env!("CARGO_PKG_VERSION"),
        build: args.verbose.then(|| Build {
            commit: option_env!("HOLDFAST_COMMIT"),
            rustc: option_env!("HOLDFAST_RUSTC"),
            target: option_env!("HOLDFAST_TARGET"),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" },
            cpu: cpu_features(),
        }),
    })
}

/// What encryption, hashing and compression look for at run time.
#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<CpuFeature> {
    use std::arch::is_x86_feature_detected;
    vec![
        cpu_feature("aes", "encryption", is_x86_feature_detected!("aes")),
        cpu_feature(
            "vaes",
            "encryption, several blocks at once",
            is_x86_feature_detected!("vaes"),
        ),
        cpu_feature("pclmulqdq", "authentication", is_x86_feature_detected!("pclmulqdq")),
        cpu_feature("sse4.2", "checksums", is_x86_feature_detected!("sse4.2")),
        cpu_feature("avx2", "hashing", is_x86_feature_detected!("avx2")),
        cpu_feature("avx512f", "hashing, twice as wide", is_x86_feature_detected!("avx512f")),
    ]
}

/// What encryption, hashing and compression look for at run time.
#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<CpuFeature> {
    use std::arch::is_aarch64_feature_detected;
    vec![
        cpu_feature("aes", "encryption", is_aarch64_feature_detected!("aes")),
        cpu_feature("pmull", "authentication", is_aarch64_feature_detected!("pmull")),
        cpu_feature("crc", "checksums", is_aarch64_feature_detected!("crc")),
        cpu_feature("neon", "hashing", is_aarch64_feature_detected!("neon")),
    ]
}

/// What encryption, hashing and compression look for at run time: nothing that has a name here.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<CpuFeature> {
    Vec::new()
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn cpu_feature(name: &'static str, purpose: &'static str, present: bool) -> CpuFeature {
    CpuFeature { name, purpose, present }
}
