//! `holdfast version`: shows the version and the build.

use std::path::Path;

use holdfast_image::Format;
use holdfast_repo::REPOSITORY_VERSION;
use holdfast_repo::key::KdfParameters;
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::process::kernel::{self, FileFeature};
use crate::units;

/// Arguments of `version`.
#[derive(Debug, clap::Args)]
pub(crate) struct VersionArgs {}

impl Verb for VersionArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See the version",
            line: "holdfast version",
        },
        Example {
            wish: "Describe this build in a bug report",
            line: "holdfast version --verbose",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(context)
    }
}

/// Report of `version`.
#[derive(Debug, Serialize)]
struct VersionReport {
    version: &'static str,
    #[serde(flatten)]
    build: Option<Build>,
}

/// What `version --verbose` adds.
#[derive(Debug, Serialize)]
struct Build {
    /// Revision of the source; null if it was unknown at build time.
    commit: Option<&'static str>,
    /// Version of the compiler; null if it was unknown at build time.
    rustc: Option<&'static str>,
    /// The target platform.
    target: Option<&'static str>,
    /// "release" or "debug".
    profile: &'static str,
    /// Disk image formats that can be read and written.
    image_formats: Vec<ImageFormat>,
    /// Compression methods for clusters of qcow2 images.
    qcow2_compressions: [&'static str; 2],
    /// Readable versions of the repository format.
    repository_versions_read: Vec<u32>,
    /// The version of the repository format that is written.
    repository_version_written: u32,
    /// Supported kinds of repository storage.
    stores: [&'static str; 1],
    /// The derivation of keys from passwords.
    key_derivation: String,
    /// Supported ciphers.
    ciphers: [&'static str; 2],
    /// Release of the kernel; null if it cannot be determined.
    kernel: Option<String>,
    /// Features of the current folder's file system.
    file_system: Vec<FileFeature>,
    /// Processor features that affect speed, and whether this machine has them.
    cpu: Vec<CpuFeature>,
}

#[derive(Debug, Serialize)]
struct ImageFormat {
    name: &'static str,
    reads: bool,
    writes: bool,
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
        let formats: Vec<&str> = build.image_formats.iter().map(|format| format.name).collect();
        let read: Vec<String> = build.repository_versions_read.iter().map(u32::to_string).collect();
        page.fields(&[
            ("image formats", format!("{}, read and written", formats.join(", "))),
            ("qcow2 compression", build.qcow2_compressions.join(", ")),
            (
                "repository format",
                format!(
                    "up to version {}; reads {}",
                    build.repository_version_written,
                    read.join(", ")
                ),
            ),
            ("stores", build.stores.join(", ")),
            ("key derivation", build.key_derivation.clone()),
            ("encryption", build.ciphers.join(", ")),
            ("kernel", build.kernel.clone().unwrap_or_else(|| unknown.to_owned())),
        ]);
        let features: Vec<(&str, String)> = build
            .file_system
            .iter()
            .map(|feature| {
                let present = match feature.present {
                    Some(true) => "yes",
                    Some(false) => "no",
                    None => unknown,
                };
                (feature.name, format!("{present} ({})", feature.purpose))
            })
            .collect();
        page.line("file system of this folder");
        page.fields(&features);
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

fn run(context: &Context) -> Result<Exit, Error> {
    context.report(&VersionReport {
        version: env!("CARGO_PKG_VERSION"),
        build: context.is_verbose().then(|| Build {
            commit: option_env!("HOLDFAST_COMMIT"),
            rustc: option_env!("HOLDFAST_RUSTC"),
            target: option_env!("HOLDFAST_TARGET"),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" },
            image_formats: Format::SUPPORTED
                .iter()
                .map(|format| ImageFormat {
                    name: format.name(),
                    reads: true,
                    writes: true,
                })
                .collect(),
            qcow2_compressions: ["zlib", "zstd"],
            repository_versions_read: (1..=REPOSITORY_VERSION).collect(),
            repository_version_written: REPOSITORY_VERSION,
            stores: ["directory"],
            key_derivation: key_derivation(),
            ciphers: ["aes-256-gcm", "chacha20-poly1305"],
            kernel: kernel::release(),
            file_system: kernel::file_features(Path::new(".")),
            cpu: cpu_features(),
        }),
    })
}

fn key_derivation() -> String {
    let KdfParameters {
        memory_kib,
        iterations,
        lanes,
    } = KdfParameters::default();
    format!(
        "argon2id, {}, {iterations} passes, {}",
        units::bytes(u64::from(memory_kib) << 10),
        units::counted(lanes.into(), "lane", "lanes")
    )
}

/// The features that encryption, hashing and compression detect at run time.
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

/// The features that encryption, hashing and compression detect at run time.
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

/// The features that encryption, hashing and compression detect at run time: none on this architecture.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<CpuFeature> {
    Vec::new()
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn cpu_feature(name: &'static str, purpose: &'static str, present: bool) -> CpuFeature {
    CpuFeature { name, purpose, present }
}
