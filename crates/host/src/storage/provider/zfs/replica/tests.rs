//! Tests with real answers of OpenZFS 2.1.11.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex};

use holdfast_block::SystemClock;

use super::super::super::replica::{
    KeepMethod, KeepRequest, PartialReceive, ReceiveRequest, ReplicaBase, ReplicaScope, ReplicaSide as _, SendRequest,
    SenderTrust, StreamCompression, StreamForm,
};
use super::super::super::{ProviderError, ProviderKind};
use super::{ZfsSide, size_in};
use crate::system::process::{Answer, Piped, StreamTools, ToolError, Tools};

const TOKEN: &str = "1-e35990c02-f0-789c636064000310a500c4ec50360710e72765a52697303030419460caa7a515a79680641ae0f26c48f249952\
    5a9c540da22b209abfe92fcf4d2cc1406868015f3656255cd2d3590e439c1f27989b9a9403a312f5bbfb828d92111e20e09a87e98bb5373935253f2b3c1e\
    673238927e7e71614a5161703a5e000005f5c1c9a";

const GET: &str = "\
tank/backup/src	type	filesystem	-
tank/backup/src	creation	1795378470	-
tank/backup/src	userrefs	-	-
tank/backup/src	readonly	off	default
tank/backup/src	canmount	on	default
tank/backup/src	createtxg	15	-
tank/backup/src	guid	17578680652977456876	-
tank/backup/src	encryption	aes-256-gcm	-
tank/backup/src	receive_resume_token	TOKEN	-
tank/backup/src@b	type	snapshot	-
tank/backup/src@b	creation	1795378467	-
tank/backup/src@b	userrefs	1	-
tank/backup/src@b	createtxg	12	-
tank/backup/src@b	guid	4483870517828559108	-
tank/backup/src@a	type	snapshot	-
tank/backup/src@a	creation	1795378467	-
tank/backup/src@a	userrefs	0	-
tank/backup/src@a	createtxg	11	-
tank/backup/src@a	guid	4122805065723390032	-
tank/backup/src#holdfast-replicate-ebaa5a9db85489cb_a	type	bookmark	-
tank/backup/src#holdfast-replicate-ebaa5a9db85489cb_a	creation	1795378466	-
tank/backup/src#holdfast-replicate-ebaa5a9db85489cb_a	userrefs	-	-
tank/backup/src#holdfast-replicate-ebaa5a9db85489cb_a	createtxg	11	-
tank/backup/src#holdfast-replicate-ebaa5a9db85489cb_a	guid	4122805065723390032	-
tank/backup/src/below	type	filesystem	-
";

/// A host that returns scripted answers in order.
struct ScriptedReplica {
    answers: Mutex<VecDeque<Result<String, String>>>,
    requests: Mutex<Vec<String>>,
}

impl Tools for ScriptedReplica {
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
        self.requests
            .lock()
            .unwrap()
            .push(format!("{program} {}", arguments.join(" ")));
        let answer = self
            .answers
            .lock()
            .unwrap()
            .pop_front()
            .expect("there is an answer for each request");
        let (output, stderr) = match &answer {
            Ok(output) => (output.clone(), String::new()),
            Err(stderr) => (String::new(), stderr.clone()),
        };
        Ok(Answer {
            is_success: answer.is_ok(),
            output,
            stderr,
        })
    }
}

impl StreamTools for ScriptedReplica {
    fn start(&self, program: &str, arguments: &[&str]) -> Result<Piped, ToolError> {
        self.requests
            .lock()
            .unwrap()
            .push(format!("{program} {}", arguments.join(" ")));
        Err(ToolError::NotFound {
            program: program.to_owned(),
        })
    }

    fn start_receiver(&self, program: &str, arguments: &[&str], _folder: &Path) -> Result<Piped, ToolError> {
        self.start(program, arguments)
    }

    fn host(&self) -> Option<&str> {
        Some("backup")
    }
}

fn side(answers: &[Result<&str, &str>]) -> (ZfsSide, Arc<ScriptedReplica>) {
    let own = |answer: &Result<&str, &str>| answer.map(str::to_owned).map_err(str::to_owned);
    let scripted = Arc::new(ScriptedReplica {
        answers: Mutex::new(answers.iter().map(own).collect()),
        requests: Mutex::default(),
    });
    (
        ZfsSide::new(Arc::clone(&scripted) as _, Arc::new(SystemClock::new())),
        scripted,
    )
}

