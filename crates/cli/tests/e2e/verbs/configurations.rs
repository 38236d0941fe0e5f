//! Checking and showing a configuration before it is used.

use serde_json::Value;

use crate::rig::Rig;

const CONF: &[u8] = b"[tank/vm]\n\tuse_template = production\n\trecursive = yes\n\tprocess_children_only = yes\n\n\
    [tank/vm/db]\n\thourly = 12\n\n[template_production]\n\thourly = 36\n\tdaily = 30\n";

#[test]
fn a_valid_configuration_is_confirmed_and_errors_name_their_line() {
    let rig = Rig::empty();
    rig.write("sanoid.conf", CONF);
    assert!(
        rig.ok(&["config", "check", "sanoid.conf"])
            .contains("can be used as it is")
    );
    rig.write("wrong.conf", b"[tank]\nhurly = 3\ndaily = many\n");
    let errors = rig.json(1, &["config", "check", "wrong.conf"])["report"]["errors"].clone();
    assert_eq!(
        errors,
        serde_json::json!([
            "line 2: there is no setting \"hurly\" (in [tank]): did you mean hourly?",
            "line 3: daily = \"many\" (in [tank]): it should be a number from 0 to 1000000",
        ])
    );
    let (kind, text) = rig.error(1, &["config", "show", "wrong.conf"]);
    assert!(kind == "refused" && text.contains("line 2"), "{kind}: {text}");
    rig.write("doubtful.conf", b"[tank]\nuse_template = gone\n");
    let page = rig.code(3, &["config", "check", "doubtful.conf"]);
    assert!(String::from_utf8_lossy(&page.stdout).contains("there is no [template_gone]"));
    assert_eq!(rig.error(1, &["config", "check", "nowhere.conf"]).0, "io");
}

#[test]
fn the_settings_of_a_dataset_are_shown_with_their_lines() {
    let rig = Rig::empty();
    rig.write("sanoid.conf", CONF);
    let words = [
        "config",
        "show",
        "sanoid.conf",
        "--dataset",
        "tank/vm/web",
        "--dataset",
        "tank/other",
    ];
    let datasets = rig.report(&words)["datasets"].clone();
    let shown = |dataset: &Value| (dataset["name"].as_str().unwrap().to_owned(), dataset["takes"] == true);
    let shown: Vec<_> = datasets.as_array().unwrap().iter().map(shown).collect();
    let wanted = [("tank/vm", false), ("tank/vm/db", true), ("tank/vm/web", true)];
    assert_eq!(shown, wanted.map(|(name, takes)| (name.to_owned(), takes)));
    let hourly = |dataset: usize| {
        let settings = datasets[dataset]["settings"].as_array().unwrap();
        let hourly = settings.iter().find(|setting| setting["key"] == "hourly").unwrap();
        (
            hourly["value"].clone(),
            hourly["section"].clone(),
            hourly["line"].clone(),
        )
    };
    assert_eq!(hourly(1), ("12".into(), "tank/vm/db".into(), 7.into()));
    assert_eq!(hourly(2), ("36".into(), "template_production".into(), 10.into()));
    let all = [&words[..], &["--effective"]].concat();
    assert_eq!(
        rig.report(&all)["datasets"][0]["settings"].as_array().unwrap().len(),
        48
    );
    let page = rig.ok(&words);
    assert!(
        page.contains("tank/vm/web: snapshots are taken") && page.contains("line 10, [template_production]"),
        "{page}"
    );
}

/// Every verb accepts the name of a repository in a configuration, and opens it with the settings there.
#[test]
fn a_repository_of_holdfast_toml_is_opened_by_its_name() {
    let rig = Rig::empty();
    rig.write("password", b"correct horse battery staple\n");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(rig.path("password"), private).unwrap();
    rig.write("disk.raw", &vec![7; 65_536]);
    let toml = format!(
        "version = 1\n[repositories.main]\npath = \"{}\"\npassword_file = \"{}\"\n[repositories.open]\npath = \"{}\"\n",
        rig.path("vault").display(),
        rig.path("password").display(),
        rig.path("open-vault").display(),
    );
    rig.write("holdfast.toml", toml.as_bytes());
    let run = |code: i32, words: &[&str]| {
        let mut command = rig.command(&[words, &["--json"]].concat());
        let output = command
            .env("HOLDFAST_CONFIG", rig.path("holdfast.toml"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    run(0, &["init", "-r", "main"]);
    run(0, &["backup", "disk.raw", "-r", "main"]);
    assert_eq!(
        run(0, &["list", "-r", "main"])["report"]["snapshots"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert!(rig.path("vault/config").exists());
    // Options take precedence over the file.
    rig.write("wrong", b"another one\n");
    run(1, &["list", "-r", "main", "--password-file", "wrong"]);
    run(0, &["init", "-r", "open", "--no-encryption"]);
    run(0, &["copy", "--all", "-r", "main", "--to", "open"]);
    assert_eq!(
        run(0, &["list", "-r", "open"])["report"]["snapshots"]
            .as_array()
            .unwrap()
            .len(),
        1
    );

    // An existing path takes precedence over a name.
    run(0, &["init", "-r", "./open", "--no-encryption"]);
    assert_eq!(
        run(0, &["list", "-r", "open"])["report"]["snapshots"],
        serde_json::json!([])
    );
    let error = run(1, &["list", "-r", "mian"])["error"].clone();
    let message = error.to_string();
    assert!(
        message.contains("no folder mian here") && message.contains("holdfast.toml"),
        "{message}"
    );
    // A configuration with an error is not used at all.
    rig.write("holdfast.toml", b"version = 1\n[repositories.main]\npaht = 3\n");
    let message = run(1, &["list", "-r", "main"])["error"].to_string();
    assert!(message.contains("line 2"), "{message}");
    run(0, &["list", "-r", "open"]);
}
