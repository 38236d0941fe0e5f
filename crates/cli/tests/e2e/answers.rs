//! Output and errors: the streams that they are printed to, and the exit codes.

use std::fs::File;

use serde_json::Value;

use crate::program::{program, run, stderr, stdout};
use crate::rig::Rig;

fn document(text: &str) -> Value {
    assert_eq!(text.lines().count(), 1, "one document on one line: {text}");
    serde_json::from_str(text).unwrap()
}

#[test]
fn version_answers_on_standard_output() {
    let output = run(&["version"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stdout(&output), format!("holdfast {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(stderr(&output), "");
    assert_eq!(stdout(&run(&["--version"])), stdout(&output));
}

#[test]
fn verbose_version_describes_the_build() {
    let text = stdout(&run(&["version", "--verbose"]));
    for name in ["commit:", "compiler:", "target:", "profile:"] {
        assert!(text.contains(name), "{text}");
    }
    let verbose = document(&stdout(&run(&["--json", "version", "--verbose"])));
    assert!(verbose["report"]["rustc"].is_string(), "{verbose}");
    let report = &verbose["report"];
    assert!(report["cpu"].is_array(), "{verbose}");
    let formats: Vec<&str> = report["image_formats"]
        .as_array()
        .unwrap()
        .iter()
        .map(|format| format["name"].as_str().unwrap())
        .collect();
    assert_eq!(formats, ["raw", "qcow2", "vdi", "vhd", "vhdx", "vmdk", "parallels"]);
    assert_eq!(report["repository_versions_read"], serde_json::json!([1, 2]));
    let file_system = report["file_system"].as_array().unwrap();
    assert!(
        file_system.iter().any(|feature| feature["name"] == "FICLONE"),
        "{verbose}"
    );
    for line in [
        "image formats:",
        "repository format:",
        "key derivation:",
        "FICLONE:",
        "O_DIRECT:",
    ] {
        assert!(text.contains(line), "{line} is missing: {text}");
    }
}

/// Progress is printed to standard error as one JSON document per line.
#[test]
fn progress_for_programs_is_printed_as_events() {
    let rig = Rig::new();
    rig.write("web.raw", &crate::rig::noise(3 << 20, 1));
    let output = rig.run(&["backup", "--machine", "web", "web.raw", "--progress", "json", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    document(&stdout(&output));
    let events: Vec<Value> = stderr(&output)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let last = events.iter().rfind(|event| event["event"] == "progress").unwrap();
    assert_eq!(
        (&last["done"], &last["total"]),
        (&(3 << 20).into(), &(3 << 20).into()),
        "{last}"
    );
    assert_eq!((&last["left_ms"], &last["unit"]), (&0.into(), &"bytes".into()));
    let failed = rig.run(&["restore", "none@latest", "x.raw", "--progress", "json"]);
    assert_eq!(stderr(&failed).lines().count(), 1);
    let event: Value = serde_json::from_str(&stderr(&failed)).unwrap();
    assert_eq!(event["event"], "error");
    assert!(event["hint"].is_string() && event["causes"][0].is_string(), "{event}");
    let refused = rig.run(&["verify", "--progress", "json", "--no-progress"]);
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn the_log_has_the_actions_but_no_password() {
    const PASSWORD: &str = "a password of the log's test";
    let rig = Rig::empty();
    rig.write("web.raw", &crate::rig::noise(1 << 20, 1));
    let run = |words: &[&str], log: &str| {
        let mut command = rig.command(words);
        let command = command.env("HOLDFAST_PASSWORD", PASSWORD).env("HOLDFAST_LOG", log);
        let output = command.output().unwrap();
        assert!(!stderr(&output).contains(PASSWORD), "{}", stderr(&output));
        output
    };
    assert_eq!(run(&["init"], "trace").status.code(), Some(0));
    let words = ["backup", "--machine", "web", "web.raw"];
    assert!(!stderr(&run(&words, "")).contains("holdfast_repo"));
    let log = stderr(&run(&[&words[..], &["-vv"]].concat(), ""));
    for part in [" debug: holdfast_repo::store", " writes snapshots/", " trace: "] {
        assert!(log.contains(part), "{part}: {log}");
    }
    let chosen = stderr(&run(&words, "holdfast_repo=debug"));
    assert!(
        chosen.contains("debug: holdfast_repo") && !chosen.contains("trace:"),
        "{chosen}"
    );
    let wrong = run(&words, "holdfast=loud");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        stderr(&wrong).contains("HOLDFAST_LOG=holdfast=loud"),
        "{}",
        stderr(&wrong)
    );
}

#[test]
fn json_is_one_document_at_any_position_of_the_option() {
    for words in [["--json", "version"], ["version", "--json"]] {
        let answer = document(&stdout(&run(&words)));
        assert_eq!(
            answer,
            serde_json::json!({
                "schema": 1,
                "command": "version",
                "status": "ok",
                "exit_code": 0,
                "warnings": [],
                "report": { "version": env!("CARGO_PKG_VERSION") },
            })
        );
    }
}

#[test]
fn wrong_usage_is_reported_on_standard_error_with_code_2() {
    for words in [
        &[][..],
        &["no-such-verb"],
        &["version", "--no-such-option"],
        &["version", "--color", "pink"],
        &["completions", "tcsh"],
        &["--password-file", "a", "--password-command", "b", "version"],
    ] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert_eq!(stdout(&output), "", "{words:?}");
        assert_ne!(stderr(&output), "", "{words:?}");
    }
}

#[test]
fn an_unknown_command_is_answered_with_a_similar_one() {
    for (words, message, hint) in [
        (&["snapshots"][..], "unknown command 'snapshots'", "use 'holdfast list'"),
        (
            &["bakup", "web1"],
            "unknown command 'bakup'",
            "did you mean 'holdfast backup'?",
        ),
    ] {
        let output_text = stderr(&run(words));
        assert!(
            output_text.starts_with(&format!("holdfast: {message}\nhint: {hint}")),
            "{output_text}"
        );
        let words: Vec<&str> = words.iter().copied().chain(["--json"]).collect();
        let answer = document(&stdout(&run(&words)));
        assert_eq!(answer["error"]["message"], message);
    }
}

#[test]
fn quiet_suppresses_success_messages_but_not_answers() {
    let rig = Rig::empty();
    rig.write("web1.raw", b"web1");
    assert_eq!(rig.ok(&["init", "--no-encryption", "--quiet"]), "");
    for words in [
        &["backup", "web1.raw", "--format", "raw", "-q"][..],
        &["prune", "--keep-last", "1", "-q"],
        &["gc", "-q"],
        &["scrub", "-q"],
    ] {
        let output = rig.code(0, words);
        assert_eq!(stdout(&output) + &stderr(&output), "", "{words:?}");
    }
    assert!(rig.ok(&["list", "-q"]).contains("web1"));
    assert!(
        rig.ok(&["prune", "--keep-last", "1", "-q", "--dry-run"])
            .contains("would")
    );
    assert_eq!(rig.json(0, &["gc", "-q"])["status"], "ok");
}

#[test]
fn the_only_repository_of_a_configuration_needs_no_name() {
    let rig = Rig::new();
    let path = rig.path("repo");
    let section = |name: &str| format!("[repositories.{name}]\npath = \"{}\"\n", path.display());
    rig.write("one.toml", format!("version = 1\n{}", section("vms")).as_bytes());
    rig.write(
        "two.toml",
        format!("version = 1\n{}{}", section("vms"), section("more")).as_bytes(),
    );
    let list = |config: &str| {
        let mut command = rig.command(&["list", "--json"]);
        command
            .env_remove("HOLDFAST_REPOSITORY")
            .env("HOLDFAST_CONFIG", rig.path(config));
        document(&stdout(&command.output().unwrap()))
    };
    assert_eq!(list("one.toml")["status"], "ok");
    for config in ["two.toml", "none.toml"] {
        assert_eq!(list(config)["error"]["kind"], "no-repository", "{config}");
    }
}

#[test]
fn the_program_without_arguments_prints_a_short_help() {
    let output_text = stderr(&run(&[]));
    assert!(
        output_text.contains("Common commands:") && output_text.contains("holdfast help"),
        "{output_text}"
    );
    assert!(output_text.lines().count() <= 25, "{output_text}");
    let help = run(&["help", "image", "info"]);
    assert_eq!(help.status.code(), Some(0));
    assert_eq!(stdout(&help), stdout(&run(&["image", "info", "--help"])));
    let output_text = stderr(&run(&["help", "image", "inof"]));
    assert!(
        output_text.contains("did you mean 'holdfast image info'?"),
        "{output_text}"
    );
}

#[test]
fn an_error_has_the_action_the_cause_and_advice() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let missing = missing.to_str().unwrap();
    let output = run(&["man", missing]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output), "");
    let page = format!("{missing}/holdfast.1");
    assert_eq!(
        stderr(&output),
        format!(
            "holdfast: write {page}: No such file or directory (os error 2)\nhint: check the spelling; folders must exist\n"
        )
    );
    let output = run(&["man", missing, "--json"]);
    let answer = document(&stdout(&output));
    assert_eq!(answer["command"], "man");
    assert_eq!(answer["status"], "error");
    assert_eq!(answer["exit_code"], 1);
    assert_eq!(answer["error"]["kind"], "io");
    assert_eq!(answer["error"]["message"], format!("write {page}"));
    assert_eq!(answer["error"]["causes"][0], "No such file or directory (os error 2)");
}

#[test]
fn json_is_refused_when_data_goes_to_standard_output() {
    let output = run(&["completions", "bash", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(document(&stdout(&output))["error"]["kind"], "usage");
}

#[test]
fn completion_scripts_exist_for_each_shell() {
    for (shell, sign) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef holdfast"),
        ("fish", "complete -c holdfast"),
    ] {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains(sign), "{shell}");
        assert!(stdout(&output).contains(" complete --"), "{shell}");
    }
}

#[test]
fn the_manual_has_a_page_per_verb() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(&["man", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let mut written: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path().display().to_string())
        .collect();
    let mut printed: Vec<String> = stdout(&output).lines().map(str::to_owned).collect();
    written.sort();
    printed.sort();
    assert_eq!(written, printed);
    assert!(written.iter().any(|path| path.ends_with("/holdfast-version.1")));
}

#[test]
fn colours_are_printed_only_on_request() {
    let error = |words: &[&str], variables: &[(&str, &str)]| {
        stderr(&program(words).envs(variables.iter().copied()).output().unwrap())
    };
    let failing = ["man", "/nonexistent/folder"];
    let always = ["man", "/nonexistent/folder", "--color", "always"];
    assert!(!error(&failing, &[]).contains('\u{1b}'));
    assert!(error(&always, &[]).contains('\u{1b}'));
    assert!(
        error(&always, &[("NO_COLOR", "1")]).contains('\u{1b}'),
        "an option counts more than the environment"
    );
    assert!(
        error(&["--color=always", "no-such-verb"], &[]).contains('\u{1b}'),
        "usage errors too"
    );
}

/// As in `holdfast version | head -0`: a closed pipe is not an error.
#[test]
fn a_closed_output_pipe_is_not_an_error() {
    for words in [&["version"][..], &["completions", "bash"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = program(words).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        assert_eq!(stderr(&output), "", "{words:?}");
    }
}

#[test]
fn a_full_disk_under_standard_output_is_an_error() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = program(&["version"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).starts_with("holdfast: write to standard output: "),
        "{}",
        stderr(&output)
    );
}

/// libvirt's libraries load fifty others, and take longer to load than most commands need. They are only loaded for a
/// machine of libvirt.
#[test]
fn the_program_starts_without_the_libraries_of_libvirt() {
    let traced = program(&[]).env("LD_TRACE_LOADED_OBJECTS", "1").output().unwrap();
    let text = stdout(&traced);
    assert!(text.contains("libc.so"), "{text}");
    assert!(!text.contains("virt"), "{text}");
}
