//! Pools of a holdfast.toml: their settings apply wherever a pool is named, and options override them.

use std::process::Output;

use serde_json::Value;

use super::pools::{MIB, World};
use crate::program::{stderr, stdout};
use crate::schedules::at_home;

/// A pool with the name `lab` in holdfast.toml.
struct Named {
    world: World,
}

impl Named {
    /// `more` is the end of its section, followed by `jobs`.
    fn new(more: &str, jobs: &str) -> Self {
        let named = Self { world: World::new() };
        named.configure(more, jobs);
        named
    }

    fn configure(&self, more: &str, jobs: &str) {
        let world = &self.world;
        let text = format!(
            "version = 1\n[repositories.main]\npath = \"{}\"\n[pools.lab]\naddress = \"{}\"\npassword_file = \"{}\"\n\
             certificate = \"{}\"\n{more}\n{jobs}",
            world.rig.path("repo").display(),
            world.pool.address(),
            world.rig.path("password").display(),
            world.pool.fingerprint(),
        );
        world.rig.write("holdfast.toml", text.as_bytes());
    }

    fn run(&self, words: &[&str]) -> Output {
        let rig = &self.world.rig;
        let mut command = rig.command(words);
        command
            .env("HOLDFAST_CONFIG", rig.path("holdfast.toml"))
            .output()
            .unwrap()
    }

    fn json(&self, code: i32, words: &[&str]) -> Value {
        let output = self.run(&[words, &["--json"]].concat());
        assert_eq!(
            output.status.code(),
            Some(code),
            "{words:?}\n{}\n{}",
            stdout(&output),
            stderr(&output)
        );
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn report(&self, words: &[&str]) -> Value {
        self.json(0, words)["report"].clone()
    }

    /// The method of a backup.
    fn backed_up(&self, options: &[&str]) -> String {
        let report = self.report(&[&["backup", "xen://lab/web1"], options].concat());
        report["machines"][0]["method"].as_str().unwrap().to_owned()
    }
}

#[test]
fn a_pool_is_selected_by_name_and_options_take_precedence() {
    let named = Named::new("read = \"raw\"\nkeep_nothing = true\nconnections = 1\n", "");
    let world = &named.world;
    let listed = named.report(&["machines", "xen://lab"]);
    assert_eq!(listed["machines"][0]["name"], "web1", "{listed}");
    assert_eq!(named.backed_up(&[]), "raw");
    world.assert_clean(0);
    assert_eq!(named.backed_up(&["--pool-read", "vhd"]), "vhd");
    world.assert_clean(0);
    assert_eq!(
        named.backed_up(&["--pool-read", "nbd", "--pool-keep-nothing=false"]),
        "nbd"
    );
    world.assert_clean(2);
    assert_eq!(named.backed_up(&["--pool-keep-nothing"]), "raw");
    world.assert_clean(0);
    let words = ["export", "web1", "xen://lab", "--new-identity", "--name", "again"];
    let machine_count = || {
        named.report(&["machines", "xen://lab"])["machines"]
            .as_array()
            .unwrap()
            .len()
    };
    let planned = named.report(&[&words[..], &["--dry-run"]].concat());
    assert_eq!(
        (&planned["dry_run"], &planned["name"]),
        (&true.into(), &"again".into()),
        "{planned}"
    );
    assert_eq!(machine_count(), 1, "a dry run creates no machine");
    let report = named.report(&words);
    assert_eq!(machine_count(), 2);
    assert!(
        report["target"].as_str().unwrap().starts_with(&world.address()),
        "{report}"
    );
    // Two addresses of one pool are the same pool.
    let words = ["backup", "xen://lab/web1", "xen://root@lab/again"];
    let report = named.report(&words);
    assert_eq!(report["machines"].as_array().unwrap().len(), 2, "{report}");

    // Options override the file.
    world.rig.write("wrong", b"guess\n");
    let error = named.json(1, &["machines", "xen://lab", "--pool-password-file", "wrong"]);
    assert!(error.to_string().contains("rejects the login of root"), "{error}");
    let error = named.json(1, &["machines", "xen://ana@lab"]);
    assert!(error.to_string().contains("rejects the login of ana"), "{error}");
    let other = "00:".repeat(31) + "00";
    let error = named.json(1, &["machines", "xen://lab", "--pool-certificate", &other]);
    assert!(error.to_string().contains(&world.pool.fingerprint()), "{error}");
    // A word that is no name of a pool is a host name.
    let address = world.address();
    let error = named.json(1, &["machines", &address, "--pool-password-file", "password"]);
    assert_eq!(error["error"]["kind"], "refused", "{error}");
}

#[test]
fn jobs_back_up_machines_of_pools() {
    let named = Named::new(
        "user = \"root\"\nread = \"vhd\"\n",
        "[defaults]\nrepository = \"main\"\nquiesce = \"require\"\nmax_latency = 20\nretries = 0\n\
         [jobs.nightly]\ndo = \"backup\"\nmachines = [\"xen://lab/tag:nightly\"]\nwith_memory = \"auto\"\n\
         [jobs.look]\ndo = \"doctor\"\nmachines = [\"xen://lab\"]\nfix = true\n\
         [jobs.watch]\ndo = \"fresh\"\nmachines = [\"web1\"]\nwithin = \"1h\"\n",
    );
    let world = &named.world;
    world.pool.add_tag(&world.vm, "nightly");
    let shown = world.rig.json(3, &["config", "show", "holdfast.toml"])["report"].clone();
    let command = shown["jobs"][0]["command"].as_str().unwrap().to_owned();
    let expected = format!(
        "--with-memory=auto --pool-password-file {} --pool-certificate {} --pool-read vhd -- xen://root@{}/tag:nightly",
        world.rig.path("password").display(),
        world.pool.fingerprint(),
        world.pool.address()
    );
    assert!(command.ends_with(&expected), "{command}\n{expected}");
    // No machine has a fresh snapshot yet.
    let run = |job: &str, code: i32| {
        let words = at_home(&["run", job]);
        let output = world.rig.run(&words);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{} {}",
            stdout(&output),
            stderr(&output)
        );
    };
    let watch = ["monitor", "machines", "web1", "--within", "1h"];
    world.rig.code(2, &watch);
    run("nightly", 0);
    world.rig.code(0, &watch);
    run("watch", 0);
    run("look", 0);
    let listed = world.rig.report(&["list"]);
    assert_eq!(listed["snapshots"][0]["machine"], "web1");
    world.assert_clean(2);
    // Jobs are incremental from run to run.
    world.write("xvda", 7 * MIB, 100, 9);
    run("nightly", 0);
    assert!(world.pool.calls().iter().any(|call| call.contains("base=")));
}

