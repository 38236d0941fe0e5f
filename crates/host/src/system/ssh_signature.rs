//! Signatures with SSH keys, made and checked by the system's `ssh-keygen`.
//!
//! Administrators have such keys, in files, in agents and on hardware, and files that say whose key is whose, as git uses them. Whether a
//! signature counts is what `ssh-keygen` answers with its exit code; its words are only shown.
//!
//! Nothing that a stranger has written becomes an argument: a signature and the text that it is of go to a private file and to standard
//! input, and names come from the file of allowed signers, which is ours.
//!
//! Source: ssh-keygen(1), ALLOWED SIGNERS; OpenSSH PROTOCOL.sshsig; OpenSSH 9.2.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock;
use tempfile::NamedTempFile;

use crate::system::process::{Call, CallOutput, PROGRAM_PATH, ProcessOutcome, ask_at_terminal};
use crate::system::trusted_files::why_untrusted;
use crate::system::waits::Wait;

const PROGRAM: &str = "ssh-keygen";
const BEGIN: &str = "-----BEGIN SSH SIGNATURE-----";
const END: &str = "-----END SSH SIGNATURE-----";
/// Bytes of a signature, at most: one with a certificate of a large RSA key has some six thousand.
pub const SSH_SIGNATURE_BYTES_MAX: usize = 16 << 10;
/// Names that one key may have in a file of allowed signers and that are tried, at most.
const PRINCIPAL_COUNT_MAX: usize = 16;
/// To check a signature takes milliseconds.
const CHECK_TIME_OUT: Duration = Duration::from_secs(30);
/// Whoever signs with a key on hardware has to find it, and to touch it.
const SIGN_TIME_OUT: Duration = Duration::from_secs(120);

/// Why there is no answer about a signature.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SshSignatureError {
    /// There is no such program.
    #[error("there is no program ssh-keygen on this host")]
    NoProgram,
    /// It cannot be run, or a file for it cannot be made.
    #[error("cannot run ssh-keygen")]
    Io(#[source] std::io::Error),
    /// It did not sign.
    #[error("nothing was signed with {}: {reason}", key.display())]
    NotSigned {
        /// The key.
        key: PathBuf,
        /// What ssh-keygen says.
        reason: String,
    },
    /// A path that cannot be said to it.
    #[error("the path {} is no text", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// A file that is to say whose signatures count is not there, or cannot be read.
    #[error("read {}", path.display())]
    Signers {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
}

type Result<T> = std::result::Result<T, SshSignatureError>;

/// Where the passphrase of a key comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassphraseFrom {
    /// No prompt: a key with a passphrase has to be in an agent.
    AgentOnly,
    /// A prompt at the terminal.
    Terminal,
}

/// The accepted signers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedSigners {
    /// The file that says whose key is whose.
    pub signers: PathBuf,
    /// A list of keys that count no more: a KRL, or public keys by the line.
    pub revoked: Option<PathBuf>,
}

/// A text and a signature of it, as somebody hands them over.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    /// What the signature is for: the same key signs other things elsewhere.
    pub namespace: &'a str,
    /// The text.
    pub text: &'a [u8],
    /// The signature.
    pub signature: &'a str,
    /// When it says that it was made, in seconds since 1970: keys may count for a while only.
    pub time_s: i64,
}

/// What a signature is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is of somebody whose signatures count.
    Good {
        /// Who, as the file of allowed signers says it.
        signer: String,
        /// The key, by its fingerprint.
        key: String,
    },
    /// It is of the text, and of nobody whose signatures count.
    NotAllowed {
        /// The key, by its fingerprint.
        key: String,
        /// Why not.
        reason: String,
    },
    /// It is of a key that was revoked.
    Revoked {
        /// The key, by its fingerprint.
        key: String,
    },
    /// It is not a signature of this text.
    Bad {
        /// What ssh-keygen says.
        reason: String,
    },
}

