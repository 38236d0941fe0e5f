//! Delivers notifications: by the host's mail system, or by HTTP requests with curl.
//!
//! Arguments of a program can be read by every user of the host, so they contain no secret: curl gets its whole
//! configuration on standard input.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _};
use std::path::Path;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::{Call, ProcessOutcome};
use holdfast_policy::config::Channel;
use serde_json::{Value, json};

use super::alerts::Notice;

/// Timeout of the program that delivers a notification.
const TIMEOUT: Duration = Duration::from_secs(45);
/// Timeout of curl.
const CURL_SECONDS: u32 = 30;
/// Maximum length of a message's text.
const TEXT_BYTES_MAX: usize = 16 << 10;
/// Maximum length of a token.
const TOKEN_BYTES_MAX: u64 = 4096;
/// Locations of the mail system's program.
const SENDMAIL: [&str; 3] = ["sendmail", "/usr/sbin/sendmail", "/usr/lib/sendmail"];

/// The content of a notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// A short description.
    pub subject: String,
    /// The details.
    pub text: String,
    /// Whether the notice reports an improvement.
    pub is_good: bool,
    /// The content for programs, as JSON.
    pub document: Value,
}

impl Message {
    /// The message of a notice from `host`, at `time`.
    pub fn new(notice: &Notice, host: &str, time: &str) -> Self {
        let text = cut(&format!(
            "{}\n\njob {} on {host}, {time}\n",
            notice.text.trim(),
            notice.job
        ));
        Self {
            subject: format!("[holdfast] {host}: {}", notice.subject),
            is_good: notice.is_good,
            document: json!({
                "schema": 1,
                "event": notice.event.word(),
                "is_good": notice.is_good,
                "host": host,
                "job": notice.job,
                "machine": notice.machine,
                "subject": notice.subject,
                "text": text,
                "time": time,
                "run": notice.run,
            }),
            text,
        }
    }
}

fn cut(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Delivers a message, in one attempt.
///
/// # Errors
/// The reason of the failure, as text.
pub fn deliver(channel: &Channel, message: &Message, withheld: &[String], clock: &dyn Clock) -> Result<(), String> {
    match channel {
        Channel::Mail { to, from, sendmail } => {
            let mail = mail(to, from.as_deref(), message);
            let programs = sendmail.as_deref().map_or(SENDMAIL.to_vec(), |program| vec![program]);
            let mut answer = Err("sendmail is not installed on this host: install a mail system".to_owned());
            for program in programs {
                match run_with_input(program, &["-t", "-oi"], &mail, withheld, clock) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(format!("{program}: {error}")),
                    Ok(handed) => {
                        answer = handed.map_err(|why| format!("{program}: {why}"));
                        break;
                    }
                }
            }
            answer
        }
        Channel::Webhook { url, token_file } => {
            let headers = ["Content-Type: application/json".to_owned()];
            let body = message.document.to_string();
            post(url, token_file.as_deref(), &headers, &body, withheld, clock)
        }
        Channel::Ntfy {
            url,
            token_file,
            priority,
        } => {
            let priority = priority.unwrap_or(if message.is_good { 2 } else { 4 });
            let headers = [
                "Content-Type: text/plain; charset=utf-8".to_owned(),
                format!("Title: {}", encoded_word(&message.subject)),
                format!("Priority: {priority}"),
            ];
            post(url, token_file.as_deref(), &headers, &message.text, withheld, clock)
        }
    }
}

/// Runs a program with `input`. An error contains the output of the program.
fn run_with_input(
    program: &str,
    arguments: &[&str],
    input: &[u8],
    withheld: &[String],
    clock: &dyn Clock,
) -> std::io::Result<Result<(), String>> {
    let call = Call {
        program: Path::new(program),
        arguments,
        variables: &[],
        withheld,
        input,
        time_out: TIMEOUT,
        is_stopped: &|| false,
    };
    let called = call.run(clock)?;
    Ok(match called.outcome {
        ProcessOutcome::Success => Ok(()),
        outcome => Err([outcome.to_string(), called.lines.join(" ")].join(": ")),
    })
}

/// Formats a mail for `sendmail -t`.
fn mail(to: &[String], from: Option<&str>, message: &Message) -> Vec<u8> {
    let from = from.map(|from| format!("From: {from}\n")).unwrap_or_default();
    let mut text = format!(
        "{from}To: {}\nSubject: {}\nAuto-Submitted: auto-generated\nMIME-Version: 1.0\n\
         Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: 8bit\n\n",
        to.join(", "),
        encoded_word(&message.subject),
    );
    for line in message.text.lines() {
        // Mails have a limited line length.
        let line: String = line.chars().filter(|c| !c.is_control()).take(240).collect();
        text.push_str(&line);
        text.push('\n');
    }
    text.into_bytes()
}

/// Encodes a text for a header of a mail or of a request: plain ASCII on one line is kept, other text is encoded by RFC
/// 2047.
fn encoded_word(text: &str) -> String {
    if text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        return text.to_owned();
    }
    // Encoded words have at most 75 characters; a character is never split.
    let mut words = vec![String::new()];
    for character in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        let mut encoded = String::new();
        for byte in character.to_string().bytes() {
            if byte.is_ascii_alphanumeric() {
                encoded.push(char::from(byte));
            } else {
                write!(encoded, "={byte:02X}").expect("writing to a string succeeds");
            }
        }
        match words.last_mut() {
            Some(word) if word.len() + encoded.len() <= 60 => word.push_str(&encoded),
            _ => words.push(encoded),
        }
    }
    let words: Vec<String> = words.iter().map(|word| format!("=?utf-8?Q?{word}?=")).collect();
    words.join(" ")
}

