//! Simulates jobs with a manual clock, which is also set forward and back.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use proptest::prelude::{Just, ProptestConfig, Strategy, prop_oneof, proptest};

use super::{Cause, Consequence, Due, JobState, RunEnd, Timing, own_delay};

fn timing(when: &str) -> Timing {
    Timing {
        when: when.split(';').map(|text| text.parse().unwrap()).collect(),
        delay: Duration::ZERO,
        is_caught_up: true,
        retry_count_max: 2,
        retry_delay: Duration::from_secs(300),
    }
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn after(time: Timestamp, seconds: i64) -> Timestamp {
    time + jiff::Span::new().seconds(seconds)
}

/// A host with one job that takes no time. `real` is the elapsed time, `clock` the time that the host's clock shows.
struct Host {
    timing: Timing,
    zone: TimeZone,
    state: JobState,
    real: i64,
    clock: Timestamp,
    /// Elapsed time and clock time of each run.
    runs: Vec<(i64, Timestamp)>,
}

impl Host {
    fn new(timing: Timing, zone: &str, clock: &str) -> Self {
        Self {
            timing,
            zone: TimeZone::get(zone).unwrap(),
            state: JobState::new(at(clock)),
            real: 0,
            clock: at(clock),
            runs: Vec::new(),
        }
    }

    /// Checks for due jobs.
    fn check(&mut self) {
        self.state.normalize(&self.timing, &self.zone, self.clock);
        if let Due::Since(_) = self.state.due(&self.timing, &self.zone, self.clock) {
            self.state.start(&self.timing, Cause::Due, self.clock);
            let end = self.state.end(&self.timing, RunEnd::Done, Cause::Due, self.clock);
            assert_eq!(end, Consequence::Succeeded);
            self.runs.push((self.real, self.clock));
        }
    }

    /// Advances time and checks every `step` seconds.
    fn pass(&mut self, seconds: i64, step: i64) {
        for _ in 0..seconds / step {
            self.pass_unseen(step);
            self.check();
        }
    }

    fn pass_unseen(&mut self, seconds: i64) {
        self.real += seconds;
        self.clock = after(self.clock, seconds);
    }

    fn clocks(&self) -> Vec<String> {
        let shown = self.runs.iter().map(|(_, clock)| clock.to_zoned(self.zone.clone()));
        shown.map(|clock| clock.strftime("%d %H:%M").to_string()).collect()
    }
}

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

#[test]
fn missed_runs_are_caught_up_once() {
    let mut host = Host::new(timing("hourly"), "UTC", "2026-11-20T12:30:00Z");
    host.check();
    host.pass_unseen(30 * HOUR);
    host.pass(HOUR, 60);
    assert_eq!(host.clocks(), ["21 18:31", "21 19:00"]);

    let mut host = Host::new(timing("hourly"), "UTC", "2026-11-20T12:30:00Z");
    host.timing.is_caught_up = false;
    host.pass_unseen(30 * HOUR);
    host.pass(2 * HOUR, 60);
    assert_eq!(host.clocks(), ["21 19:00", "21 20:00"]);
}

#[test]
fn a_clock_set_back_by_an_hour_neither_repeats_nor_blocks_runs() {
    // At 02:40, after the run of 02:30, the clock is set to 01:40.
    let mut host = Host::new(timing("02:30"), "UTC", "2026-11-20T02:00:00Z");
    host.pass(40 * 60, 60);
    host.clock = after(host.clock, -HOUR);
    host.pass(2 * DAY, 60);
    assert_eq!(host.clocks(), ["20 02:30", "21 02:30"]);

    // A job that runs every quarter of an hour is not held up: here it runs twenty minutes after its previous run.
    let mut host = Host::new(timing("*:0/15"), "UTC", "2026-11-20T02:00:00Z");
    host.pass(40 * 60, 60);
    host.clock = after(host.clock, -HOUR);
    host.pass(HOUR, 60);
    assert_eq!(
        host.clocks(),
        ["20 02:15", "20 02:30", "20 02:00", "20 02:15", "20 02:30"]
    );

    // Two times close to each other count as one run.
    let mut host = Host::new(timing("02:30;02:45"), "UTC", "2026-11-20T02:00:00Z");
    host.pass(50 * 60, 60);
    host.clock = after(host.clock, -HOUR);
    host.pass(12 * HOUR, 60);
    assert_eq!(host.clocks(), ["20 02:30", "20 02:45"]);
}

#[test]
fn a_clock_that_was_a_year_ahead_does_not_block_runs() {
    let mut host = Host::new(timing("daily"), "UTC", "2026-11-20T12:00:00Z");
    host.clock = at("2027-11-20T12:00:00Z");
    host.check();
    host.clock = at("2026-11-20T12:01:00Z");
    host.pass(2 * DAY, 60);
    // A day and a half after the previous run: of that run only is known that it was recent.
    assert_eq!(host.clocks(), ["20 12:00", "22 00:00"]);
}

#[test]
fn runs_follow_the_calendar_at_daylight_saving_changes() {
    let mut host = Host::new(timing("hourly"), "Europe/Berlin", "2026-10-25T00:30:00+02:00");
    host.pass(4 * HOUR, 60);
    assert_eq!(host.clocks(), ["25 01:00", "25 02:00", "25 02:00", "25 03:00"]);
    let mut host = Host::new(timing("02:30"), "Europe/Berlin", "2026-10-25T00:30:00+02:00");
    host.pass(30 * HOUR, 60);
    assert_eq!(host.clocks(), ["25 02:30", "26 02:30"]);
    let mut host = Host::new(timing("02:30"), "Europe/Berlin", "2026-03-29T00:30:00+01:00");
    host.pass(27 * HOUR, 60);
    assert_eq!(host.clocks(), ["30 02:30"]);
}

#[test]
fn the_delay_of_a_job_is_constant_on_a_host() {
    let most = Duration::from_secs(3600);
    let delays: Vec<u64> = (0..200)
        .map(|number| own_delay(most, &format!("host{number}"), "nightly").as_secs())
        .collect();
    assert!(delays.iter().all(|delay| *delay <= 3600));
    let quarter = |from: u64| delays.iter().filter(|delay| (from..from + 900).contains(delay)).count();
    assert!((0..4).all(|index| quarter(index * 900) > 20), "{delays:?}");
    assert_eq!(own_delay(most, "host1", "nightly"), own_delay(most, "host1", "nightly"));
    assert_ne!(own_delay(most, "host1", "nightly"), own_delay(most, "host1", "weekly"));
    assert_eq!(own_delay(Duration::ZERO, "host1", "nightly"), Duration::ZERO);

    let mut host = Host::new(timing("hourly"), "UTC", "2026-11-20T12:30:00Z");
    host.timing.delay = Duration::from_secs(40 * 60);
    host.pass(3 * HOUR, 60);
    assert_eq!(host.clocks(), ["20 13:40", "20 14:40"]);
    // At 16:20 the delayed run of 16:00 is still to come, and that of 15:00 was missed.
    host.pass_unseen(50 * 60);
    host.pass(30 * 60, 60);
    assert_eq!(host.clocks()[2..], ["20 16:21", "20 16:40"]);
}

#[test]
fn a_failed_run_is_retried_with_increasing_delays() {
    let zone = TimeZone::UTC;
    let timing = timing("daily");
    let mut now = at("2026-11-20T00:00:00Z");
    let mut state = JobState::new(at("2026-11-19T12:00:00Z"));
    for wait in [300, 600] {
        assert_eq!(state.due(&timing, &zone, now), Due::Since(now));
        state.start(&timing, Cause::Due, now);
        assert_eq!(state.due(&timing, &zone, now), Due::Running);
        let next_try = after(now, wait);
        assert_eq!(
            state.end(&timing, RunEnd::Failed, Cause::Due, now),
            Consequence::Retry(next_try)
        );
        assert_eq!(state.due(&timing, &zone, now), Due::At(next_try));
        now = next_try;
    }
    state.start(&timing, Cause::Due, now);
    assert_eq!(
        state.end(&timing, RunEnd::Failed, Cause::Due, now),
        Consequence::NoMoreRetries
    );
    let tomorrow = at("2026-11-21T00:00:00Z");
    assert_eq!(state.due(&timing, &zone, now), Due::At(tomorrow));
    // The next day has its own retries.
    state.start(&timing, Cause::Due, tomorrow);
    let end = state.end(&timing, RunEnd::Failed, Cause::Due, tomorrow);
    assert_eq!(end, Consequence::Retry(after(tomorrow, 300)));
    // A permanent failure is not retried, and a stopped run is repeated as soon as possible.
    state.start(&timing, Cause::Due, tomorrow);
    assert_eq!(
        state.end(&timing, RunEnd::FailedPermanently, Cause::Due, tomorrow),
        Consequence::NoMoreRetries
    );
    state.start(&timing, Cause::Due, tomorrow);
    assert_eq!(
        state.end(&timing, RunEnd::Stopped, Cause::Due, tomorrow),
        Consequence::Retry(tomorrow)
    );
    // A manual run is not retried.
    state.start(&timing, Cause::Person, tomorrow);
    assert_eq!(
        state.end(&timing, RunEnd::Failed, Cause::Person, tomorrow),
        Consequence::NoMoreRetries
    );
}

#[test]
fn retries_continue_past_the_next_time_and_a_clock_change() {
    let zone = TimeZone::UTC;
    let timing = timing("*:0/1");
    let start = at("2026-11-20T00:00:00Z");
    let mut state = JobState::new(start);
    let mut ends = Vec::new();
    for minute in 1..=3 {
        let now = after(start, minute * 60);
        assert!(matches!(state.due(&timing, &zone, now), Due::Since(_)));
        state.start(&timing, Cause::Due, now);
        ends.push(state.end(&timing, RunEnd::Failed, Cause::Due, now) == Consequence::NoMoreRetries);
    }
    assert_eq!(ends, [false, false, true]);

    let mut state = JobState::new(start);
    state.retry_at = Some(after(start, DAY));
    state.failed_count = 1;
    state.normalize(&timing, &zone, start);
    assert_eq!(state.retry_at, Some(after(start, 300)));
}

#[test]
fn a_calendar_without_dates_is_never_due() {
    let zone = TimeZone::UTC;
    let mut state = JobState::new(at("2026-11-20T00:00:00Z"));
    let timing = timing("2020-01-01");
    state.normalize(&timing, &zone, at("2026-11-20T00:00:00Z"));
    assert_eq!(state.due(&timing, &zone, at("2026-11-20T00:00:00Z")), Due::Never);
}

#[derive(Debug, Clone)]
enum ClockEvent {
    /// Jobs are checked every minute for this many minutes.
    Checked(i64),
    /// No checks for this many minutes.
    Unchecked(i64),
    /// The clock is set by this many seconds.
    Set(i64),
}

fn clock_event() -> impl Strategy<Value = ClockEvent> {
    prop_oneof![
        3 => (1..600_i64).prop_map(ClockEvent::Checked),
        1 => (1..5000_i64).prop_map(ClockEvent::Unchecked),
        1 => (-3 * DAY..3 * DAY).prop_map(ClockEvent::Set),
        1 => prop_oneof![Just(-HOUR), Just(HOUR), Just(-400 * DAY), Just(400 * DAY)].prop_map(ClockEvent::Set),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// When the clock is set, forwards or back, a job that is checked regularly neither stops nor runs more often than
    /// it should.
    #[test]
    fn no_clock_change_stops_a_job_or_makes_it_run_too_often(
        (period, when) in prop_oneof![
            Just((15 * 60, "*:0/15")), Just((HOUR, "hourly")), Just((6 * HOUR, "0/6:00")), Just((DAY, "02:30")),
        ],
        delay in 0..1800_u64,
        events in proptest::collection::vec(clock_event(), 1..12),
    ) {
        let mut timing = timing(when);
        timing.delay = Duration::from_secs(delay.min(u64::try_from(period).unwrap() / 2));
        let mut host = Host::new(timing, "UTC", "2026-06-20T02:00:00Z");
        let mut set_count = 0;
        for event in events {
            match event {
                ClockEvent::Checked(minutes) => host.pass(minutes * 60, 60),
                ClockEvent::Unchecked(minutes) => host.pass_unseen(minutes * 60),
                ClockEvent::Set(seconds) => {
                    host.clock = after(host.clock, seconds);
                    set_count += 1;
                    host.check();
                }
            }
        }
        // There are no more runs than elapsed periods, apart from two for each clock change: one for a time that seems
        // missed, and one for a time that came nearer.
        let most = host.real / period + 1 + 2 * set_count;
        assert!(i64::try_from(host.runs.len()).unwrap() <= most, "{:?}", host.runs);
        // From now on, the job runs within one and a half periods plus its own delay.
        let before = host.runs.len();
        host.pass(period + period / 2 + 1800 + 120, 60);
        assert!(host.runs.len() > before, "{:?} {}", host.state, host.clock);
    }

    /// With a correct clock, each scheduled time gives one run, whenever the check happens.
    #[test]
    fn each_scheduled_time_is_exactly_one_run(
        steps in proptest::collection::vec(1..200_i64, 1..50),
    ) {
        let mut host = Host::new(timing("hourly"), "UTC", "2026-06-20T00:00:00Z");
        for minutes in steps {
            let before = (host.clock.as_second() / HOUR, host.runs.len());
            host.pass_unseen(minutes * 60);
            host.check();
            let is_due = host.clock.as_second() / HOUR > before.0;
            assert_eq!(host.runs.len() - before.1, usize::from(is_due));
        }
    }
}
