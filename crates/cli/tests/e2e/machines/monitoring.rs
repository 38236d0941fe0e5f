//! Checks of a policy and of pools, with a real ZFS.

use crate::program::stdout;
use crate::rig::Rig;
use holdfast_test_kit::file_systems::{FileSystem as _, Pool, system};

/// The value of the first metric whose line begins with `series`.
fn value<'t>(metrics: &'t str, series: &str) -> &'t str {
    let mut lines = metrics.lines();
    let line = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in\n{metrics}"))
}

/// Compares with sanoid, which supports pools of zfs-fuse, but cannot list its snapshots.
fn assert_says_as_sanoid(rig: &Rig, code: i32, check: &str, beginning: &str) {
    let line = stdout(&rig.code(code, &["monitor", check, "sanoid.conf"]));
    assert!(line.starts_with(beginning), "{line}");
    let folder = rig.path("");
    let folder = folder.display();
    let sanoid = format!(
        "sanoid --configdir={folder} --cache-dir={folder}/cache --run-dir={folder}/run --monitor-{check}; echo $?"
    );
    let theirs = system("sh", &["-c", &sanoid]);
    assert_eq!(theirs, Ok(format!("{line}{code}")));
}

#[test]
fn checks_of_a_pool_print_what_sanoid_prints_and_metrics() {
    let rig = Rig::empty();
    let pool = match Pool::at(&rig.path("mounted")) {
        Ok(pool) => pool,
        Err(reason) => return println!("skipped: no zfs: {reason}"),
    };
    let dataset = pool.dataset().0;
    let name = dataset.split('/').next().unwrap();
    let conf = format!("[{dataset}]\nhourly = 1\ndaily = 0\nmonthly = 0\ncapacity_warn = 1\ncapacity_crit = 99\n");
    rig.write("sanoid.conf", conf.as_bytes());

    let line = stdout(&rig.code(2, &["monitor", "snapshots", "sanoid.conf"]));
    assert_eq!(line, format!("CRIT: {dataset} has no hourly snapshots at all!\n"));
    let metrics = rig.ok(&["monitor", "metrics", "sanoid.conf"]);
    assert_eq!(
        value(&metrics, &format!("holdfast_policy_met{{dataset=\"{dataset}\"}}")),
        "0"
    );
    let of_type = format!("{{dataset=\"{dataset}\",type=\"hourly\"}}");
    assert_eq!(value(&metrics, &format!("holdfast_snapshots{of_type}")), "0");
    assert_eq!(value(&metrics, "holdfast_check_level{check=\"snapshots\"}"), "2");

    rig.ok(&["cron", "sanoid.conf", "--quiesce", "off"]);
    let line = rig.ok(&["monitor", "snapshots", "sanoid.conf"]);
    assert_eq!(
        line,
        format!("OK: all monitored datasets ({dataset}) have fresh snapshots\n")
    );
    assert_says_as_sanoid(&rig, 0, "health", "OK ZPOOL ");
    assert_says_as_sanoid(&rig, 0, "capacity", "OK ZPOOL ");

    assert_eq!(
        rig.ok(&["monitor", "metrics", "sanoid.conf", "--output", "holdfast.prom"]),
        ""
    );
    let metrics = String::from_utf8(rig.read("holdfast.prom")).unwrap();
    assert_eq!(
        value(&metrics, &format!("holdfast_policy_met{{dataset=\"{dataset}\"}}")),
        "1"
    );
    assert_eq!(value(&metrics, &format!("holdfast_snapshots{of_type}")), "1");
    let taken: u64 = value(
        &metrics,
        &format!("holdfast_snapshot_newest_timestamp_seconds{of_type}"),
    )
    .parse()
    .unwrap();
    let now: u64 = value(&metrics, "holdfast_monitor_last_run_timestamp_seconds")
        .parse()
        .unwrap();
    assert!(
        taken > 1_700_000_000 && taken <= now && now < taken + 600,
        "{taken} {now}"
    );
    let of_pool = format!("{{pool=\"{name}\"}}");
    let bytes = |what: &str| -> u64 {
        value(&metrics, &format!("holdfast_pool_{what}_bytes{of_pool}"))
            .parse()
            .unwrap()
    };
    assert!(bytes("free") < bytes("size") && bytes("size") > 200 << 20, "{metrics}");
    assert_eq!(
        value(
            &metrics,
            &format!("holdfast_pool_health{{pool=\"{name}\",state=\"ONLINE\"}}")
        ),
        "1"
    );
    let is_left = |name: &String| name.contains("partial");
    assert!(!rig.names("").iter().any(is_left), "{:?}", rig.names(""));

    let report = rig.report(&["monitor", "metrics", "sanoid.conf"]);
    assert_eq!(
        report["metrics"][0]["name"],
        "holdfast_monitor_last_run_timestamp_seconds"
    );

    // A second disk, which is removed later.
    let status = system("zpool", &["status", name]).unwrap();
    let device = status
        .split_whitespace()
        .find(|word| word.ends_with("/device"))
        .unwrap();
    let second = rig.path("second").display().to_string();
    std::fs::File::create(&second).unwrap().set_len(300 << 20).unwrap();
    system("zpool", &["attach", name, device, &second]).unwrap();
    system("zpool", &["offline", name, &second]).unwrap();
    assert_says_as_sanoid(&rig, 1, "health", "*** WARNING *** WARNING ZPOOL ");

    // A missing pool.
    rig.write(
        "sanoid.conf",
        format!("[{dataset}]\ncapacity_warn = 0\ncapacity_crit = 0\n[{name}-x]\n").as_bytes(),
    );
    let missing = format!("CRITICAL ZPOOL {{{name}-x}} does not exist and/or is not responding!");
    for check in ["health", "capacity"] {
        let line = stdout(&rig.code(2, &["monitor", check, "sanoid.conf"]));
        assert!(line.starts_with(&missing), "{line}");
    }
}