#[test]
fn errors_of_a_pool_name_their_line() {
    let text = "version = 1\n\
        [repositories.main]\npath = \"/backup\"\n\
        [pools.one]\naddres = \"xen1\"\nread = \"tape\"\n\
        [pools.two]\naddress = \"xen://xen2\"\nuser = \"ana@here\"\npassword_file = \"/a\"\npassword_command = \"b\"\nconnections = 0\n\
        [jobs.a]\ndo = \"backup\"\nrepository = \"main\"\nmachines = [\"xen://one/web1\", \"xen://two/web2\"]\nmethod = \"filter\"\n\
        [jobs.b]\ndo = \"snapshot\"\nmachines = [\"xen://one/web1\"]\n\
        [jobs.c]\ndo = \"backup\"\nrepository = \"main\"\nmachines = [\"xen://one/web1\", \"web2\"]\n\
        [pool.three]\n";
    let world = World::new();
    world.rig.write("wrong.toml", text.as_bytes());
    let errors = world.rig.json(1, &["config", "check", "wrong.toml"])["report"]["errors"].clone();
    let errors: Vec<&str> = errors
        .as_array()
        .unwrap()
        .iter()
        .map(|error| error.as_str().unwrap())
        .collect();
    let expected = [
        "line 5: there is no setting \"addres\" in [pools.one]: did you mean address?",
        "line 6: read in [pools.one]: it should be one of \"nbd\", \"vhd\", \"raw\"",
        "line 8: address in [pools.two]: it should be a host",
        "line 9: user in [pools.two]: it should be a user name without other parts",
        "line 11: [pools.two]: password_file and password_command are both given",
        "line 12: connections in [pools.two]: it should be a whole number from 1 to 64",
        "line 16: [jobs.a]: xen://one/web1 and xen://two/web2 cannot be in one job",
        "line 17: [jobs.a]: method does not apply to pools",
        "line 20: [jobs.b]: machines of pools can only be backed up, and examined by doctor",
        "line 24: [jobs.c]: xen://one/web1 and web2 cannot be in one job",
        "line 25: there is no section [pool]: did you mean pools?",
    ];
    assert_eq!(errors.len(), expected.len(), "{errors:#?}");
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.starts_with(expected), "{error}\n{expected}");
    }
    let text = "version = 1\n[pools.one]\naddress = \"xen1:x\"\ncertificate = [\"5A:0B\"]\nauthorities = \"/nowhere/ca.pem\"\n";
    world.rig.write("wrong.toml", text.as_bytes());
    let errors = world.rig.json(1, &["config", "check", "wrong.toml"])["report"]["errors"].to_string();
    assert!(
        errors.contains("line 3: address in [pools.one]") && errors.contains("line 4: certificate in [pools.one]"),
        "{errors}"
    );
    let text = text.replace(":x", "").replace("certificate", "#");
    world.rig.write("doubtful.toml", text.as_bytes());
    let page = stdout(&world.rig.code(3, &["config", "check", "doubtful.toml"]));
    assert!(
        page.contains("the authorities /nowhere/ca.pem of [pools.one] cannot be read"),
        "{page}"
    );
}
