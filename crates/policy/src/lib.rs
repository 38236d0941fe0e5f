//! Retention and calendars as pure functions.