/// Makes and checks signatures.
pub struct SshSignatures<'a> {
    clock: &'a dyn Clock,
    folder: PathBuf,
}

impl<'a> SshSignatures<'a> {
    /// Files that `ssh-keygen` reads lie in `folder` for a moment, where nobody else can look into them.
    pub fn new(clock: &'a dyn Clock, folder: PathBuf) -> Self {
        Self { clock, folder }
    }

    /// Signs `text` with the key at `key`: a private key, or the public one of a key in an agent.
    ///
    /// # Errors
    /// The key is not there, or does not sign.
    pub fn sign(&self, key: &Path, namespace: &str, text: &[u8], passphrase: PassphraseFrom) -> Result<String> {
        let path = said(key)?;
        let words = ["-Y", "sign", "-f", &path, "-n", namespace];
        let lines = match passphrase {
            PassphraseFrom::AgentOnly => {
                let called = self.call(&words, text, SIGN_TIME_OUT)?;
                if called.outcome != ProcessOutcome::Success {
                    return Err(not_signed(key, &called));
                }
                called.lines
            }
            PassphraseFrom::Terminal => match ask_at_terminal(PROGRAM, &words, text).map_err(of_start)? {
                Some(output) => output.lines().map(str::to_owned).collect(),
                None => {
                    return Err(SshSignatureError::NotSigned {
                        key: key.to_owned(),
                        reason: "ssh-keygen has said why".to_owned(),
                    });
                }
            },
        };
        armoured(&lines).ok_or_else(|| SshSignatureError::NotSigned {
            key: key.to_owned(),
            reason: "ssh-keygen says that it went well, and gives no signature".to_owned(),
        })
    }

    /// Judges a signature. Without anybody whose signatures count, the best that comes out is [`Verdict::NotAllowed`].
    ///
    /// # Errors
    /// `ssh-keygen` cannot be asked, or the files about signers cannot be read. What is wrong with the signature is in the verdict.
    pub fn judge(&self, signed: &Signed<'_>, allowed: Option<&AllowedSigners>) -> Result<Verdict> {
        if !is_armoured(signed.signature) {
            return Ok(Verdict::Bad {
                reason: "it does not look like a signature".to_owned(),
            });
        }
        let mut file = NamedTempFile::new_in(&self.folder).map_err(SshSignatureError::Io)?;
        file.write_all(signed.signature.as_bytes())
            .and_then(|()| file.flush())
            .map_err(SshSignatureError::Io)?;
        let signature = said(file.path())?;
        let words = ["-Y", "check-novalidate", "-n", signed.namespace, "-s", &signature];
        let called = self.call(&words, signed.text, CHECK_TIME_OUT)?;
        if called.outcome != ProcessOutcome::Success {
            let reason = complaint(&called);
            return Ok(Verdict::Bad { reason });
        }
        let key = fingerprint(&called.lines);
        match allowed {
            Some(allowed) => self.judge_signer(signed, &signature, allowed, key),
            None => Ok(Verdict::NotAllowed {
                key,
                reason: "no file of allowed signers is given".to_owned(),
            }),
        }
    }

