use std::cell::RefCell;
use std::fs::{File, Permissions};
use std::io::{Error, ErrorKind, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::{Password, PasswordSource, PasswordUse};
use crate::args::{PasswordArgs, ToPasswordArgs};
use crate::errors::{PASSWORD_BYTES_MAX, PasswordError};
use crate::process::environment::Environment;
use crate::process::terminal::Prompt;

/// A simulated user who types the given lines.
struct Person(RefCell<Vec<&'static str>>);

impl Prompt for Person {
    fn secret(&self, _text: &str) -> std::io::Result<Zeroizing<Vec<u8>>> {
        let mut lines = self.0.borrow_mut();
        if lines.is_empty() {
            return Err(Error::from(ErrorKind::NotFound));
        }
        Ok(Zeroizing::new(lines.remove(0).as_bytes().to_vec()))
    }
}

fn absent() -> Person {
    Person(RefCell::default())
}

fn args(file: Option<&str>, command: Option<&str>) -> PasswordArgs {
    PasswordArgs {
        password_file: file.map(PathBuf::from),
        password_command: command.map(Into::into),
        key_slot: None,
    }
}

fn choose(args: &PasswordArgs, variables: &[(&str, &str)]) -> Result<PasswordSource, PasswordError> {
    PasswordSource::choose(args, &variables.iter().copied().collect::<Environment>())
}

fn read(source: &PasswordSource) -> (Result<Vec<u8>, PasswordError>, Vec<String>) {
    let mut warnings = Vec::new();
    let password = source.read(PasswordUse::Existing, &absent(), &mut |text| {
        warnings.push(text.to_owned());
    });
    (password.map(|password| password.as_bytes().to_vec()), warnings)
}

fn file_of(folder: &Path, bytes: &[u8], mode: u32) -> PasswordSource {
    let path = folder.join("password");
    let mut file = File::create(&path).unwrap();
    file.write_all(bytes).unwrap();
    file.set_permissions(Permissions::from_mode(mode)).unwrap();
    PasswordSource::File(path)
}

#[test]
fn options_precede_environment_credential_and_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let credentials = folder.path().to_str().unwrap();
    let credential = folder.path().join("holdfast.password");
    let systemd = ("CREDENTIALS_DIRECTORY", credentials);
    assert!(choose(&args(None, None), &[systemd]).unwrap() == PasswordSource::Prompt);
    File::create(&credential).unwrap();
    assert!(choose(&args(None, None), &[systemd]).unwrap() == PasswordSource::Credential(credential));
    for (name, expected) in [
        ("HOLDFAST_PASSWORD_FILE", PasswordSource::File("x".into())),
        ("HOLDFAST_PASSWORD_COMMAND", PasswordSource::Command("x".into())),
    ] {
        assert!(choose(&args(None, None), &[systemd, (name, "x")]).unwrap() == expected);
    }
    let given = choose(&args(None, None), &[systemd, ("HOLDFAST_PASSWORD", "x")]).unwrap();
    assert_eq!(read(&given).0.unwrap(), b"x");
    let all = [("HOLDFAST_PASSWORD", "x"), ("HOLDFAST_PASSWORD_FILE", "x"), systemd];
    assert!(choose(&args(Some("f"), None), &all).unwrap() == PasswordSource::File("f".into()));
    assert!(choose(&args(None, Some("c")), &all).unwrap() == PasswordSource::Command("c".into()));
}

/// A password for one repository is never tried on the other.
#[test]
fn a_copy_target_has_separate_password_sources() {
    let folder = tempfile::tempdir().unwrap();
    let credential = folder.path().join("holdfast.to-password");
    File::create(folder.path().join("holdfast.password")).unwrap();
    let of_the_first = [
        ("CREDENTIALS_DIRECTORY", folder.path().to_str().unwrap()),
        ("HOLDFAST_PASSWORD", "x"),
    ];
    let choose = |file: Option<&str>, more: &[(&str, &str)]| {
        let args = ToPasswordArgs {
            to_password_file: file.map(PathBuf::from),
            to_password_command: None,
        };
        let variables = of_the_first.iter().chain(more).copied();
        PasswordSource::choose_to(&args, &variables.collect::<Environment>())
    };
    assert!(choose(None, &[]).unwrap() == PasswordSource::Prompt);
    File::create(&credential).unwrap();
    assert!(choose(None, &[]).unwrap() == PasswordSource::Credential(credential));
    let file = ("HOLDFAST_TO_PASSWORD_FILE", "f");
    assert!(choose(None, &[file]).unwrap() == PasswordSource::File("f".into()));
    let command = ("HOLDFAST_TO_PASSWORD_COMMAND", "c");
    assert!(choose(None, &[command]).unwrap() == PasswordSource::Command("c".into()));
    let given = choose(None, &[("HOLDFAST_TO_PASSWORD", "y")]).unwrap();
    assert_eq!(read(&given).0.unwrap(), b"y");
    assert!(choose(Some("g"), &[file]).unwrap() == PasswordSource::File("g".into()));
    assert!(choose(None, &[file, command]).is_err());
}

#[test]
fn two_password_sources_are_refused() {
    assert!(matches!(
        choose(&args(Some("f"), Some("c")), &[]),
        Err(PasswordError::Ambiguous { .. })
    ));
    let error = choose(
        &args(None, None),
        &[("HOLDFAST_PASSWORD", "x"), ("HOLDFAST_PASSWORD_FILE", "x")],
    )
    .err()
    .unwrap();
    assert_eq!(
        error.to_string(),
        "HOLDFAST_PASSWORD_FILE and HOLDFAST_PASSWORD are both given, and only one can hold the password"
    );
}

#[test]
fn the_first_line_of_a_file_without_its_line_end_is_the_password() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [
        &b"pass word"[..],
        b"pass word\n",
        b"pass word\r\n",
        b"pass word\nmore\n",
    ] {
        let (password, warnings) = read(&file_of(folder.path(), bytes, 0o600));
        assert_eq!(password.unwrap(), b"pass word");
        assert_eq!(warnings, [""; 0]);
    }
    let (password, _) = read(&file_of(folder.path(), b"\xff\x00 x \n", 0o600));
    assert_eq!(password.unwrap(), b"\xff\x00 x ");
}

