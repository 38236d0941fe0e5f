//! Signatures with SSH keys, made and verified by the system's `ssh-keygen`.
//!
//! Administrators have such keys in files, in agents and on hardware tokens, and files of allowed signers, as for
//! git. The exit code of `ssh-keygen` decides whether a signature is valid. Its output is only shown to the user.
//!
//! Untrusted text never becomes an argument. A signature and the signed text are passed in a private file and on
//! standard input, and names come from the user's own file of allowed signers.
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
/// Limit on the bytes of a signature: one with a certificate of a large RSA key has some six thousand.
pub const SSH_SIGNATURE_BYTES_MAX: usize = 16 << 10;
/// Limit on the names of one key in a file of allowed signers that are tried.
const PRINCIPAL_COUNT_MAX: usize = 16;
/// Timeout of a verification, which takes milliseconds.
const CHECK_TIME_OUT: Duration = Duration::from_secs(30);
/// Timeout of a signature: the user of a hardware token has to find and touch it.
const SIGN_TIME_OUT: Duration = Duration::from_secs(120);

/// Why a signature could not be made or verified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SshSignatureError {
    /// `ssh-keygen` does not exist.
    #[error("there is no program ssh-keygen on this host")]
    NoProgram,
    /// `ssh-keygen` cannot be run, or a file for it cannot be written.
    #[error("cannot run ssh-keygen")]
    Io(#[source] std::io::Error),
    /// `ssh-keygen` did not sign.
    #[error("cannot sign with {}: {reason}", key.display())]
    NotSigned {
        /// The key.
        key: PathBuf,
        /// The message of ssh-keygen.
        reason: String,
    },
    /// A path that cannot be passed as an argument.
    #[error("the path {} is not UTF-8", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// A file of signers or revoked keys does not exist, or cannot be read.
    #[error("cannot read {}", path.display())]
    Signers {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
}

type Result<T> = std::result::Result<T, SshSignatureError>;

/// The source of a key's passphrase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassphraseFrom {
    /// No prompt: a key with a passphrase must be in an agent.
    AgentOnly,
    /// A prompt at the terminal.
    Terminal,
}

/// The accepted signers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedSigners {
    /// The file of allowed signers: names and their keys.
    pub signers: PathBuf,
    /// The revoked keys: a KRL, or one public key per line.
    pub revoked: Option<PathBuf>,
}

/// A text and its signature, both untrusted.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    /// The purpose of the signature, since the same key may sign for other purposes.
    pub namespace: &'a str,
    /// The text.
    pub text: &'a [u8],
    /// The signature.
    pub signature: &'a str,
    /// The claimed time of the signature, in seconds since 1970. Keys may be valid only for a limited time.
    pub time_s: i64,
}

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The signature is valid, and was made by an allowed signer.
    Good {
        /// The name in the file of allowed signers.
        signer: String,
        /// The fingerprint of the key.
        key: String,
    },
    /// The signature is valid for the text, but its signer is not allowed.
    NotAllowed {
        /// The fingerprint of the key.
        key: String,
        /// The reason.
        reason: String,
    },
    /// The key was revoked.
    Revoked {
        /// The fingerprint of the key.
        key: String,
    },
    /// The text does not have this signature.
    Bad {
        /// The message of ssh-keygen.
        reason: String,
    },
}

/// Makes and verifies signatures.
pub struct SshSignatures<'a> {
    clock: &'a dyn Clock,
    folder: PathBuf,
}

impl<'a> SshSignatures<'a> {
    /// `folder` is for temporary files of `ssh-keygen`; no other user may have access to it.
    pub fn new(clock: &'a dyn Clock, folder: PathBuf) -> Self {
        Self { clock, folder }
    }

    /// Signs `text` with the key at `key`: a private key, or the public key of a key in an agent.
    ///
    /// # Errors
    /// The key does not exist, or cannot be used to sign.
    pub fn sign(&self, key: &Path, namespace: &str, text: &[u8], passphrase: PassphraseFrom) -> Result<String> {
        let path = path_argument(key)?;
        let arguments = ["-Y", "sign", "-f", &path, "-n", namespace];
        let lines = match passphrase {
            PassphraseFrom::AgentOnly => {
                let called = self.call(&arguments, text, SIGN_TIME_OUT)?;
                if called.outcome != ProcessOutcome::Success {
                    return Err(not_signed(key, &called));
                }
                called.lines
            }
            PassphraseFrom::Terminal => match ask_at_terminal(PROGRAM, &arguments, text).map_err(of_start)? {
                Some(output) => output.lines().map(str::to_owned).collect(),
                None => {
                    return Err(SshSignatureError::NotSigned {
                        key: key.to_owned(),
                        reason: "see the message of ssh-keygen".to_owned(),
                    });
                }
            },
        };
        armoured(&lines).ok_or_else(|| SshSignatureError::NotSigned {
            key: key.to_owned(),
            reason: "ssh-keygen reports success, but prints no signature".to_owned(),
        })
    }

