//! Compares the checks of pools with the output of the real sanoid: random pools with every health, and devices in
//! every state. The program is Debian's, unchanged; stand-ins answer for `zfs`, `zpool` and `ps`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(
    clippy::disallowed_methods,
    reason = "a test makes its own world, and runs the other program in it"
)]

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::{SeededRandom, SystemClock};
use holdfast_engine::{MonitorRequest, Providers, check_capacity, check_health};
use holdfast_host::{Answer, ToolError, Tools};
use holdfast_policy::Timestamp;
use holdfast_policy::sanoid::{Check, SanoidConfig};
use holdfast_sanoid_runner::Sanoid;
use holdfast_test_kit::write_program;

const CASE_COUNT: u64 = 120;
const NAMES: [&str; 4] = ["tank", "data", "rpool", "tank2"];
const MISSING: &str = "does not exist and/or is not responding!";

struct Random(SeededRandom);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }
}

/// A pool as ZFS reports it; the state is `None` if there is no pool of that name.
#[derive(Clone)]
struct Pool {
    name: &'static str,
    state: Option<PoolState>,
}

#[derive(Clone)]
struct PoolState {
    size: &'static str,
    capacity: String,
    health: &'static str,
    free: &'static str,
    status: String,
}

struct Case {
    configuration: String,
    pools: Vec<Pool>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut random = Random(SeededRandom::new(seed));
        let mut names: Vec<&'static str> = NAMES.into_iter().filter(|_| random.chance(55)).collect();
        if names.is_empty() {
            names.push(NAMES[0]);
        }
        let (mut configuration, mut pools) = (String::new(), Vec::new());
        let is_all_there = random.chance(80);
        for name in names {
            let state = (is_all_there || random.chance(60)).then(|| some_pool(name, &mut random));
            pools.push(Pool { name, state });
            some_sections(name, &mut random, &mut configuration);
        }
        Self { configuration, pools }
    }

    fn missing(&self) -> Vec<&'static str> {
        let missing = self.pools.iter().filter(|pool| pool.state.is_none());
        missing.map(|pool| pool.name).collect()
    }
}

/// One or two sections for a pool. With more, sanoid uses the limits of a random one, unless one is the root's.
fn some_sections(pool: &str, random: &mut Random, text: &mut String) {
    let names: &[&str] = random.of(&[&[""][..], &["/a"], &["", "/a"], &["/a", ""]]);
    for name in names {
        writeln!(text, "[{pool}{name}]").unwrap();
        for key in ["capacity_warn", "capacity_crit"] {
            if random.chance(50) {
                writeln!(text, "{key} = {}", random.of(&["0", "50", "70", "71", "100"])).unwrap();
            }
        }
    }
}

/// Whether the devices of a pool may have states and errors.
#[derive(Clone, Copy, PartialEq)]
enum Devices {
    Good,
    Mixed,
}

fn some_pool(name: &str, random: &mut Random) -> PoolState {
    let devices = if random.chance(60) {
        Devices::Good
    } else {
        Devices::Mixed
    };
    let health = if devices == Devices::Good {
        "ONLINE"
    } else {
        random.of(&["ONLINE", "DEGRADED", "DEGRADED", "FAULTED", "UNAVAIL", "SUSPENDED"])
    };
    let has_sizes = ["ONLINE", "DEGRADED", "SUSPENDED"].contains(&health);
    let capacity = format!("{}%", random.of(&[0, 7, 49, 50, 69, 70, 71, 94, 95, 100]));
    PoolState {
        size: if has_sizes {
            random.of(&["95.5M", "3.62T", "928G"])
        } else {
            "-"
        },
        capacity: if has_sizes { capacity } else { "-".to_owned() },
        health,
        free: if has_sizes {
            random.of(&["0", "12K", "1.00T"])
        } else {
            "-"
        },
        status: some_status(name, health, devices, random),
    }
}

