//! Metrics in the text format of Prometheus.
//!
//! Source: <https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4; names and units as
//! <https://prometheus.io/docs/practices/naming/> has them.

use std::fmt::Write as _;

use serde::Serialize;

/// A metric with its samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metric {
    /// Its name, with its unit.
    pub name: &'static str,
    /// Its description.
    pub help: &'static str,
    /// Its values.
    pub samples: Vec<Sample>,
}

/// A value and its labels.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// Names and values of the labels.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: MetricValue,
}

/// A value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub enum MetricValue {
    /// A whole number.
    Whole(u64),
    /// A number with a fraction: a ratio, or seconds.
    Real(f64),
}

impl Metric {
    /// A metric without samples.
    pub fn new(name: &'static str, help: &'static str) -> Self {
        Self {
            name,
            help,
            samples: Vec::new(),
        }
    }

    /// Adds a sample with these labels.
    pub fn add(&mut self, labels: &[(&'static str, &str)], value: MetricValue) {
        let own = |(name, value): &(&'static str, &str)| (*name, (*value).to_owned());
        self.samples.push(Sample {
            labels: labels.iter().map(own).collect(),
            value,
        });
    }
}

/// Metrics as text; those without samples are omitted.
pub fn exposition(metrics: &[Metric]) -> String {
    let mut text = String::new();
    for metric in metrics.iter().filter(|metric| !metric.samples.is_empty()) {
        let Metric { name, help, samples } = metric;
        // Writing to a string does not fail.
        writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge").ok();
        for sample in samples {
            let labels = sample
                .labels
                .iter()
                .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
            let labels = labels.collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() {
                labels
            } else {
                format!("{{{labels}}}")
            };
            match sample.value {
                MetricValue::Whole(number) => writeln!(text, "{name}{labels} {number}").ok(),
                MetricValue::Real(ratio) => writeln!(text, "{name}{labels} {ratio}").ok(),
            };
        }
    }
    text
}

/// The escaped value of a label. Of the control characters, the format supports only the line feed.
fn escaped(value: &str) -> String {
    let mut text = String::new();
    for character in value.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            character if character.is_control() => text.push(char::REPLACEMENT_CHARACTER),
            character => text.push(character),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{Metric, MetricValue, exposition};

    #[test]
    fn metrics_have_a_help_a_type_and_values() {
        let mut bytes = Metric::new("holdfast_x_bytes", "Bytes of it");
        bytes.add(
            &[("dataset", "tank/a"), ("type", "hourly")],
            MetricValue::Whole(u64::MAX),
        );
        bytes.add(&[("dataset", "a\\b \"c\"\n\u{1b}")], MetricValue::Whole(0));
        let mut ratio = Metric::new("holdfast_y_ratio", "How full");
        ratio.add(&[], MetricValue::Real(0.45));
        let text = exposition(&[bytes, Metric::new("holdfast_none", "Nothing"), ratio]);
        let wanted = "# HELP holdfast_x_bytes Bytes of it\n\
            # TYPE holdfast_x_bytes gauge\n\
            holdfast_x_bytes{dataset=\"tank/a\",type=\"hourly\"} 18446744073709551615\n\
            holdfast_x_bytes{dataset=\"a\\\\b \\\"c\\\"\\n\u{fffd}\"} 0\n\
            # HELP holdfast_y_ratio How full\n\
            # TYPE holdfast_y_ratio gauge\n\
            holdfast_y_ratio 0.45\n";
        assert_eq!(text, wanted);
    }
}
