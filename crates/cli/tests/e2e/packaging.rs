//! Files that are installed with the program.

use std::path::Path;

use crate::host::system;

/// systemd accepts the units, and the timer has the documented times.
#[test]
fn systemd_accepts_the_units() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let place = tempfile::tempdir().unwrap();
    let mut words = vec!["verify".to_owned(), "--man=no".to_owned()];
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let text = std::fs::read_to_string(entry.path()).unwrap();
        // The tested program is not in /usr/bin.
        let text = text.replace("/usr/bin/holdfast", env!("CARGO_BIN_EXE_holdfast"));
        let path = place.path().join(entry.file_name());
        std::io::Write::write_all(&mut std::fs::File::create(&path).unwrap(), text.as_bytes()).unwrap();
        words.push(path.to_str().unwrap().to_owned());
        if let Some(calendar) = text.lines().find_map(|line| line.strip_prefix("OnCalendar=")) {
            assert!(calendar.parse::<holdfast_policy::Calendar>().is_ok());
        }
    }
    assert_eq!(words.len(), 10);
    let words: Vec<&str> = words.iter().map(|word| &word[..]).collect();
    assert_eq!(system("systemd-analyze", &words), Ok(String::new()));
}

/// The exposure of each service is bounded: additional permissions of a service are listed here.
#[test]
fn the_exposure_of_services_is_bounded() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    for (unit, exposure_max) in [
        ("holdfast-daemon.service", "40"),
        ("holdfast-run.service", "40"),
        ("holdfast-cron.service", "40"),
        ("holdfast-serve.service", "40"),
    ] {
        let path = folder.join(unit);
        let threshold = format!("--threshold={exposure_max}");
        let words = [
            "security",
            "--offline=true",
            "--no-pager",
            &threshold,
            path.to_str().unwrap(),
        ];
        assert!(system("systemd-analyze", &words).is_ok(), "{unit}");
    }
}

/// The server copies inherited sockets with a call that is not in `@system-service`: without it, the first client started a
/// service that failed.
#[test]
fn services_with_sockets_may_copy_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let socket = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let Some(service) = socket.lines().find_map(|line| line.strip_prefix("Service=")) else {
            continue;
        };
        count += 1;
        let unit = std::fs::read_to_string(folder.join(service)).unwrap();
        let filter = unit.lines().find_map(|line| line.strip_prefix("SystemCallFilter="));
        let has_call = filter.is_none_or(|filter| filter.split(' ').any(|call| call == "pidfd_getfd"));
        assert!(has_call, "{service}: {filter:?}");
    }
    assert_eq!(count, 2);
}