fn some_status(name: &str, health: &str, devices: Devices, random: &mut Random) -> String {
    let mut text = format!(
        "  pool: {name}\n state: {health}\nstatus: One or more devices has something.\n\tSufficient replicas exist.\n\
         action: See to it.\n  scan: scrub repaired 0B in 00:00:01 with 0 errors on Sun Nov 22 17:26:19 2026\nconfig:\n\n\
         \tNAME  STATE     READ WRITE CKSUM\n\t{name}  {health}  0  0  0\n"
    );
    let mut line = |random: &mut Random, depth: usize, name: &str| {
        let states = ["ONLINE", "DEGRADED", "FAULTED", "OFFLINE", "REMOVED", "UNAVAIL"];
        let state = if devices == Devices::Good || random.chance(50) {
            "ONLINE"
        } else {
            random.of(&states)
        };
        let mut counts = ["0"; 3];
        for count in &mut counts {
            if devices == Devices::Mixed && random.chance(10) {
                *count = random.of(&["1", "12", "1.2K", "30M"]);
            }
        }
        let remark = random.of(&[
            "",
            "",
            "  too many errors",
            "  was /dev/sdx1",
            "  87K resilvered",
            "  (resilvering)",
        ]);
        let [read, write, checksum] = counts;
        writeln!(
            text,
            "\t{:indent$}{name}  {state}  {read}  {write}  {checksum}{remark}",
            "",
            indent = depth * 2
        )
        .unwrap();
    };
    for vdev in 0..=random.below(3) {
        if random.chance(30) {
            line(random, 1, &format!("sd{vdev}"));
            continue;
        }
        let kind = random.of(&["mirror", "raidz1", "raidz2"]);
        line(random, 1, &format!("{kind}-{vdev}"));
        for disk in 0..=random.below(4) {
            if random.chance(20) {
                let kind = random.of(&["replacing", "spare"]);
                line(random, 2, &format!("{kind}-{disk}"));
                line(random, 3, "old");
                line(random, 3, "new");
            } else {
                line(random, 2, &format!("/dev/disk/by-id/ata-{vdev}_{disk}"));
            }
        }
    }
    if devices == Devices::Mixed && random.chance(30) {
        text.push_str(random.of(&["\tlogs\t\n", "\tcache\n", "\tspecial\t\n"]));
        // Devices in these groups have the same indentation as those of the pool.
        text.push_str(random.of(&[
            "\t  nvme0  ONLINE  0  0  0\n",
            "\t  nvme0  UNAVAIL  0  0  0  cannot open\n",
        ]));
    }
    if random.chance(30) {
        text.push_str("\tspares\n\t  sdy  AVAIL   \n");
        text.push_str(random.of(&[
            "",
            "\t  sdz  INUSE     currently in use\n",
            "\t  sdz  UNAVAIL   cannot open\n",
        ]));
    }
    text.push_str("\nerrors: No known data errors\n\n");
    text
}

/// A fake ZFS.
struct World(Vec<Pool>);

impl Tools for World {
    fn ask(&self, program: &str, words: &[&str]) -> Result<Answer, ToolError> {
        let name = words.last().copied().unwrap_or_default();
        let state = self
            .0
            .iter()
            .find(|pool| pool.name == name)
            .and_then(|pool| pool.state.clone());
        let output = state.map(|state| match (program, &words[..words.len() - 1]) {
            ("zpool", ["list", "-H", "-o", "name,size,cap,health,free"]) => {
                format!(
                    "{name}\t{}\t{}\t{}\t{}\n",
                    state.size, state.capacity, state.health, state.free
                )
            }
            ("zpool", ["status"]) => state.status,
            _ => panic!("{program} {words:?}"),
        });
        Ok(Answer {
            is_success: output.is_some(),
            stderr: output
                .as_ref()
                .map_or(format!("cannot open '{name}': no such pool\n"), |_| String::new()),
            output: output.unwrap_or_default(),
        })
    }
}

