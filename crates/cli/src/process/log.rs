//! The debug log, for bug reports. Disabled unless `--verbose` or `HOLDFAST_LOG` enables it.

use std::sync::Arc;
use std::time::Duration;

use env_filter::{Builder, Filter};
use holdfast_block::Clock;
use log::{LevelFilter, Log, Metadata, Record};

use crate::process::environment::{self, Environment};

/// The destination of log lines.
pub trait LogSink: Send + Sync {
    /// Writes a line, `elapsed` after the start of the program.
    fn log(&self, elapsed: Duration, record: &Record<'_>);
}

struct Logger {
    filter: Filter,
    sink: Arc<dyn LogSink>,
    clock: Arc<dyn Clock>,
    start: Duration,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if self.filter.matches(record) {
            self.sink.log(self.clock.now().saturating_sub(self.start), record);
        }
    }

    fn flush(&self) {}
}

/// The log level for this many `--verbose`.
const fn level(verbose: u8) -> Option<LevelFilter> {
    match verbose {
        0 => None,
        1 => Some(LevelFilter::Debug),
        2.. => Some(LevelFilter::Trace),
    }
}

fn filter(verbose: u8, environment: &Environment) -> Result<Option<Filter>, String> {
    let mut builder = Builder::new();
    if let Some(level) = level(verbose) {
        return Ok(Some(builder.filter_level(level).build()));
    }
    let Some(words) = environment.get(environment::LOG).filter(|words| !words.is_empty()) else {
        return Ok(None);
    };
    let words = words.to_string_lossy();
    builder
        .try_parse(&words)
        .map_err(|error| format!("{}={words}: {error}", environment::LOG))?;
    Ok(Some(builder.build()))
}

/// Starts logging if it is requested.
///
/// # Errors
/// `HOLDFAST_LOG` is not a valid filter; the message describes the error.
pub fn begin(
    verbose: u8,
    environment: &Environment,
    sink: Arc<dyn LogSink>,
    clock: Arc<dyn Clock>,
) -> Result<(), String> {
    let Some(filter) = filter(verbose, environment)? else {
        return Ok(());
    };
    let level = filter.filter();
    let start = clock.now();
    let logger = Logger {
        filter,
        sink,
        clock,
        start,
    };
    // There is one logger per process, and this is called once.
    if log::set_boxed_logger(Box::new(logger)).is_ok() {
        log::set_max_level(level);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use log::{Level, LevelFilter, Metadata};

    use super::filter;
    use crate::process::environment::Environment;

    #[test]
    fn the_option_beats_the_environment() {
        let environment: Environment = [("HOLDFAST_LOG", "holdfast_repo=trace")].into_iter().collect();
        let none = Environment::default();
        assert!(filter(0, &none).unwrap().is_none());
        assert_eq!(filter(1, &environment).unwrap().unwrap().filter(), LevelFilter::Debug);
        assert_eq!(filter(3, &none).unwrap().unwrap().filter(), LevelFilter::Trace);
        let chosen = filter(0, &environment).unwrap().unwrap();
        let is_logged = |target| chosen.enabled(&Metadata::builder().target(target).level(Level::Trace).build());
        assert!(is_logged("holdfast_repo::store") && !is_logged("holdfast_host::qemu"));
    }

    #[test]
    fn a_filter_that_cannot_be_read_is_named() {
        let environment: Environment = [("HOLDFAST_LOG", "holdfast=loud")].into_iter().collect();
        let error = filter(0, &environment).err().unwrap();
        assert!(error.contains("HOLDFAST_LOG=holdfast=loud"), "{error}");
    }
}