fn sending() -> SendRequest {
    SendRequest {
        dataset: "tank/src".to_owned(),
        base: None,
        to: "c".to_owned(),
        has_intermediates: false,
        form: StreamForm::AsStored,
        token: None,
        compression: StreamCompression::Never,
    }
}

#[test]
fn answers_of_openzfs_about_a_dataset_are_parsed() {
    let records = "tank/backup/src@b\t{\"x\":1}\tlocal\ntank/backup/src@a\t-\t-\n";
    let (side, scripted) = side(&[Ok("zfs-2.1.11"), Ok(&GET.replace("TOKEN", TOKEN)), Ok(records)]);
    let found = side.datasets("tank/backup/src", ReplicaScope::Dataset).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].partial, Some(PartialReceive::Token(TOKEN.to_owned())));
    assert!(found[0].is_encrypted);
    let parsed = found[0]
        .snapshots
        .iter()
        .map(|one| (&one.name[..], one.is_bookmark, one.hold_count, one.record.is_some()));
    let parsed: Vec<_> = parsed.collect();
    let bookmark = ("holdfast-replicate-ebaa5a9db85489cb_a", true, 0, false);
    assert_eq!(parsed.len(), 3);
    // Ordered by transaction: `a` and its bookmark precede `b` of the same second.
    assert!(
        parsed[..2].contains(&("a", false, 0, false)) && parsed[..2].contains(&bookmark),
        "{parsed:?}"
    );
    assert_eq!(parsed[2], ("b", false, 1, true));
    assert_eq!(found[0].snapshots[2].identity, "4483870517828559108");
    assert!(
        scripted.requests.lock().unwrap()[1].starts_with("zfs get -Hp"),
        "{scripted:?}",
        scripted = scripted.requests
    );
    let missing = "cannot open 'tank/x': dataset does not exist\n";
    let (side, _) = super::tests::side(&[Ok("zfs-2.1.11"), Err(missing)]);
    assert_eq!(side.datasets("tank/x", ReplicaScope::Tree).unwrap(), []);
}

#[test]
fn sizes_are_found_in_the_output_of_a_dry_run() {
    let resumed = "resume token contents:\nnvlist version: 0\n\tobject = 0x2\n\tbytes = 0x825938\n\ttoname = tank/src@a\n\
        full\ttank/src@a\t33486136\nsize\t33486136\n";
    assert_eq!(size_in(resumed), Some(33_486_136));
    assert_eq!(size_in("incremental\ta\ttank/src@c\t624\nsize\t624\n"), Some(624));
    assert_eq!(size_in(""), None);
}

/// A newer receiver keeps a partial stream that an older sender cannot resume.
#[test]
fn an_older_zfs_does_not_claim_to_resume() {
    let (older, _) = side(&[Err("unrecognized command 'version'\n")]);
    assert_eq!(older.estimate(&sending()).unwrap(), None);
    let resumed = SendRequest {
        token: Some(TOKEN.to_owned()),
        ..sending()
    };
    assert!(older.estimate(&resumed).is_err());
}

#[test]
fn each_kind_of_stream_has_its_arguments() {
    let requests = |sending: &SendRequest| {
        let (side, scripted) = side(&[]);
        assert!(side.send(sending).is_err());
        scripted.requests.lock().unwrap().pop()
    };
    let base = |name: &str, is_bookmark| {
        Some(ReplicaBase {
            name: name.to_owned(),
            is_bookmark,
        })
    };
    let assert_command = |sending: SendRequest, words: &str| assert_eq!(requests(&sending).as_deref(), Some(words));
    assert_command(sending(), "zfs send -L -c -e tank/src@c");
    assert_command(
        SendRequest {
            form: StreamForm::Raw,
            base: base("a", false),
            ..sending()
        },
        "zfs send -w -i tank/src@a tank/src@c",
    );
    let joined = SendRequest {
        form: StreamForm::Plain,
        base: base("a", false),
        has_intermediates: true,
        ..sending()
    };
    assert_command(joined.clone(), "zfs send -I tank/src@a tank/src@c");
    assert_command(
        SendRequest {
            base: base("a", true),
            ..joined.clone()
        },
        "zfs send -I tank/src#a tank/src@c",
    );
    assert_command(
        SendRequest {
            token: Some(TOKEN.to_owned()),
            ..sending()
        },
        &format!("zfs send -t {TOKEN}"),
    );
    assert_command(
        SendRequest {
            compression: StreamCompression::Always,
            dataset: "tank/a b".to_owned(),
            ..sending()
        },
        "sh -c zfs send -L -c -e 'tank/a b@c' | zstd -qc",
    );
    for wrong in [
        SendRequest {
            token: Some("-x".to_owned()),
            ..sending()
        },
        SendRequest {
            token: Some("a b".to_owned()),
            ..sending()
        },
        SendRequest {
            dataset: "-F".to_owned(),
            ..sending()
        },
        SendRequest {
            to: "a/b".to_owned(),
            ..sending()
        },
        SendRequest {
            base: base("a@b", false),
            ..sending()
        },
    ] {
        assert_eq!(requests(&wrong), None, "{wrong:?}");
    }
}

