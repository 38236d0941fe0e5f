//! An attacker who can write to the repository and cannot sign: forged templates are refused, and leave no files.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use holdfast_block::MemoryDevice;
use holdfast_engine::{Location, NoProgress, Unlock};
use holdfast_repo::key::SystemRandomness;
use holdfast_repo::{
    BackupProgress, BackupRequest, DiskContent, Environment, Manifest, Parent, Repository, Source, SourceData,
    SystemProcesses,
};

use crate::rig::Rig;
use crate::templates::{assert_refused, image, machine_snapshot, pull_words, push, rig};

struct Silent(AtomicBool);

impl BackupProgress for Silent {
    fn advance(&self, _: u64) {}
    fn note(&self, _: String) {}
    fn warn(&self, _: String) {}
    fn cancelled(&self) -> &AtomicBool {
        &self.0
    }
}

/// The forged parts of a template.
#[derive(Default)]
struct Forgery<'a> {
    /// Another name.
    machine: Option<&'a str>,
    /// The content of parts; all others are zeroes of the right size.
    bytes: BTreeMap<&'a str, Vec<u8>>,
    /// The name of an additional part.
    more: Option<&'a str>,
    /// A replacement in the text of the statement.
    statement: Option<(&'a str, &'a str)>,
    /// Another signature.
    signature: Option<String>,
}

fn open(rig: &Rig) -> Repository {
    let environment = Environment {
        randomness: Arc::new(SystemRandomness),
        processes: Arc::new(SystemProcesses),
        now_ms: Arc::new(|| 1_795_000_000_000),
    };
    let location = Location::parse(rig.path("repo").as_os_str()).unwrap();
    holdfast_engine::open(&location, Unlock::Nothing, &environment, &NoProgress).unwrap()
}

impl Forgery<'_> {
    /// Adds the forgery beside the template in the snapshot `id`.
    fn add(&self, rig: &Rig, id: &str) {
        let repository = open(rig);
        let original = repository.snapshot(id.parse().unwrap()).unwrap();
        self.commit(&repository, &original);
    }

    /// Replaces the template in the snapshot `id` by the forgery.
    fn replace(&self, rig: &Rig, id: &str) {
        let repository = open(rig);
        let original = repository.snapshot(id.parse().unwrap()).unwrap();
        repository.unprotect(original.id).unwrap();
        repository.forget(original.id, "forged").unwrap();
        self.commit(&repository, &original);
    }

    fn commit(&self, repository: &Repository, original: &Manifest) {
        let contents: Vec<(String, DiskContent, Vec<u8>)> = original
            .disks
            .iter()
            .map(|disk| {
                let zeroes = || vec![0; usize::try_from(disk.size_bytes).unwrap()];
                let bytes = self.bytes.get(disk.name.as_str()).cloned().unwrap_or_else(zeroes);
                (disk.name.clone(), disk.content, bytes)
            })
            .chain(
                self.more
                    .map(|name| (name.to_owned(), DiskContent::Blocks, vec![1; 4096])),
            )
            .collect();
        let devices: Vec<MemoryDevice> = contents
            .iter()
            .map(|(_, _, bytes)| MemoryDevice::from_bytes(bytes))
            .collect();
        let mut streams: Vec<&[u8]> = contents.iter().map(|(_, _, bytes)| &bytes[..]).collect();
        let parts = contents.iter().zip(&devices).zip(&mut streams);
        let sources = parts.map(|(((name, content, _), device), stream)| Source {
            name: name.clone(),
            data: match content {
                DiskContent::Blocks => SourceData::Disk(device),
                DiskContent::Stream => SourceData::Stream(stream),
            },
            notes: BTreeMap::new(),
        });
        let mut notes = original.notes.clone();
        if let Some((from, to)) = self.statement {
            let text = &notes["template"];
            assert!(text.contains(from), "{text}");
            let forged = text.replacen(from, to, 1);
            notes.insert("template".to_owned(), forged);
        }
        if let Some(signature) = &self.signature {
            notes.insert("template-signature".to_owned(), signature.clone());
        }
        let request = BackupRequest {
            machine: self.machine.unwrap_or(&original.machine).to_owned(),
            time_ms: original.time_ms + 1000,
            tags: Vec::new(),
            parent: Parent::None,
            host: String::new(),
            program: String::new(),
            notes,
            sources: sources.collect(),
            thread_count: 1,
        };
        repository.backup(request, &Silent(AtomicBool::new(false))).unwrap();
    }
}

fn pushed_id(rig: &Rig, label: &str) -> String {
    image(rig, "debian.raw", 1);
    push(rig, label, "debian.raw", "anna", &[])["snapshot"]
        .as_str()
        .unwrap()
        .to_owned()
}

const DIFFERS: &str = "is not what was signed";

#[test]
fn a_replaced_disk_is_detected_while_it_is_written() {
    let rig = rig();
    let id = pushed_id(&rig, "debian");
    // Only a single bit of the disk differs.
    let mut bytes = rig.read("debian.raw");
    *bytes.last_mut().unwrap() ^= 1;
    let forgery = Forgery {
        bytes: BTreeMap::from([("disk", bytes)]),
        ..Forgery::default()
    };
    forgery.replace(&rig, &id);
    for target in ["x.raw", "x.qcow2", "x.vdi", "x.vmdk", "folder"] {
        assert_refused(&rig, &pull_words("debian", target), 5, "damage", DIFFERS);
    }
    // The template is neither tagged again, nor pulled without a signature.
    let tag = [
        "template",
        "tag",
        "debian",
        "debian:good",
        "--sign",
        "anna",
        "--allowed-signers",
        "signers",
    ];
    assert_refused(&rig, &tag, 5, "damage", DIFFERS);
    let unsigned = [&pull_words("debian", "x.raw")[..], &["--unsigned"]].concat();
    assert_refused(&rig, &unsigned, 5, "damage", DIFFERS);
    // An existing target file is kept.
    rig.write("there.raw", b"precious");
    let force = [&pull_words("debian", "there.raw")[..], &["--force"]].concat();
    assert_refused(&rig, &force, 5, "damage", DIFFERS);
    assert_eq!(rig.read("there.raw"), b"precious");
}

