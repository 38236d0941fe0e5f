//! The expressions of `get_all_records_where`: `field "name__label" = "x" and not (true)`.
//!
//! Source: `ocaml/database/db_filter_lex.mll` and `db_filter_parse.mly`. `and` and `or` are left-associative and have
//! the same precedence. A field that the database writes with two underscores may be written with two or with one.

use serde_json::Value;

use crate::database::Record;

/// Limit of the nesting of parentheses and `not`.
const DEPTH_MAX: usize = 50;

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Word(&'static str),
    Literal(String),
}

/// One side of an equation.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Operand {
    Field(String),
    Literal(String),
}

/// A condition on a record.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Filter {
    Constant(bool),
    Equal(Box<[Operand; 2]>),
    Not(Box<Filter>),
    And(Box<[Filter; 2]>),
    Or(Box<[Filter; 2]>),
}

impl Filter {
    /// Parses an expression; `None` if it is invalid.
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut tokens = tokens(text)?;
        tokens.reverse();
        let filter = expression(&mut tokens, 0)?;
        tokens.is_empty().then_some(filter)
    }

    /// Whether `record` satisfies the condition.
    pub(super) fn holds(&self, record: &Record) -> bool {
        match self {
            Self::Constant(constant) => *constant,
            Self::Equal(sides) => sides[0].value(record) == sides[1].value(record),
            Self::Not(filter) => !filter.holds(record),
            Self::And(filters) => filters[0].holds(record) && filters[1].holds(record),
            Self::Or(filters) => filters[0].holds(record) || filters[1].holds(record),
        }
    }
}

impl Operand {
    fn value(&self, record: &Record) -> Option<String> {
        match self {
            Self::Literal(literal) => Some(literal.clone()),
            Self::Field(field) => {
                let value = record.get(field).or_else(|| record.get(&field.replace("__", "_")))?;
                Some(match value {
                    Value::String(text) => text.clone(),
                    value => value.to_string(),
                })
            }
        }
    }
}

fn tokens(text: &str) -> Option<Vec<Token>> {
    const WORDS: [&str; 9] = ["=", "true", "false", "(", ")", "field", "and", "or", "not"];
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        if let Some(literal) = rest.strip_prefix('"') {
            let (literal, after) = literal.split_once('"')?;
            tokens.push(Token::Literal(literal.to_owned()));
            rest = after.trim_start();
        } else {
            let word = WORDS.iter().find(|word| rest.starts_with(**word))?;
            tokens.push(Token::Word(word));
            rest = rest[word.len()..].trim_start();
        }
    }
    Some(tokens)
}

/// Parses an expression from the end of `tokens`, which are in reverse order.
fn expression(tokens: &mut Vec<Token>, depth: usize) -> Option<Filter> {
    let mut left = term(tokens, depth)?;
    loop {
        let is_and = match tokens.last() {
            Some(Token::Word("and")) => true,
            Some(Token::Word("or")) => false,
            _ => return Some(left),
        };
        tokens.pop();
        let both = Box::new([left, term(tokens, depth)?]);
        left = if is_and { Filter::And(both) } else { Filter::Or(both) };
    }
}

fn term(tokens: &mut Vec<Token>, depth: usize) -> Option<Filter> {
    if depth > DEPTH_MAX {
        return None;
    }
    match tokens.last()? {
        Token::Word("not") => {
            tokens.pop();
            Some(Filter::Not(Box::new(term(tokens, depth + 1)?)))
        }
        Token::Word("(") => {
            tokens.pop();
            let inner = expression(tokens, depth + 1)?;
            (tokens.pop()? == Token::Word(")")).then_some(inner)
        }
        Token::Word(constant @ ("true" | "false")) => {
            let constant = *constant == "true";
            tokens.pop();
            Some(Filter::Constant(constant))
        }
        _ => {
            let left = operand(tokens)?;
            (tokens.pop()? == Token::Word("=")).then_some(())?;
            Some(Filter::Equal(Box::new([left, operand(tokens)?])))
        }
    }
}

fn operand(tokens: &mut Vec<Token>) -> Option<Operand> {
    let operand = match tokens.pop()? {
        Token::Literal(literal) => Operand::Literal(literal),
        Token::Word("field") => match tokens.pop()? {
            Token::Literal(field) => Operand::Field(field),
            Token::Word(_) => return None,
        },
        Token::Word(_) => return None,
    };
    Some(operand)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Filter;

    #[test]
    fn expressions_hold_or_not() {
        let record = json!({"is_a_snapshot": false, "name_label": "web", "uuid": "1"});
        let record = record.as_object().unwrap();
        for (text, holds) in [
            ("true", true),
            (r#"field "is_a_snapshot" = "false""#, true),
            (r#"field "name__label" = "web" and field "uuid" = "2""#, false),
            (r#"field "uuid" = "2" or (not (field "name_label"="db"))"#, true),
            (r#""a" = "a""#, true),
        ] {
            assert_eq!(Filter::read(text).unwrap().holds(record), holds, "{text}");
        }
    }

    #[test]
    fn malformed_expressions_are_refused() {
        for text in [
            "",
            "field",
            r#"field "a""#,
            r#"field "a" = "b" and"#,
            "(true",
            "true)",
            "maybe",
            "\"open",
        ] {
            assert!(Filter::read(text).is_none(), "{text}");
        }
        assert!(Filter::read(&"(".repeat(1000)).is_none());
    }
}