#[test]
fn a_file_that_others_can_read_or_write_is_used_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    for mode in [0o604, 0o644, 0o640, 0o620, 0o602] {
        let (password, warnings) = read(&file_of(folder.path(), b"x\n", mode));
        assert_eq!(password.unwrap(), b"x");
        assert!(warnings[0].contains(&format!("mode {mode:03o}")), "{warnings:?}");
    }
    for mode in [0o600, 0o400] {
        assert_eq!(read(&file_of(folder.path(), b"x\n", mode)).1, [""; 0]);
    }
}

#[test]
fn an_empty_or_overlong_line_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [&b""[..], b"\n", b"\nsecond\n", b"\r\n"] {
        let (password, _) = read(&file_of(folder.path(), bytes, 0o600));
        assert!(matches!(password, Err(PasswordError::Empty { .. })));
    }
    let longest = vec![b'x'; PASSWORD_BYTES_MAX];
    let (password, _) = read(&file_of(folder.path(), &longest, 0o600));
    assert_eq!(password.unwrap(), longest);
    let (password, _) = read(&file_of(folder.path(), &[&longest[..], b"x"].concat(), 0o600));
    assert!(matches!(password, Err(PasswordError::TooLong { .. })));
    let (password, _) = read(&PasswordSource::File("/dev/zero".into()));
    assert!(matches!(password, Err(PasswordError::TooLong { .. })));
    let (password, _) = read(&PasswordSource::File(folder.path().join("absent")));
    assert!(matches!(password, Err(PasswordError::File { .. })));
}

#[test]
fn the_first_line_of_a_command_is_the_password() {
    let run = |command: &str| read(&PasswordSource::Command(command.into())).0;
    assert_eq!(run("echo 'pass word'; echo more").unwrap(), b"pass word");
    assert!(matches!(
        run("echo x; exit 3"),
        Err(PasswordError::CommandFailed { .. })
    ));
    assert!(matches!(run("true"), Err(PasswordError::Empty { .. })));
}

#[test]
fn a_new_password_is_typed_twice() {
    let typed = |lines: &[&'static str], password_use| {
        let person = Person(RefCell::new(lines.to_vec()));
        PasswordSource::Prompt.read(password_use, &person, &mut |_| {})
    };
    assert_eq!(typed(&["a"], PasswordUse::Existing).unwrap().as_bytes(), b"a");
    assert_eq!(typed(&["a", "a"], PasswordUse::New).unwrap().as_bytes(), b"a");
    assert!(matches!(
        typed(&["a", "b"], PasswordUse::New),
        Err(PasswordError::Mismatch)
    ));
    assert!(matches!(
        typed(&[""], PasswordUse::Existing),
        Err(PasswordError::Empty { .. })
    ));
    assert!(matches!(
        typed(&[], PasswordUse::Existing),
        Err(PasswordError::NoTerminal)
    ));
}

#[test]
fn a_password_is_hidden_in_debug_output() {
    let password = Password::from_line(Zeroizing::new(b"secret".to_vec()), "test").unwrap();
    assert_eq!(format!("{password:?}"), "Password(..)");
}