fn post(
    url: &str,
    token_file: Option<&str>,
    headers: &[String],
    body: &str,
    withheld: &[String],
    clock: &dyn Clock,
) -> Result<(), String> {
    let mut headers = headers.to_vec();
    let host = host_of(url);
    if let Some(path) = token_file {
        if url.starts_with("http:") && !is_this_host(host) {
            return Err(format!("{host}: a token is sent over https only"));
        }
        let token = read_token(path).map_err(|error| format!("read the token from {path}: {error}"))?;
        headers.push(format!("Authorization: Bearer {token}"));
    }
    let request = curl_request(url, &headers, body);
    // The first option disables .curlrc.
    match run_with_input("curl", &["-q", "--config", "-"], request.as_bytes(), withheld, clock) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err("curl is not installed on this host: install it".to_owned())
        }
        Err(error) => Err(format!("curl: {error}")),
        // The URL of many services contains the credentials of its user, so it is a secret.
        Ok(handed) => handed.map_err(|why| format!("{host}: {}", why.replace(url, host))),
    }
}

/// The host and port of a URL: the only part that may be shown.
fn host_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    authority.rsplit_once('@').map_or(authority, |(_, host)| host)
}

/// Whether requests to `host` stay on this host.
fn is_this_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost"
        || name
            .parse()
            .is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

/// The configuration of curl.
fn curl_request(url: &str, headers: &[String], body: &str) -> String {
    let mut text = format!(
        "silent\nshow-error\nfail\ngloboff\nmax-time = {CURL_SECONDS}\nproto = \"=http,https\"\noutput = \"/dev/null\"\nurl = {}\n",
        quoted(url)
    );
    for header in headers {
        writeln!(text, "header = {}", quoted(header)).expect("writing to a string succeeds");
    }
    writeln!(text, "data-raw = {}", quoted(body)).expect("writing to a string succeeds");
    text
}

/// Quotes a text for curl's configuration.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for character in text.chars() {
        match character {
            '\\' => quoted.push_str("\\\\"),
            '"' => quoted.push_str("\\\""),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            other if other.is_control() => quoted.push(' '),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

fn read_token(path: &str) -> std::io::Result<String> {
    let mut token = String::new();
    BufReader::new(File::open(path)?.take(TOKEN_BYTES_MAX)).read_line(&mut token)?;
    let token = token.trim();
    if token.is_empty() || token.contains(char::is_control) {
        return Err(std::io::Error::new(
            ErrorKind::InvalidData,
            "its first line is not a token",
        ));
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use holdfast_policy::config::Event;

    use holdfast_block::ManualClock;

    use super::{Message, Notice, curl_request, encoded_word, host_of, is_this_host, mail, post};

    fn message(subject: &str, text: &str) -> Message {
        let notice = Notice {
            event: Event::Failure,
            job: "nightly".to_owned(),
            machine: None,
            is_good: false,
            subject: subject.to_owned(),
            text: text.to_owned(),
            run: None,
        };
        Message::new(&notice, "host1", "2026-11-20T10:00:00Z")
    }

    #[test]
    fn output_of_a_job_cannot_inject_header_lines() {
        let message = message("größe\nBcc: x", "line\r\n.\nnext");
        let mail = String::from_utf8(mail(&["root".to_owned()], None, &message)).unwrap();
        let (head, body) = mail.split_once("\n\n").unwrap();
        assert_eq!(head.lines().count(), 6, "{head}");
        assert!(head.contains("Subject: =?utf-8?Q?"), "{head}");
        assert_eq!(body, "line\n.\nnext\n\njob nightly on host1, 2026-11-20T10:00:00Z\n");
        assert_eq!(encoded_word("plain text"), "plain text");
        let long = encoded_word(&"ä".repeat(100));
        assert!(long.split(' ').all(|word| word.len() <= 75), "{long}");
    }

    #[test]
    fn output_of_a_job_cannot_inject_curl_options() {
        let body = "\"\nurl = \"http://evil\"\\";
        let request = curl_request("https://x/[1]", &["A: b".to_owned()], body);
        assert_eq!(
            request.lines().filter(|line| line.starts_with("url")).count(),
            1,
            "{request}"
        );
        assert!(
            request.ends_with("data-raw = \"\\\"\\nurl = \\\"http://evil\\\"\\\\\"\n"),
            "{request}"
        );
    }

    /// The URL of a webhook and a token are secrets.
    #[test]
    fn of_an_address_the_host_is_shown_and_a_token_is_not_sent_in_the_clear() {
        for (url, host) in [
            ("https://chat.example/hooks/T0/SECRET", "chat.example"),
            ("http://user:secret@chat.example:8080?token=SECRET", "chat.example:8080"),
            ("https://[::1]:80/x", "[::1]:80"),
            ("https://chat.example#x@evil", "chat.example"),
        ] {
            assert_eq!(host_of(url), host);
        }
        for host in ["localhost", "localhost:80", "127.0.0.1:80", "[::1]:80"] {
            assert!(is_this_host(host), "{host}");
        }
        for host in ["chat.example", "localhost.evil", "127.0.0.1.evil:80", "10.0.0.1", ""] {
            assert!(!is_this_host(host), "{host}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::io::Write::write_all(&mut std::fs::File::create(&path).unwrap(), b"TOKEN").unwrap();
        let url = "http://chat.example/hooks/SECRET";
        let said = post(url, path.to_str(), &[], "", &[], &ManualClock::new()).unwrap_err();
        assert!(said.contains("chat.example") && said.contains("https"), "{said}");
        assert!(!said.contains("SECRET") && !said.contains("TOKEN"), "{said}");
    }

    #[test]
    fn a_message_has_an_end() {
        let message = message("x", &"ä".repeat(100_000));
        assert!(message.text.len() <= super::TEXT_BYTES_MAX);
    }
}