    /// Verifies a signature. Without allowed signers the best result is [`Verdict::NotAllowed`].
    ///
    /// # Errors
    /// `ssh-keygen` cannot be run, or the files of signers cannot be read. Defects of the signature are in the verdict.
    pub fn verify(&self, signed: &Signed<'_>, allowed: Option<&AllowedSigners>) -> Result<Verdict> {
        if !is_armoured(signed.signature) {
            return Ok(Verdict::Bad {
                reason: "it is not an SSH signature".to_owned(),
            });
        }
        let mut file = NamedTempFile::new_in(&self.folder).map_err(SshSignatureError::Io)?;
        file.write_all(signed.signature.as_bytes())
            .and_then(|()| file.flush())
            .map_err(SshSignatureError::Io)?;
        let signature = path_argument(file.path())?;
        let arguments = ["-Y", "check-novalidate", "-n", signed.namespace, "-s", &signature];
        let called = self.call(&arguments, signed.text, CHECK_TIME_OUT)?;
        if called.outcome != ProcessOutcome::Success {
            let reason = error_output(&called);
            return Ok(Verdict::Bad { reason });
        }
        let key = fingerprint(&called.lines);
        match allowed {
            Some(allowed) => self.verify_signer(signed, &signature, allowed, key),
            None => Ok(Verdict::NotAllowed {
                key,
                reason: "no file of allowed signers is given".to_owned(),
            }),
        }
    }

    fn verify_signer(
        &self,
        signed: &Signed<'_>,
        signature: &str,
        allowed: &AllowedSigners,
        key: String,
    ) -> Result<Verdict> {
        // If a file cannot be read, the answer would look like a verdict on the signature.
        let signers = readable(&allowed.signers)?;
        let revoked = allowed.revoked.as_deref().map(readable).transpose()?;
        let time = format!("verify-time={}", keygen_time(signed.time_s));
        let arguments = ["-Y", "find-principals", "-s", signature, "-f", &signers, "-O", &time];
        let found = self.call(&arguments, &[], CHECK_TIME_OUT)?;
        let not_allowed = |reason: &str| Verdict::NotAllowed {
            key: key.clone(),
            reason: reason.to_owned(),
        };
        if found.outcome != ProcessOutcome::Success {
            return Ok(not_allowed(
                "its key is not among the allowed signers, or not at that time",
            ));
        }
        let mut reason = String::new();
        let principals = found.lines.iter().map(|line| line.trim());
        for principal in principals.filter(|line| !line.is_empty()).take(PRINCIPAL_COUNT_MAX) {
            let arguments = [
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
                Some(revoked) => arguments.iter().copied().chain(["-r", revoked]).collect(),
                None => arguments.to_vec(),
            };
            let called = self.call(&with_revoked, signed.text, CHECK_TIME_OUT)?;
            if called.outcome == ProcessOutcome::Success {
                let signer = principal.to_owned();
                return Ok(Verdict::Good { signer, key });
            }
            if revoked.is_some()
                && self.call(&arguments, signed.text, CHECK_TIME_OUT)?.outcome == ProcessOutcome::Success
            {
                return Ok(Verdict::Revoked { key });
            }
            reason = error_output(&called);
        }
        Ok(not_allowed(&reason))
    }

