//! Names of clones: one name, or many from a template.

use crate::errors::Error;

/// A larger count is probably a typing error.
const COUNT_MAX: u32 = 100_000;

/// What clones are called.
#[derive(Debug, clap::Args)]
pub(super) struct NameArgs {
    /// Name of the new machine, or file of the new image
    #[arg(value_name = "NAME", required_unless_present = "template")]
    name: Option<String>,
    /// Number of clones
    #[arg(long, value_name = "N", requires = "template", value_parser = clap::value_parser!(u32).range(1..=i64::from(COUNT_MAX)))]
    count: Option<u32>,
    /// Names of the clones, with n in braces for the number, or n:03 for three digits: web-{n:03}.qcow2
    #[arg(long = "name-template", value_name = "TEMPLATE", conflicts_with = "name")]
    template: Option<String>,
    /// Number of the first clone [default: 1]
    #[arg(long, value_name = "N", requires = "template")]
    first: Option<u32>,
}

impl NameArgs {
    /// All names.
    pub(super) fn all(&self) -> Result<Vec<String>, Error> {
        let Some(template) = &self.template else {
            let of_many = [("--count", self.count.is_some()), ("--first", self.first.is_some())];
            if let Some((option, _)) = of_many.iter().find(|(_, is_given)| *is_given) {
                return Err(Error::usage(
                    format!("{option} is for many clones, and one name is given"),
                    "say what all of them are called: --name-template 'web{n:02}.qcow2'",
                ));
            }
            return Ok(self.name.iter().cloned().collect());
        };
        let first = self.first.unwrap_or(1);
        let last = first.saturating_add(self.count.unwrap_or(1) - 1);
        (first..=last).map(|number| filled(template, number)).collect()
    }
}

/// The template with each placeholder replaced by `number`.
fn filled(template: &str, number: u32) -> Result<String, Error> {
    let (before, width, mut rest) = split(template)?;
    let mut name = format!("{before}{number:0width$}");
    while rest.contains("{n") {
        let (before, width, after) = split(rest)?;
        name = format!("{name}{before}{number:0width$}");
        rest = after;
    }
    Ok(name + rest)
}

/// The text before and after the placeholder of a template, and its minimum number of digits.
fn split(template: &str) -> Result<(&str, usize, &str), Error> {
    let wrong = || {
        Error::usage(
            format!("{template:?} does not say where the number goes"),
            "write {n} there, or {n:03} for three digits: web-{n}.qcow2",
        )
    };
    let (before, rest) = template.split_once("{n").ok_or_else(wrong)?;
    let (format, after) = rest.split_once('}').ok_or_else(wrong)?;
    let width = match format.strip_prefix(':') {
        None if format.is_empty() => 0,
        Some(digits) => digits.parse().ok().filter(|width| *width <= 20).ok_or_else(wrong)?,
        None => return Err(wrong()),
    };
    Ok((before, width, after))
}

#[cfg(test)]
mod tests {
    use super::{NameArgs, split};

    fn names(template: &str, count: u32, first: Option<u32>) -> Vec<String> {
        let args = NameArgs {
            name: None,
            count: Some(count),
            template: Some(template.to_owned()),
            first,
        };
        args.all().unwrap()
    }

    #[test]
    fn numbers_go_where_the_template_says() {
        assert_eq!(names("web-{n}.vdi", 3, None), ["web-1.vdi", "web-2.vdi", "web-3.vdi"]);
        assert_eq!(names("{n:03}", 2, Some(9)), ["009", "010"]);
        assert_eq!(names("{n}-{n:02}.vdi", 1, None), ["1-01.vdi"]);
        for wrong in ["web", "web{", "{n", "{n:x}", "{n3}", "{n:999}"] {
            assert!(split(wrong).is_err(), "{wrong}");
        }
    }
}
