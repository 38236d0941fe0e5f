//! Compares with GNU tar, libarchive and rsync, and tries hostile archives.

mod images;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_archive::{DeviceNumber, TreeEntry, TreeEntryKind, TreeTarWriter, TreeTime};
use holdfast_block::ManualClock;
use tempfile::TempDir;

use super::{ContentSource, FillReport, PackRootOptions, PackedHoles, TarInput, copy_root, fill_root, pack_root};
use crate::job::{Interrupt, Job, NoProgress, Result};

/// A job that is not interrupted.
fn with_job<T>(run: impl FnOnce(Job<'_>) -> T) -> T {
    let (interrupt, clock) = (Interrupt::new(), ManualClock::new());
    run(Job {
        progress: &NoProgress,
        interrupt: &interrupt,
        clock: &clock,
        thread_count: 2,
    })
}

/// Runs a script in a folder.
fn shell(folder: &Path, script: &str) -> String {
    let mut command = holdfast_host::command("sh");
    let command = command.args(["-euc", script]).current_dir(folder).env("LC_ALL", "C");
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{script}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn has_program(name: &str) -> bool {
    let mut command = holdfast_host::command("sh");
    command
        .args(["-c", &format!("command -v {name} >/dev/null")])
        .status()
        .unwrap()
        .success()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn folder(parent: &Path, name: &str) -> PathBuf {
    let path = parent.join(name);
    std::fs::create_dir(&path).unwrap();
    path
}

fn write(path: &Path, bytes: &[u8]) {
    File::create(path).unwrap().write_all(bytes).unwrap();
}

fn read(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// Every kind of file, and everything that a file can have.
fn make_tree(parent: &Path) -> PathBuf {
    let tree = folder(parent, "tree");
    let long = "n".repeat(120);
    shell(
        &tree,
        &format!(
            "mkdir -p a/b/{long}/{long} 'sp ace' locked && printf hello > a/file && chmod 4755 a/file && ln a/file a/b/hard
             ln -s ../../outside a/link && ln -s /{long}/{long} a/b/long-link && mkfifo -m 600 a/pipe
             printf text > a/b/{long}/{long}/file && ln a/b/{long}/{long}/file 'sp ace/hard to long'
             truncate -s 9M a/holes && printf x | dd of=a/holes bs=1 seek=5000000 conv=notrunc 2>/dev/null
             truncate -s 1M a/only-hole && head -c 3000000 /dev/zero | tr '\\0' 'z' > a/big && : > a/empty
             : > \"$(printf 'b\\351\\377')\" && : > \"$(printf 'line\\nend')\"
             printf secret > locked/file && chmod 555 locked && chmod 1777 'sp ace'
             touch -hd '2001-02-03 04:05:06.789012345' a/link a/file && touch -d '1960-01-01 00:00:00.5' a/empty
             touch -d '2100-01-01 00:00:00.25' a/b && touch -d '2005-05-05' a . locked"
        ),
    );
    if has_program("setfattr") && has_program("setfacl") {
        shell(
            &tree,
            "setfattr -n user.test -v value a/file && setfattr -n user.empty a && setfattr -n 'user.odd=%3D' -v 0x000aff a/big
             setfacl -m u:1234:rx,g:4321:r a/file && setfacl -d -m u:77:rwx a/b && touch -d '2100-01-01 00:00:00.25' a/b",
        );
    }
    if is_root() {
        shell(
            &tree,
            "chown -h 1234:5678 a/link a/big && chown 3000000:4000000 a/empty && mknod a/null c 1 3 && mknod a/disk b 259 70000
             setfattr -n security.capability -v 0x0100000200040000000000000000000000000000 a/holes
             setfattr -h -n trusted.test -v link a/link; touch -d '2005-05-05' a",
        );
    }
    tree
}

/// One line for each file with everything about it, and its content.
fn listing(tree: &Path) -> String {
    let times = "%T@";
    shell(
        tree,
        &format!(
            "find . -printf '%p|%y|%m|%U|%G|{times}|%n|%l|' \\( -type d -printf '0\\n' -o -printf '%s\\n' \\) | sort
             find . -type f -print0 | sort -z | xargs -0 sha256sum
             if command -v getfattr >/dev/null; then getfattr -hRd -m - -e hex . ; fi
             find . \\( -type b -o -type c \\) -exec stat -c '%n %t %T' {{}} + | sort"
        ),
    )
}

fn from_tar(archive: &Path, root: &Path) -> Result<FillReport> {
    let source = ContentSource::Tar(TarInput::File(archive.to_owned()));
    with_job(|job| fill_root(root, source, job))
}

#[test]
fn a_directory_is_copied_with_everything_in_it() {
    let directory = TempDir::new().unwrap();
    let tree = make_tree(directory.path());
    let to = directory.path().join("copy");
    let report = with_job(|job| copy_root(&tree, &to, job)).unwrap();
    assert_eq!(report.losses, []);
    assert_eq!(listing(&to), listing(&tree));
    assert_eq!(report.counts.hard_link_count, 2);
    let metadata = std::fs::metadata(to.join("a/holes")).unwrap();
    assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
    assert_eq!(std::fs::metadata(to.join("a/only-hole")).unwrap().blocks(), 0);
    if has_program("rsync") {
        let arguments = format!("rsync -aHAXnic --delete {}/ {}/", tree.display(), to.display());
        assert_eq!(shell(directory.path(), &arguments), "");
    }
}

#[test]
fn archives_of_gnu_tar_give_what_gnu_tar_unpacks() {
    let directory = TempDir::new().unwrap();
    make_tree(directory.path());
    let attributes = "--xattrs --xattrs-include=* --acls";
    // ustar holds neither such names nor such owners.
    let plain = "tree/a/big tree/a/b/hard tree/a/link tree/a/pipe";
    let cases = [
        ("ustar", format!("--format=ustar {plain}")),
        ("v7", format!("--format=v7 {plain}").replace(" tree/a/pipe", "")),
        ("gnu", "--format=gnu --sparse tree/a tree/locked tree/sp*".to_owned()),
        ("pax", format!("--format=pax {attributes} tree/.")),
        (
            "pax-0.0",
            format!("--format=pax --sparse --sparse-version=0.0 {attributes} tree/."),
        ),
        (
            "pax-0.1",
            format!("--format=pax --sparse --sparse-version=0.1 {attributes} tree/."),
        ),
        (
            "pax-1.0",
            format!("--format=pax --sparse --sparse-version=1.0 {attributes} tree/."),
        ),
    ];
    for (name, arguments) in cases {
        let archive = directory.path().join(format!("{name}.tar"));
        shell(
            directory.path(),
            &format!("tar -cf {name}.tar {arguments} 2>{name}.errors"),
        );
        let (ours, theirs) = (
            folder(directory.path(), name),
            folder(directory.path(), &format!("{name}-gnu")),
        );
        from_tar(&archive, &ours).unwrap_or_else(|error| panic!("{name}: {error}"));
        shell(
            &theirs,
            &format!("tar -xpf ../{name}.tar --xattrs --xattrs-include='*' --acls"),
        );
        shell(directory.path(), &format!("touch -d 2001-01-01 {name} {name}-gnu"));
        // Folders that are not in the archive have the time of unpacking.
        shell(
            directory.path(),
            &format!(
                "touch -d 2001-01-01 {name}/tree {name}-gnu/tree {name}/tree/a {name}-gnu/tree/a {name}/tree/a/b {name}-gnu/tree/a/b 2>/dev/null || true"
            ),
        );
        assert_eq!(listing(&ours), listing(&theirs), "{name}");
    }
}

#[test]
fn compressed_archives_are_unpacked_or_refused_with_advice() {
    let directory = TempDir::new().unwrap();
    let tree = folder(directory.path(), "tree");
    write(&tree.join("file"), b"content");
    shell(
        directory.path(),
        "tar -C tree -cf plain.tar . && gzip -k plain.tar && zstd -q plain.tar && xz -k plain.tar",
    );
    for name in ["plain.tar", "plain.tar.gz", "plain.tar.zst", "plain.tar.xz"] {
        let root = folder(directory.path(), &format!("{name}-root"));
        from_tar(&directory.path().join(name), &root).unwrap();
        assert_eq!(read(&root.join("file")), b"content");
    }
    let root = folder(directory.path(), "bzip2");
    let archive = directory.path().join("plain.tar.bz2");
    write(&archive, b"BZh91AY&SY");
    let error = from_tar(&archive, &root).unwrap_err();
    assert!(holdfast_block::error_text(&error).contains("bzip2 -dc FILE"), "{error}");
}

#[test]
fn other_programs_unpack_what_is_packed() {
    let directory = TempDir::new().unwrap();
    let tree = make_tree(directory.path());
    let expected = listing(&tree);
    for (name, holes) in [("kept", PackedHoles::Keep), ("filled", PackedHoles::Fill)] {
        let archive = directory.path().join(format!("{name}.tar"));
        let mut packed = Vec::new();
        let report = with_job(|job| pack_root(&tree, &mut packed, PackRootOptions { holes }, job)).unwrap();
        assert_eq!((report.losses, report.archive_bytes), (Vec::new(), packed.len() as u64));
        assert_eq!(packed.len() > 9 << 20, holes == PackedHoles::Fill, "{}", packed.len());
        write(&archive, &packed);
        let mut again = Vec::new();
        with_job(|job| pack_root(&tree, &mut again, PackRootOptions { holes }, job)).unwrap();
        assert!(packed == again, "the bytes are not the same");
        let ours = folder(directory.path(), &format!("{name}-ours"));
        let report = from_tar(&archive, &ours).unwrap();
        assert_eq!(
            (listing(&ours), report.losses),
            (expected.clone(), Vec::new()),
            "{name}"
        );
        let gnu = folder(directory.path(), &format!("{name}-gnu"));
        shell(
            &gnu,
            &format!("tar -xpf {} --xattrs --xattrs-include='*' --acls", archive.display()),
        );
        assert_eq!(listing(&gnu), expected, "{name}");
        if has_program("bsdtar") {
            let libarchive = folder(directory.path(), &format!("{name}-bsdtar"));
            shell(
                &libarchive,
                &format!("bsdtar --acls --xattrs --numeric-owner -xpf {} 2>&1", archive.display()),
            );
            let files = "find . -type f -print0 | sort -z | xargs -0 sha256sum";
            assert_eq!(shell(&libarchive, files), shell(&tree, files), "{name}");
        }
    }
}

fn entry(path: &str, kind: TreeEntryKind) -> TreeEntry {
    TreeEntry {
        path: path.into(),
        mode: if kind == TreeEntryKind::Directory { 0o755 } else { 0o644 },
        kind,
        uid: 0,
        gid: 0,
        modified: TreeTime::default(),
        attributes: Vec::new(),
        unresolved_acl_count: 0,
        size_bytes: 0,
        extents: Vec::new(),
        offset: 0,
    }
}

fn packed(entries: &[TreeEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = TreeTarWriter::new(&mut bytes);
    for entry in entries {
        writer.append(entry).unwrap();
    }
    writer.finish().unwrap();
    bytes
}

/// What a hostile archive does to a folder beside the root folder: nothing.
fn fill_beside(entries: &[TreeEntry]) -> (TempDir, Result<FillReport>) {
    let directory = TempDir::new().unwrap();
    let outside = folder(directory.path(), "outside");
    write(&outside.join("passwd"), b"outside");
    let before = listing(&outside);
    let root = folder(directory.path(), "root");
    let text = |entry: &TreeEntry| {
        let mut entry = entry.clone();
        let named = |bytes: &[u8]| {
            String::from_utf8(bytes.to_vec())
                .unwrap()
                .replace("OUTSIDE", outside.to_str().unwrap())
                .into_bytes()
        };
        entry.path = named(&entry.path);
        entry.kind = match entry.kind {
            TreeEntryKind::SymbolicLink(target) => TreeEntryKind::SymbolicLink(named(&target)),
            TreeEntryKind::HardLink(target) => TreeEntryKind::HardLink(named(&target)),
            kind => kind,
        };
        entry
    };
    let entries: Vec<_> = entries.iter().map(text).collect();
    let stream = ContentSource::Tar(TarInput::Stream(Box::new(std::io::Cursor::new(packed(&entries)))));
    let result = with_job(|job| fill_root(&root, stream, job));
    assert_eq!(listing(&outside), before);
    let names = shell(directory.path(), "ls -A");
    assert_eq!(names, "outside\nroot\n");
    (directory, result)
}

#[test]
fn nothing_leaves_the_root_folder() {
    let link = |path: &str, target: &str| entry(path, TreeEntryKind::SymbolicLink(target.into()));
    let hard = |path: &str, target: &str| entry(path, TreeEntryKind::HardLink(target.into()));
    let file = |path: &str| entry(path, TreeEntryKind::File);
    let refused = [
        (vec![file("../outside/new")], "\"../outside/new\" leads out"),
        (vec![file("a/../../outside/new")], "leads out"),
        (
            vec![hard("name", "../outside/passwd")],
            "\"name\" is a link to \"../outside/passwd\"",
        ),
        (vec![hard("name", "OUTSIDE/passwd")], "does not exist before it"),
        (
            vec![link("up", "../.."), hard("name", "up/outside/passwd")],
            "does not exist before it",
        ),
        (
            vec![link("out", "OUTSIDE"), hard("name", "out/passwd")],
            "does not exist before it",
        ),
        (vec![link("loop", "loop"), file("loop/new")], "loop/new"),
        (vec![file(".")], "is the root folder"),
        (
            vec![file(&"d/".repeat(1001)), file(&format!("{}f", "d/".repeat(1001)))],
            "deeper",
        ),
        (vec![file(&"n".repeat(300))], "nnn"),
    ];
    for (entries, expected) in refused {
        let (_directory, result) = fill_beside(&entries);
        let error = holdfast_block::error_text(&result.unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    // A process with this root folder would find these files there.
    let accepted = [
        (vec![file("/etc/passwd")], "etc/passwd"),
        (vec![link("up", "../../.."), file("up/new")], "new"),
        (vec![link("out", "/there"), file("out/new")], "there/new"),
        (vec![link("a/b", "../c/../d"), file("a/b/new")], "d/new"),
        (vec![link("out", "OUTSIDE"), file("out/passwd")], "out/passwd"),
        (vec![link("name", "OUTSIDE/passwd"), file("name")], "name"),
        (
            vec![
                link("out", "OUTSIDE"),
                entry("out/", TreeEntryKind::Directory),
                file("out/new"),
            ],
            "out/new",
        ),
    ];
    for (entries, path) in accepted {
        let (directory, result) = fill_beside(&entries);
        result.unwrap();
        let root = directory.path().join("root");
        let is_link = std::fs::symlink_metadata(root.join("out")).is_ok_and(|metadata| metadata.is_symlink());
        if !(is_link && path == "out/passwd") {
            assert!(std::fs::symlink_metadata(root.join(path)).unwrap().is_file(), "{path}");
        }
    }
}

#[test]
fn a_later_entry_replaces_an_earlier_one() {
    let deep = format!("a/{}file", "d/".repeat(900));
    let file = |path: &str| entry(path, TreeEntryKind::File);
    let hard = |path: &str, target: &str| entry(path, TreeEntryKind::HardLink(target.into()));
    let (directory, result) = fill_beside(&[
        file(&deep),
        file("a/x/y"),
        file("a"),
        hard("b", "a"),
        hard("a", "a"),
        file("b/"),
    ]);
    result.unwrap();
    let root = directory.path().join("root");
    assert!(root.join("a").is_file());
    assert!(root.join("b").is_dir());
    assert_eq!(shell(&root, "ls -A"), "a\nb\n");
}

#[test]
fn a_folder_with_files_is_refused() {
    let directory = TempDir::new().unwrap();
    let (from, to) = (folder(directory.path(), "from"), folder(directory.path(), "to"));
    folder(&to, "lost+found");
    write(&from.join("file"), b"");
    let copy = || with_job(|job| copy_root(&from, &to, job));
    copy().unwrap();
    let error = copy().unwrap_err().to_string();
    assert!(error.ends_with("to is not empty: it holds file"), "{error}");
}

#[test]
fn the_copy_of_a_tree_into_itself_ends() {
    let directory = TempDir::new().unwrap();
    let from = folder(directory.path(), "from");
    write(&from.join("file"), b"1");
    let to = folder(&from, "to");
    let report = with_job(|job| copy_root(&from, &to, job)).unwrap();
    assert_eq!(shell(&to, "find ."), ".\n./file\n");
    assert_eq!(report.losses[0].reason, "the target itself");
}

#[test]
fn an_interruption_ends_the_job() {
    let directory = TempDir::new().unwrap();
    let from = folder(directory.path(), "from");
    write(&from.join("file"), b"1");
    let (interrupt, clock) = (Interrupt::new(), ManualClock::new());
    interrupt.request();
    let job = Job {
        progress: &NoProgress,
        interrupt: &interrupt,
        clock: &clock,
        thread_count: 1,
    };
    let error = pack_root(&from, &mut Vec::new(), PackRootOptions::default(), job).unwrap_err();
    assert_eq!(error.to_string(), "interrupted");
    assert!(copy_root(&from, &directory.path().join("to"), job).is_err());
}

/// Their permissions once depended on the umask, and the folder in which one was created got the current time.
#[test]
fn folders_that_are_not_in_the_archive_are_created_with_fixed_permissions() {
    let directory = TempDir::new().unwrap();
    shell(
        directory.path(),
        "mkdir -p from/top/a/b; : > from/top/a/b/file; touch -d 2001-02-03 from/top; chmod 700 from/top
         tar --no-recursion -C from -cf tree.tar top top/a/b/file",
    );
    let root = folder(directory.path(), "root");
    if has_program("setfacl") {
        // A default ACL has the same effect as a umask, which is one of the whole process.
        shell(&root, "setfacl -d -m u::rwx,g::---,o::--- .");
    }
    from_tar(&directory.path().join("tree.tar"), &root).unwrap();
    assert_eq!(
        shell(&root, "stat -c %a top top/a top/a/b; date -r top +%F"),
        "700\n755\n755\n2001-02-03\n"
    );
}

/// A further name of a device that the system does not permit once ended the job.
#[test]
fn further_names_of_a_device_that_cannot_be_created_are_losses() {
    let directory = TempDir::new().unwrap();
    let archive = directory.path().join("devices.tar");
    let bytes = packed(&[
        entry(
            "dev/null",
            TreeEntryKind::CharacterDevice(DeviceNumber { major: 1, minor: 3 }),
        ),
        entry("dev/again", TreeEntryKind::HardLink(b"./dev/null".to_vec())),
        entry("third", TreeEntryKind::HardLink(b"dev/again".to_vec())),
        entry("file", TreeEntryKind::File),
    ]);
    write(&archive, &bytes);
    let root = folder(directory.path(), "root");
    // The right to create devices, which root may have, is one of a thread.
    let fill = || {
        let mut sets = rustix::thread::capabilities(None).unwrap();
        sets.effective.remove(rustix::thread::CapabilitySet::MKNOD);
        rustix::thread::set_capabilities(None, sets).unwrap();
        from_tar(&archive, &root).unwrap()
    };
    let report = std::thread::scope(|scope| scope.spawn(fill).join().unwrap());
    let lost: Vec<_> = report.losses.iter().map(|loss| loss.path.as_str()).collect();
    assert_eq!(
        lost.first_chunk::<3>(),
        Some(&["dev/null", "dev/again", "third"]),
        "{:?}",
        report.losses
    );
    assert_eq!((report.counts.file_count, report.counts.hard_link_count), (1, 0));
}