    fn judge_signer(
        &self,
        signed: &Signed<'_>,
        signature: &str,
        allowed: &AllowedSigners,
        key: String,
    ) -> Result<Verdict> {
        // An answer about a file that cannot be read would look like one about the signature.
        let signers = readable(&allowed.signers)?;
        let revoked = allowed.revoked.as_deref().map(readable).transpose()?;
        let time = format!("verify-time={}", keygen_time(signed.time_s));
        let words = ["-Y", "find-principals", "-s", signature, "-f", &signers, "-O", &time];
        let found = self.call(&words, &[], CHECK_TIME_OUT)?;
        let not_allowed = |reason: &str| Verdict::NotAllowed {
            key: key.clone(),
            reason: reason.to_owned(),
        };
        if found.outcome != ProcessOutcome::Success {
            return Ok(not_allowed(
                "its key is not among the allowed signers, or not for that time",
            ));
        }
        let mut reason = String::new();
        let principals = found.lines.iter().map(|line| line.trim());
        for principal in principals.filter(|line| !line.is_empty()).take(PRINCIPAL_COUNT_MAX) {
            let words = [
                "-Y",
                "verify",
                "-f",
                &signers,
                "-I",
                principal,
                "-n",
                signed.namespace,
                "-s",
                signature,
                "-O",
                &time,
            ];
            let with_revoked: Vec<&str> = match &revoked {
                Some(revoked) => words.iter().copied().chain(["-r", revoked]).collect(),
                None => words.to_vec(),
            };
            let called = self.call(&with_revoked, signed.text, CHECK_TIME_OUT)?;
            if called.outcome == ProcessOutcome::Success {
                let signer = principal.to_owned();
                return Ok(Verdict::Good { signer, key });
            }
            if revoked.is_some() && self.call(&words, signed.text, CHECK_TIME_OUT)?.outcome == ProcessOutcome::Success {
                return Ok(Verdict::Revoked { key });
            }
            reason = complaint(&called);
        }
        Ok(not_allowed(&reason))
    }

    fn call(&self, words: &[&str], input: &[u8], time_out: Duration) -> Result<CallOutput> {
        let variables = [
            ("PATH", PROGRAM_PATH.to_owned()),
            ("LC_ALL", "C".to_owned()),
            // Times are said to it without a zone, as its earlier versions want them.
            ("TZ", "UTC".to_owned()),
            // Whoever would be asked for a passphrase is a program that gives none: nobody's terminal or screen is disturbed.
            ("SSH_ASKPASS", "/bin/false".to_owned()),
            ("SSH_ASKPASS_REQUIRE", "force".to_owned()),
        ];
        let call = Call {
            program: Path::new(PROGRAM),
            arguments: words,
            variables: &variables,
            withheld: &[],
            input,
            time_out,
            is_stopped: &|| false,
        };
        let _wait = Wait::for_answer(PROGRAM);
        call.run(self.clock).map_err(of_start)
    }
}

fn of_start(source: std::io::Error) -> SshSignatureError {
    match source.kind() {
        std::io::ErrorKind::NotFound => SshSignatureError::NoProgram,
        _ => SshSignatureError::Io(source),
    }
}

fn not_signed(key: &Path, called: &CallOutput) -> SshSignatureError {
    let reason = match called.outcome {
        ProcessOutcome::TimedOut => called.outcome.to_string(),
        _ => complaint(called),
    };
    SshSignatureError::NotSigned {
        key: key.to_owned(),
        reason,
    }
}

/// A path as a word that is no option.
fn said(path: &Path) -> Result<String> {
    let whole = std::path::absolute(path).map_err(SshSignatureError::Io)?;
    let text = whole
        .to_str()
        .ok_or_else(|| SshSignatureError::Path { path: path.to_owned() })?;
    Ok(text.to_owned())
}

fn readable(path: &Path) -> Result<String> {
    let failed = |source| SshSignatureError::Signers {
        path: path.to_owned(),
        source,
    };
    if let Some(why) = why_untrusted(path).map_err(failed)? {
        return Err(failed(std::io::Error::new(std::io::ErrorKind::PermissionDenied, why)));
    }
    std::fs::File::open(path).map_err(failed)?;
    said(path)
}

/// `20261123205009`: what `verify-time` takes, here in UTC.
fn keygen_time(time_s: i64) -> String {
    let (days, second) = (time_s.div_euclid(86_400), time_s.rem_euclid(86_400));
    // Days since 1970-01-01 as a date of the Gregorian calendar, counted in years that begin with March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year:04}{month:02}{day:02}{hour:02}{minute:02}{:02}", second % 60)
}