fn ours(case: &Case, ask: fn(&MonitorRequest<'_>) -> Check) -> (String, i32) {
    let tools: Arc<dyn Tools> = Arc::new(World(case.pools.clone()));
    let check = ask(&MonitorRequest {
        providers: &Providers::new(&tools, "/run/views".into(), Arc::new(SystemClock::new())),
        config: &SanoidConfig::parse(&case.configuration).unwrap(),
        now: Timestamp::UNIX_EPOCH,
    });
    (check.line, check.level.code().into())
}

/// The environment of the real program.
struct SanoidEnvironment {
    folder: tempfile::TempDir,
    program: Sanoid,
}

impl SanoidEnvironment {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let theirs = Self {
            program: Sanoid::start(&folder.path().join("bin")),
            folder,
        };
        fs::create_dir(theirs.path("bin")).unwrap();
        let folder = theirs.folder.path().display().to_string();
        let zpool = format!(
            "for last; do :; done\n[ -e {folder}/pools/$last.list ] || {{ echo no such pool >&2; exit 1; }}\n\
             case \"$*\" in\n'list -o name,size,cap,health,free '*) cat {folder}/pools/$last.list ;;\n\
             'list -H -o cap '*) cat {folder}/pools/$last.cap ;;\n'status '*) cat {folder}/pools/$last.status ;;\n\
             *) echo \"zpool: $*: not known\" >&2; exit 2 ;;\nesac"
        );
        for (name, text) in [("zpool", &zpool[..]), ("zfs", ""), ("ps", "")] {
            let path = theirs.path(&format!("bin/{name}"));
            write_program(&path, &format!("#!/bin/sh\n{text}\n"));
        }
        theirs
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn says(&mut self, case: &Case, word: &str) -> (String, i32) {
        for folder in ["cache", "run", "pools", "etc"] {
            fs::remove_dir_all(self.path(folder)).ok();
            fs::create_dir(self.path(folder)).unwrap();
        }
        for Pool { name, state } in &case.pools {
            let Some(state) = state else { continue };
            let write = |kind: &str, text: &str| fs::write(self.path(&format!("pools/{name}.{kind}")), text).unwrap();
            let columns = format!(
                "{name}  {}  {}  {}  {}",
                state.size, state.capacity, state.health, state.free
            );
            write("list", &format!("NAME  SIZE  CAP  HEALTH  FREE\n{columns}\n"));
            write("cap", &format!("{}\n", state.capacity));
            write("status", &state.status);
        }
        fs::write(self.path("etc/sanoid.conf"), &case.configuration).unwrap();
        let argument = |name: &str, folder: &str| format!("--{name}={}", self.path(folder).display());
        let run = self.program.run(&[
            argument("configdir", "etc"),
            argument("cache-dir", "cache"),
            argument("run-dir", "run"),
            word.to_owned(),
        ]);
        let line = run.output.strip_suffix('\n').unwrap_or(&run.output);
        (line.to_owned(), run.code)
    }
}

/// The text of each pool, sorted, because the order of sanoid's pools is random.
fn by_pool(line: &str) -> Vec<String> {
    let line = line.replace(" ZPOOL ", "\u{0} ZPOOL ");
    let mut words: Vec<String> = line.split(", ").map(str::to_owned).collect();
    // Kinds of errors have the same separator as pools.
    let mut index = 1;
    while index < words.len() {
        if words[index].contains('\u{0}') {
            index += 1;
        } else {
            let rest = words.remove(index);
            write!(words[index - 1], ", {rest}").unwrap();
        }
    }
    let sign = ["*** WARNING *** ", "*** CRITICAL *** "]
        .into_iter()
        .find(|sign| line.starts_with(sign));
    if let Some(sign) = sign {
        words[0].drain(..sign.len());
        words.push(sign.to_owned());
    }
    words.sort();
    words
}

/// How often each level occurred.
fn compare(word: &str, ask: fn(&MonitorRequest<'_>) -> Check) -> [u32; 3] {
    let mut theirs = SanoidEnvironment::new();
    let mut counts = [0; 3];
    for seed in 0..CASE_COUNT {
        let case = Case::new(seed);
        let (ours, theirs) = (ours(&case, ask), theirs.says(&case, word));
        assert_eq!(
            ours.1, theirs.1,
            "seed {seed}\nours: {}\ntheirs: {}\n{}",
            ours.0, theirs.0, case.configuration
        );
        counts[usize::try_from(ours.1).unwrap()] += 1;
        if theirs.0.ends_with(MISSING) {
            // sanoid reports one missing pool, and nothing about the others.
            assert!(
                ours.0.contains(&theirs.0) && ours.0.starts_with("CRITICAL ZPOOL {"),
                "seed {seed}: {}",
                ours.0
            );
            if case.pools.len() == 1 {
                assert_eq!(ours.0, theirs.0);
            }
        } else if theirs.0.is_empty() {
            assert_eq!(ours.0, "OK: no pool of the policy has a limit", "seed {seed}");
        } else {
            assert!(
                case.missing().is_empty() || word == "--monitor-capacity",
                "seed {seed}: {}",
                theirs.0
            );
            assert_eq!(
                by_pool(&ours.0),
                by_pool(&theirs.0),
                "seed {seed}\n{}",
                case.configuration
            );
        }
    }
    counts
}

#[test]
fn health_is_reported_as_by_sanoid() {
    let counts = compare("--monitor-health", check_health);
    // Every level must occur often enough.
    assert!(counts.iter().all(|count| *count >= 10), "{counts:?}");
}

#[test]
fn capacity_is_reported_as_by_sanoid() {
    let counts = compare("--monitor-capacity", check_capacity);
    assert!(counts.iter().all(|count| *count >= 10), "{counts:?}");
}
