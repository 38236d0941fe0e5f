//! Hands the compiler's version, the target and the revision of the source to `holdfast version --verbose`.

#![expect(
    clippy::disallowed_methods,
    reason = "a build script asks the compiler that cargo chose, and git"
)]

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=RUSTC");
    if let Ok(target) = std::env::var("TARGET") {
        println!("cargo:rustc-env=HOLDFAST_TARGET={target}");
    }
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if let Some(version) = output_of(Command::new(compiler).arg("--version"))
        && let Some(version) = version.strip_prefix("rustc ")
    {
        println!("cargo:rustc-env=HOLDFAST_RUSTC={version}");
    }
    // Packagers, who build from an archive, say it; a release built from a clone asks git. Other builds leave it out, so that a
    // commit builds nothing again.
    println!("cargo:rerun-if-env-changed=HOLDFAST_COMMIT");
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if is_release && std::env::var_os("HOLDFAST_COMMIT").is_none() {
        emit_commit();
    }
}

/// Tells the commit that is checked out, and when to ask again.
fn emit_commit() {
    let git = |arguments: &[&str]| output_of(Command::new("git").args(arguments));
    // Not the commit of somebody's repository in which an archive of ours was unpacked.
    if git(&["rev-parse", "--show-prefix"]).as_deref() != Some("crates/cli/") {
        return;
    }
    let Some(commit) = git(&["rev-parse", "HEAD"]) else {
        return;
    };
    println!("cargo:rustc-env=HOLDFAST_COMMIT={commit}");
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    for name in ["HEAD"].into_iter().chain(branch.as_deref()) {
        if let Some(path) = git(&["rev-parse", "--git-path", name]) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
}

/// What a program prints, without the line's end; none where it fails or is missing.
fn output_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
