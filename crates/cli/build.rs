//! Hands the compiler's version and the target to `holdfast version --verbose`.

#[expect(
    clippy::disallowed_methods,
    reason = "a build script asks the compiler that cargo chose for its name"
)]
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=RUSTC");
    if let Ok(target) = std::env::var("TARGET") {
        println!("cargo:rustc-env=HOLDFAST_TARGET={target}");
    }
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if let Ok(output) = std::process::Command::new(compiler).arg("--version").output()
        && let Ok(version) = String::from_utf8(output.stdout)
        && let Some(version) = version.trim().strip_prefix("rustc ")
    {
        println!("cargo:rustc-env=HOLDFAST_RUSTC={version}");
    }
}
