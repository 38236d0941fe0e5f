//! What can be set, and what it is where nobody sets it.
//!
//! Source: `sanoid.defaults.conf` of sanoid 2.3.0, version 2 of that file.

/// A key.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) form: Form,
    pub(super) default: &'static str,
}

/// What the values of a key look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Yes or no.
    Toggle,
    /// Yes, no, or "zfs".
    Recursion,
    /// A whole number in these bounds.
    Number(u32, u32),
    /// A time with a unit, or a number of the unit that goes with the key.
    Lapse,
    /// Whatever.
    Text,
}

const fn key(name: &'static str, form: Form, default: &'static str) -> Key {
    Key { name, form, default }
}

/// More of one kind than any file system bears.
const COUNT_MAX: u32 = 1_000_000;
const COUNT: Form = Form::Number(0, COUNT_MAX);
const MINUTE: Form = Form::Number(0, 59);
const HOUR: Form = Form::Number(0, 23);
const DAY_OF_MONTH: Form = Form::Number(1, 31);
const PERCENT: Form = Form::Number(0, 100);

/// All keys.
pub(super) const KEYS: [Key; 52] = [
    key("path", Form::Text, ""),
    key("recursive", Form::Recursion, "no"),
    key("use_template", Form::Text, ""),
    key("process_children_only", Form::Toggle, "no"),
    key("skip_children", Form::Toggle, "no"),
    key("pre_snapshot_script", Form::Text, ""),
    key("post_snapshot_script", Form::Text, ""),
    key("pre_pruning_script", Form::Text, ""),
    key("pruning_script", Form::Text, ""),
    key("script_timeout", Form::Number(0, 86_400), "5"),
    key("no_inconsistent_snapshot", Form::Toggle, "no"),
    key("force_post_snapshot_script", Form::Toggle, "no"),
    key("frequent_period", Form::Number(1, 1440), "15"),
    key("autoprune", Form::Toggle, "yes"),
    key("frequently", COUNT, "0"),
    key("hourly", COUNT, "48"),
    key("daily", COUNT, "90"),
    key("weekly", COUNT, "0"),
    key("monthly", COUNT, "6"),
    key("yearly", COUNT, "0"),
    key("prune_defer", PERCENT, "0"),
    key("autosnap", Form::Toggle, "yes"),
    key("hourly_min", MINUTE, "0"),
    key("daily_hour", HOUR, "23"),
    key("daily_min", MINUTE, "59"),
    key("weekly_wday", Form::Number(0, 7), "1"),
    key("weekly_hour", HOUR, "23"),
    key("weekly_min", MINUTE, "30"),
    key("monthly_mday", DAY_OF_MONTH, "1"),
    key("monthly_hour", HOUR, "0"),
    key("monthly_min", MINUTE, "0"),
    key("yearly_mon", Form::Number(1, 12), "1"),
    key("yearly_mday", DAY_OF_MONTH, "1"),
    key("yearly_hour", HOUR, "0"),
    key("yearly_min", MINUTE, "0"),
    key("monitor", Form::Toggle, "yes"),
    key("monitor_dont_warn", Form::Toggle, "no"),
    key("monitor_dont_crit", Form::Toggle, "no"),
    key("frequently_warn", Form::Lapse, "0"),
    key("frequently_crit", Form::Lapse, "0"),
    key("hourly_warn", Form::Lapse, "90m"),
    key("hourly_crit", Form::Lapse, "360m"),
    key("daily_warn", Form::Lapse, "28h"),
    key("daily_crit", Form::Lapse, "32h"),
    key("weekly_warn", Form::Lapse, "0"),
    key("weekly_crit", Form::Lapse, "0"),
    key("monthly_warn", Form::Lapse, "32d"),
    key("monthly_crit", Form::Lapse, "40d"),
    key("yearly_warn", Form::Lapse, "0"),
    key("yearly_crit", Form::Lapse, "0"),
    // Of a pool: those of its root count, where it has a section.
    key("capacity_warn", PERCENT, "80"),
    key("capacity_crit", PERCENT, "95"),
];

/// The key of a name.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// What sanoid calls yes and no.
pub(super) fn toggle(value: &str) -> Option<bool> {
    match value {
        "1" | "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Some(true),
        "" | "0" | "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Some(false),
        _ => None,
    }
}

/// Seconds of a time like "90m"; of a number without a unit, that many of `unit_seconds`.
pub(super) fn lapse(value: &str, unit_seconds: u64) -> Option<u64> {
    let (number, seconds) = match value.char_indices().last()? {
        (_, '0'..='9') => (value, unit_seconds),
        (place, letter) => {
            let seconds = match letter.to_ascii_lowercase() {
                // sanoid 2.3.0 counts 365 months of 31 days here.
                'y' => 31 * 365 * 86_400,
                'w' => 7 * 86_400,
                'd' => 86_400,
                'h' => 3600,
                'm' => 60,
                's' => 1,
                _ => return None,
            };
            (&value[..place], seconds)
        }
    };
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = number.parse().ok().filter(|_| is_number)?;
    number.checked_mul(seconds)
}

impl Form {
    /// Whether this is such a value.
    pub(super) fn has(self, value: &str) -> bool {
        match self {
            Self::Toggle => toggle(value).is_some(),
            Self::Recursion => toggle(value).is_some() || value.eq_ignore_ascii_case("zfs"),
            Self::Number(min, max) => number(value).is_some_and(|number| (min..=max).contains(&number)),
            Self::Lapse => lapse(value, 1).is_some(),
            Self::Text => true,
        }
    }

    /// What a value should be, in words.
    pub(super) fn wanted(self) -> String {
        match self {
            Self::Toggle => "yes or no".to_owned(),
            Self::Recursion => "yes, no or zfs".to_owned(),
            Self::Number(min, max) => format!("a number from {min} to {max}"),
            Self::Lapse => "a number, or one with a unit: 90m, 28h, 32d, 2w".to_owned(),
            Self::Text => "a text".to_owned(),
        }
    }
}

/// A number of plain digits.
pub(super) fn number(value: &str) -> Option<u32> {
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    value.parse().ok().filter(|_| is_number)
}

#[cfg(test)]
mod tests {
    use super::{KEYS, find, lapse};

    #[test]
    fn defaults_are_values_of_their_keys() {
        for key in &KEYS {
            assert!(key.form.has(key.default), "{}", key.name);
            assert_eq!(find(key.name).unwrap().name, key.name);
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(lapse("0", 60), Some(0));
        assert_eq!(lapse("90", 60), Some(5400));
        assert_eq!(lapse("90m", 1), Some(5400));
        assert_eq!(lapse("32D", 1), Some(32 * 86_400));
        assert_eq!(lapse("2w", 1), Some(14 * 86_400));
        for nonsense in [
            "",
            "m",
            "-1",
            "+1",
            "1 h",
            "1.5h",
            "1\u{e9}",
            "99999999999999999999",
            "9999999999999999y",
        ] {
            assert_eq!(lapse(nonsense, 1), None, "{nonsense}");
        }
    }
}