/// The signature among what was said; none where there is none.
fn armoured(lines: &[String]) -> Option<String> {
    let start = lines.iter().position(|line| line.trim_end() == BEGIN)?;
    let length = lines[start..].iter().position(|line| line.trim_end() == END)?;
    let mut text = lines[start..=start + length].join("\n");
    text.push('\n');
    is_armoured(&text).then_some(text)
}

/// Whether it can be a signature: its first and last lines, base64 between them, and not too much of it.
fn is_armoured(text: &str) -> bool {
    let body = text
        .strip_prefix(BEGIN)
        .and_then(|rest| rest.trim_end().strip_suffix(END));
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=\n".contains(&byte);
    text.len() <= SSH_SIGNATURE_BYTES_MAX && body.is_some_and(|body| body.bytes().all(is_base64))
}

/// `ED25519 SHA256:...` of `Good "namespace" signature with ED25519 key SHA256:...`.
fn fingerprint(lines: &[String]) -> String {
    let said = lines
        .iter()
        .find_map(|line| line.rsplit_once(" with "))
        .map(|(_, key)| key.trim());
    said.unwrap_or("an unknown key").replacen(" key ", " ", 1)
}

fn complaint(called: &CallOutput) -> String {
    let lines = called
        .lines
        .iter()
        .map(|line| line.trim())
        .filter(|line| !line.is_empty());
    let text = lines.collect::<Vec<_>>().join("; ");
    if text.is_empty() {
        called.outcome.to_string()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use holdfast_block::SystemClock;
    use tempfile::TempDir;

    use super::{AllowedSigners, PassphraseFrom, Signed, SshSignatureError, SshSignatures, Verdict, keygen_time};
    use crate::system::process::Call;

    const NAMESPACE: &str = "holdfast-test";
    const TEXT: &[u8] = b"what is signed\n";

    struct Keys {
        folder: TempDir,
        clock: SystemClock,
    }

    impl Keys {
        fn new() -> Self {
            Self {
                folder: tempfile::tempdir().unwrap(),
                clock: SystemClock::new(),
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn write(&self, name: &str, text: &str) -> PathBuf {
            let mut file = std::fs::File::create(self.path(name)).unwrap();
            std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
            self.path(name)
        }

        fn make(&self, name: &str, kind: &str, passphrase: &str) -> PathBuf {
            let path = self.path(name);
            let call = Call {
                program: Path::new("ssh-keygen"),
                arguments: &["-q", "-t", kind, "-N", passphrase, "-f", path.to_str().unwrap()],
                variables: &[],
                withheld: &[],
                input: b"",
                time_out: Duration::from_secs(60),
                is_stopped: &|| false,
            };
            call.run(&self.clock).unwrap();
            path
        }

        fn public(&self, name: &str) -> String {
            std::fs::read_to_string(self.path(&format!("{name}.pub"))).unwrap()
        }

        fn signatures(&self) -> SshSignatures<'_> {
            SshSignatures::new(&self.clock, self.folder.path().to_owned())
        }

        fn sign(&self, key: &Path) -> String {
            let signatures = self.signatures();
            signatures
                .sign(key, NAMESPACE, TEXT, PassphraseFrom::AgentOnly)
                .unwrap()
        }

        fn judge(&self, text: &[u8], signature: &str, allowed: Option<&AllowedSigners>) -> Verdict {
            let signed = Signed {
                namespace: NAMESPACE,
                text,
                signature,
                time_s: 1_795_000_000,
            };
            self.signatures().judge(&signed, allowed).unwrap()
        }
    }

    fn allowed(signers: PathBuf) -> AllowedSigners {
        AllowedSigners { signers, revoked: None }
    }

    #[test]
    fn signatures_of_allowed_signers_are_good_and_others_say_why_not() {
        let keys = Keys::new();
        for kind in ["ed25519", "rsa"] {
            let key = keys.make(kind, kind, "");
            let signature = keys.sign(&key);
            let line = |before: &str| format!("{before} {}", keys.public(kind));
            let signers = allowed(keys.write("signers", &line("anna@example.com")));
            let verdict = keys.judge(TEXT, &signature, Some(&signers));
            assert!(
                matches!(&verdict, Verdict::Good { signer, key } if signer == "anna@example.com" && key.contains(" SHA256:")),
                "{verdict:?}"
            );
            assert!(matches!(
                keys.judge(b"other", &signature, Some(&signers)),
                Verdict::Bad { .. }
            ));
            assert!(matches!(keys.judge(TEXT, &signature, None), Verdict::NotAllowed { .. }));
            for other in [
                "anna@example.com namespaces=\"git\"",
                "anna@example.com valid-before=\"20200101\"",
                "# anna@example.com",
            ] {
                let signers = allowed(keys.write("signers", &line(other)));
                let verdict = keys.judge(TEXT, &signature, Some(&signers));
                assert!(matches!(verdict, Verdict::NotAllowed { .. }), "{other}: {verdict:?}");
            }
            let revoked = AllowedSigners {
                signers: keys.write("signers", &line("anna@example.com")),
                revoked: Some(keys.path(&format!("{kind}.pub"))),
            };
            assert!(matches!(
                keys.judge(TEXT, &signature, Some(&revoked)),
                Verdict::Revoked { .. }
            ));
        }
    }

    /// An answer about a missing file must not be taken for one about the signature, nor a missing list of revoked keys for an empty one.
    #[test]
    fn files_about_signers_that_are_missing_are_errors() {
        let keys = Keys::new();
        let signature = keys.sign(&keys.make("key", "ed25519", ""));
        let present = keys.write("signers", &format!("anna {}", keys.public("key")));
        let missing = keys.path("missing");
        for allowed in [
            allowed(missing.clone()),
            AllowedSigners {
                signers: present,
                revoked: Some(missing),
            },
        ] {
            let signed = Signed {
                namespace: NAMESPACE,
                text: TEXT,
                signature: &signature,
                time_s: 0,
            };
            let error = keys.signatures().judge(&signed, Some(&allowed)).unwrap_err();
            assert!(matches!(error, SshSignatureError::Signers { .. }), "{error:?}");
        }
    }

    #[test]
    fn what_is_no_signature_is_handed_to_nobody() {
        let keys = Keys::new();
        let good = keys.sign(&keys.make("key", "ed25519", ""));
        for hostile in [
            String::new(),
            "-f /etc/passwd".to_owned(),
            good.replace('\n', "\u{0}"),
            format!("{good}trailing"),
            good.replacen("U1NIU0lH", "", 1),
            good.repeat(200),
        ] {
            assert!(
                matches!(keys.judge(TEXT, &hostile, None), Verdict::Bad { .. }),
                "{hostile:?}"
            );
        }
    }

    /// It would hang for ever, or disturb somebody, where it asked.
    #[test]
    fn a_key_that_needs_a_passphrase_is_an_error_where_nobody_is_to_be_asked() {
        let keys = Keys::new();
        let key = keys.make("key", "ed25519", "open sesame");
        let error = keys
            .signatures()
            .sign(&key, NAMESPACE, TEXT, PassphraseFrom::AgentOnly)
            .unwrap_err();
        assert!(
            matches!(&error, SshSignatureError::NotSigned { reason, .. } if !reason.is_empty()),
            "{error:?}"
        );
        let error = keys
            .signatures()
            .sign(Path::new("-missing"), NAMESPACE, TEXT, PassphraseFrom::AgentOnly);
        assert!(error.unwrap_err().to_string().contains("-missing"));
    }

    #[test]
    fn times_are_said_as_dates() {
        assert_eq!(keygen_time(0), "19700101000000");
        assert_eq!(keygen_time(951_782_399), "20000228235959");
        assert_eq!(keygen_time(951_782_400), "20000229000000");
        assert_eq!(keygen_time(1_795_467_009), "20261123205009");
        assert_eq!(keygen_time(-1), "19691231235959");
    }
}