#[test]
fn a_disk_replaced_by_zeroes_is_detected() {
    let rig = rig();
    let id = pushed_id(&rig, "debian");
    Forgery::default().replace(&rig, &id);
    assert_refused(&rig, &pull_words("debian", "x.raw"), 5, "damage", DIFFERS);
}

#[test]
fn a_signed_statement_is_valid_only_for_its_name_and_tag() {
    let rig = rig();
    let id = pushed_id(&rig, "debian:old");
    let elsewhere = Forgery {
        machine: Some("template:other"),
        ..Forgery::default()
    };
    elsewhere.add(&rig, &id);
    assert_refused(
        &rig,
        &pull_words("other:old", "x.raw"),
        1,
        "not-found",
        "there is no template",
    );
    for (from, to, asked) in [
        ("tag old", "tag stable", "debian:stable"),
        ("name debian", "name other", "other:old"),
    ] {
        let renamed = Forgery {
            statement: Some((from, to)),
            ..Forgery::default()
        };
        renamed.add(&rig, &id);
        assert_refused(
            &rig,
            &pull_words(asked, "x.raw"),
            5,
            "damage",
            "does not match its content",
        );
    }
}

/// With a later time it would become the template of the tag; but the time is part of the signed statement.
#[test]
fn an_older_statement_does_not_become_the_newest() {
    let rig = rig();
    let old = pushed_id(&rig, "debian");
    let second = image(&rig, "debian.raw", 2);
    push(&rig, "debian", "debian.raw", "anna", &["--replace"]);
    Forgery::default().add(&rig, &old);
    rig.ok(&pull_words("debian", "x.raw"));
    assert!(rig.read("x.raw") == second);
    let later = Forgery {
        statement: Some(("time 20", "time 30")),
        ..Forgery::default()
    };
    later.add(&rig, &old);
    assert_refused(
        &rig,
        &pull_words("debian", "y.raw"),
        5,
        "damage",
        "does not match its content",
    );
    // A push does not continue from a time in the future either.
    let words = [
        "template",
        "push",
        "debian",
        "debian.raw",
        "--sign",
        "anna",
        "--replace",
    ];
    assert_refused(&rig, &words, 1, "refused", "is in the future");
    rig.ok(&["template", "remove", "debian"]);
    push(&rig, "debian", "debian.raw", "anna", &[]);
}

#[test]
fn replaced_configurations_and_added_or_missing_parts_are_refused() {
    let rig = rig();
    image(&rig, "in/vda.raw", 1);
    image(&rig, "in/vdb.raw", 2);
    rig.write("domain.xml", b"<domain type='kvm'><name>web1</name><devices/></domain>");
    machine_snapshot(&rig);
    let id = push(&rig, "web", "web1", "anna", &[])["snapshot"]
        .as_str()
        .unwrap()
        .to_owned();
    let bytes = |name: &str| rig.read(&format!("in/{name}.raw"));
    let configuration = Forgery {
        bytes: BTreeMap::from([
            ("vda", bytes("vda")),
            ("vdb", bytes("vdb")),
            (
                "domain.xml",
                b"<domain type='kvm'><name>evil</name><devices/></domain>".to_vec(),
            ),
        ]),
        ..Forgery::default()
    };
    configuration.replace(&rig, &id);
    assert_refused(&rig, &pull_words("web", "folder"), 5, "damage", DIFFERS);
    rig.ok(&["template", "remove", "web"]);
    let id = push(&rig, "web", "web1", "anna", &[])["snapshot"]
        .as_str()
        .unwrap()
        .to_owned();
    let more = Forgery {
        more: Some("vdc"),
        ..Forgery::default()
    };
    more.replace(&rig, &id);
    assert_refused(
        &rig,
        &pull_words("web", "folder"),
        1,
        "not-found",
        "there is no template",
    );
    let listed = rig.json(3, &["template", "list"]);
    assert_eq!(listed["report"]["unreadable"].as_array().unwrap().len(), 1);
    rig.ok(&["template", "remove", "web", "--all"]);
    assert_eq!(
        rig.report(&["template", "list"])["unreadable"]
            .as_array()
            .unwrap()
            .len(),
        0
    );
}

#[test]
fn hostile_signatures_and_statements_are_refused() {
    let rig = rig();
    let id = pushed_id(&rig, "debian");
    for signature in [
        "",
        "-f\n/etc/passwd",
        "-----BEGIN SSH SIGNATURE-----\n-----END SSH SIGNATURE-----\n",
        "$(touch pwned)",
    ] {
        let forgery = Forgery {
            signature: Some(signature.to_owned()),
            statement: Some(("time 20", "time 30")),
            ..Forgery::default()
        };
        forgery.add(&rig, &id);
        assert_refused(
            &rig,
            &pull_words("debian", "x.raw"),
            5,
            "damage",
            "does not match its content",
        );
    }
    for to in ["disk ../../x ", "disk 99999999999999999999 ", "\u{1b}]0;x ", "disk -1 "] {
        let forgery = Forgery {
            statement: Some(("disk ", to)),
            ..Forgery::default()
        };
        forgery.add(&rig, &id);
    }
    assert_eq!(
        rig.json(3, &["template", "list"])["report"]["unreadable"]
            .as_array()
            .unwrap()
            .len(),
        4
    );
    assert!(!rig.path("pwned").exists());
}