    fn call(&self, arguments: &[&str], input: &[u8], time_out: Duration) -> Result<CallOutput> {
        let variables = [
            ("PATH", PROGRAM_PATH.to_owned()),
            ("LC_ALL", "C".to_owned()),
            // Times are passed without a zone, as its earlier versions require.
            ("TZ", "UTC".to_owned()),
            // The program for passphrase prompts returns no passphrase, so no prompt appears on a terminal or screen.
            ("SSH_ASKPASS", "/bin/false".to_owned()),
            ("SSH_ASKPASS_REQUIRE", "force".to_owned()),
        ];
        let call = Call {
            program: Path::new(PROGRAM),
            arguments,
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
        _ => error_output(called),
    };
    SshSignatureError::NotSigned {
        key: key.to_owned(),
        reason,
    }
}

/// Converts a path to an argument that cannot be interpreted as an option.
fn path_argument(path: &Path) -> Result<String> {
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
    path_argument(path)
}

/// The format of `verify-time`, such as `20261123205009`, in UTC.
fn keygen_time(time_s: i64) -> String {
    let (days, second) = (time_s.div_euclid(86_400), time_s.rem_euclid(86_400));
    // Converts days since 1970-01-01 to a Gregorian date, with years that begin in March.
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

/// The signature in the output; none if the output contains no signature.
fn armoured(lines: &[String]) -> Option<String> {
    let start = lines.iter().position(|line| line.trim_end() == BEGIN)?;
    let length = lines[start..].iter().position(|line| line.trim_end() == END)?;
    let mut text = lines[start..=start + length].join("\n");
    text.push('\n');
    is_armoured(&text).then_some(text)
}

/// Whether a text has the form of a signature: first and last line, base64 between them, and limited in size.
fn is_armoured(text: &str) -> bool {
    let body = text
        .strip_prefix(BEGIN)
        .and_then(|rest| rest.trim_end().strip_suffix(END));
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=\n".contains(&byte);
    text.len() <= SSH_SIGNATURE_BYTES_MAX && body.is_some_and(|body| body.bytes().all(is_base64))
}

/// Extracts `ED25519 SHA256:...` from `Good "namespace" signature with ED25519 key SHA256:...`.
fn fingerprint(lines: &[String]) -> String {
    let path_argument = lines
        .iter()
        .find_map(|line| line.rsplit_once(" with "))
        .map(|(_, key)| key.trim());
    path_argument.unwrap_or("an unknown key").replacen(" key ", " ", 1)
}

fn error_output(called: &CallOutput) -> String {
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

        fn verify(&self, text: &[u8], signature: &str, allowed: Option<&AllowedSigners>) -> Verdict {
            let signed = Signed {
                namespace: NAMESPACE,
                text,
                signature,
                time_s: 1_795_000_000,
            };
            self.signatures().verify(&signed, allowed).unwrap()
        }
    }

    fn allowed(signers: PathBuf) -> AllowedSigners {
        AllowedSigners { signers, revoked: None }
    }

    #[test]
    fn only_signatures_of_allowed_signers_are_good() {
        let keys = Keys::new();
        for kind in ["ed25519", "rsa"] {
            let key = keys.make(kind, kind, "");
            let signature = keys.sign(&key);
            let line = |before: &str| format!("{before} {}", keys.public(kind));
            let signers = allowed(keys.write("signers", &line("anna@example.com")));
            let verdict = keys.verify(TEXT, &signature, Some(&signers));
            assert!(
                matches!(&verdict, Verdict::Good { signer, key } if signer == "anna@example.com" && key.contains(" SHA256:")),
                "{verdict:?}"
            );
            assert!(matches!(
                keys.verify(b"other", &signature, Some(&signers)),
                Verdict::Bad { .. }
            ));
            assert!(matches!(
                keys.verify(TEXT, &signature, None),
                Verdict::NotAllowed { .. }
            ));
            for other in [
                "anna@example.com namespaces=\"git\"",
                "anna@example.com valid-before=\"20200101\"",
                "# anna@example.com",
            ] {
                let signers = allowed(keys.write("signers", &line(other)));
                let verdict = keys.verify(TEXT, &signature, Some(&signers));
                assert!(matches!(verdict, Verdict::NotAllowed { .. }), "{other}: {verdict:?}");
            }
            let revoked = AllowedSigners {
                signers: keys.write("signers", &line("anna@example.com")),
                revoked: Some(keys.path(&format!("{kind}.pub"))),
            };
            assert!(matches!(
                keys.verify(TEXT, &signature, Some(&revoked)),
                Verdict::Revoked { .. }
            ));
        }
    }

    /// A missing file must not look like a verdict on the signature, and a missing list of revoked keys must not look
    /// like an empty list.
    #[test]
    fn missing_files_of_signers_are_errors() {
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
            let error = keys.signatures().verify(&signed, Some(&allowed)).unwrap_err();
            assert!(matches!(error, SshSignatureError::Signers { .. }), "{error:?}");
        }
    }

    #[test]
    fn text_that_is_no_signature_is_not_passed_on() {
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
                matches!(keys.verify(TEXT, &hostile, None), Verdict::Bad { .. }),
                "{hostile:?}"
            );
        }
    }

    /// A prompt would hang for ever, or disturb a user.
    #[test]
    fn a_key_with_a_passphrase_is_an_error_without_a_prompt() {
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
    fn times_are_formatted_as_dates() {
        assert_eq!(keygen_time(0), "19700101000000");
        assert_eq!(keygen_time(951_782_399), "20000228235959");
        assert_eq!(keygen_time(951_782_400), "20000229000000");
        assert_eq!(keygen_time(1_795_467_009), "20261123205009");
        assert_eq!(keygen_time(-1), "19691231235959");
    }
}
