//! The JSON documents; `docs/json.md` describes them for users.

use holdfast_block::error_messages;
use serde::Serialize;

use super::Report;
use super::printable::printable_json;
use crate::errors::Error;
use crate::exit::Exit;

/// Version of the documents' schema. It is incremented when a field is removed or changes its meaning, not when one
/// is added.
pub const SCHEMA: u32 = 1;

/// The fields of every document.
#[derive(Serialize)]
struct Document<'a, R: ?Sized> {
    schema: u32,
    command: Option<&'a str>,
    status: &'static str,
    exit_code: i32,
    warnings: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    report: Option<&'a R>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorPart>,
}

/// What went wrong.
#[derive(Serialize)]
struct ErrorPart {
    kind: &'static str,
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
}

/// The document of a verb that has a report, as one line.
pub fn report_document<R: Report + ?Sized>(report: &R, exit: Exit, warnings: &[String]) -> Result<String, Error> {
    line(&Document {
        schema: SCHEMA,
        command: Some(report.command()),
        status: exit.status(),
        exit_code: exit.code().into(),
        warnings,
        report: Some(report),
        error: None,
    })
}

/// The document of a verb that failed without a report, as one line.
///
/// The exit code is that of the error, unless a signal ends the program.
pub fn error_document(
    command: Option<&str>,
    error: &Error,
    exit_code: i32,
    warnings: &[String],
) -> Result<String, Error> {
    let advice = error.advice();
    let mut causes = error_messages(error);
    let message = causes.remove(0);
    line(&Document::<()> {
        schema: SCHEMA,
        command,
        status: advice.exit.status(),
        exit_code,
        warnings,
        report: None,
        error: Some(ErrorPart {
            kind: advice.kind.word(),
            message,
            causes,
            hint: advice.hint,
        }),
    })
}

fn line(document: &impl Serialize) -> Result<String, Error> {
    let mut text = printable_json(serde_json::to_string(document).map_err(Error::Json)?);
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::{error_document, report_document};
    use crate::errors::Error;
    use crate::exit::Exit;
    use crate::output::{Page, Report};

    #[derive(Serialize)]
    struct Sizes {
        size_bytes: u64,
    }

    impl Report for Sizes {
        fn command(&self) -> &'static str {
            "image info"
        }
        fn human(&self, _page: &mut Page) {}
    }

    #[test]
    fn an_answer_is_one_line_with_everything_a_script_needs() {
        let warnings = ["disk \"a\" is odd".to_owned()];
        assert_eq!(
            report_document(&Sizes { size_bytes: u64::MAX }, Exit::Warnings, &warnings).unwrap(),
            concat!(
                r#"{"schema":1,"command":"image info","status":"warnings","exit_code":3,"#,
                r#""warnings":["disk \"a\" is odd"],"report":{"size_bytes":18446744073709551615}}"#,
                "\n"
            )
        );
    }

    #[test]
    fn an_error_has_its_causes_one_by_one() {
        let error = Error::File {
            action: "write",
            path: "/x".into(),
            source: std::io::Error::other("disk on fire"),
        };
        assert_eq!(
            error_document(Some("man"), &error, 1, &[]).unwrap(),
            concat!(
                r#"{"schema":1,"command":"man","status":"error","exit_code":1,"warnings":[],"#,
                r#""error":{"kind":"io","message":"write /x","causes":["disk on fire"],"hint":null}}"#,
                "\n"
            )
        );
    }
}
