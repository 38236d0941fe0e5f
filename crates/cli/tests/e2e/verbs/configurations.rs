//! What a configuration says, before anything acts by it.

use serde_json::Value;

use crate::rig::Rig;

const CONF: &[u8] = b"[tank/vm]\n\tuse_template = production\n\trecursive = yes\n\tprocess_children_only = yes\n\n\
    [tank/vm/db]\n\thourly = 12\n\n[template_production]\n\thourly = 36\n\tdaily = 30\n";

#[test]
fn a_right_one_is_said_to_be_so_and_what_is_wrong_is_told_by_its_line() {
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
    let (kind, text) = rig.error(2, &["config", "show", "wrong.conf"]);
    assert!(kind == "usage" && text.contains("line 2"), "{kind}: {text}");
    rig.write("doubtful.conf", b"[tank]\nuse_template = gone\n");
    let page = rig.code(3, &["config", "check", "doubtful.conf"]);
    assert!(String::from_utf8_lossy(&page.stdout).contains("there is no [template_gone]"));
    assert_eq!(rig.error(1, &["config", "check", "nowhere.conf"]).0, "io");
}

#[test]
fn what_holds_for_a_dataset_is_shown_with_the_line_that_says_so() {
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
    let told = |dataset: &Value| (dataset["name"].as_str().unwrap().to_owned(), dataset["takes"] == true);
    let told: Vec<_> = datasets.as_array().unwrap().iter().map(told).collect();
    let wanted = [("tank/vm", false), ("tank/vm/db", true), ("tank/vm/web", true)];
    assert_eq!(told, wanted.map(|(name, takes)| (name.to_owned(), takes)));
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