#[test]
fn the_new_hold_precedes_the_release_of_our_others() {
    let keeping = |method, tag: &str| KeepRequest {
        dataset: "tank/backup/src".to_owned(),
        snapshot: "a".to_owned(),
        tag: tag.to_owned(),
        method,
    };
    let tag = "holdfast-replicate-ebaa5a9db85489cb";
    let exists = "cannot hold snapshot 'tank/backup/src@a': tag already exists on this dataset\n";
    let none = "cannot release hold from snapshot 'tank/backup/src@b': no such tag on this dataset\n";
    let get = GET.replace("TOKEN", "-");
    let (kept, scripted) = side(&[Ok("zfs-2.1.11"), Ok(&get), Ok(""), Err(exists), Err(none)]);
    kept.keep(&keeping(KeepMethod::ReplaceHolds, tag)).unwrap();
    let requests = scripted.requests.lock().unwrap();
    let last: Vec<&str> = requests[3..].iter().map(String::as_str).collect();
    let expected = [
        format!("zfs hold {tag} tank/backup/src@a"),
        format!("zfs release {tag} tank/backup/src@b"),
    ];
    assert_eq!(last, expected);
    let (kept, scripted) = side(&[
        Ok("zfs-2.1.11"),
        Ok(&get.replace("cb_a", "cb_old")),
        Ok(""),
        Ok(""),
        Ok(""),
        Ok(""),
    ]);
    kept.keep(&keeping(KeepMethod::Bookmark, tag)).unwrap();
    let requests = scripted.requests.lock().unwrap();
    assert_eq!(
        requests[3],
        format!("zfs bookmark tank/backup/src@a tank/backup/src#{tag}_a")
    );
    assert_eq!(requests[4], format!("zfs destroy tank/backup/src#{tag}_old"));
    assert_eq!(requests[5], format!("zfs release {tag} tank/backup/src@b"));
    let (kept, _) = side(&[]);
    assert!(matches!(
        kept.keep(&keeping(KeepMethod::ReplaceHolds, "audit")),
        Err(ProviderError::Name { .. })
    ));
}

#[test]
fn the_error_of_an_interrupted_stream_has_no_token() {
    let (side, _) = side(&[]);
    let message = "cannot receive new filesystem stream: checksum mismatch or incomplete stream.; Partially received snapshot is saved.; \
        A resuming stream can be generated on the sending system by running:; zfs send -t 1-c9af2e082";
    let error = side.refusal("receive", "tank/x", message).to_string();
    assert!(
        error.contains("incomplete stream.; the received part is kept") && !error.contains("1-c9af"),
        "{error}"
    );
    assert_eq!(side.kind(), ProviderKind::Zfs);
}

#[test]
fn missing_parents_are_created_and_never_mounted() {
    let missing = "cannot open 'tank/b/c': dataset does not exist\n";
    let (receiver, scripted) = side(&[Err(missing), Err(missing), Ok(""), Ok(""), Ok("zfs-2.1.11")]);
    let receiving = ReceiveRequest {
        dataset: "tank/b/c/d".to_owned(),
        snapshots: Vec::new(),
        is_compressed: true,
    };
    assert!(receiver.receive(&receiving, SenderTrust::Full).is_err());
    let requests = scripted.requests.lock().unwrap();
    assert_eq!(
        requests[2..4],
        [
            "zfs create -o canmount=off tank/b",
            "zfs create -o canmount=off tank/b/c"
        ]
    );
    assert_eq!(requests[5], "sh -c zstd -qdc | zfs receive -u -s tank/b/c/d");
}
