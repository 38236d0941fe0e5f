//! The current rate and the estimated remaining time.

use std::collections::VecDeque;
use std::time::Duration;

/// Length of the averaging window: long enough to be steady, short enough to show a change.
const WINDOW: Duration = Duration::from_secs(10);
/// Minimum time between two samples, which bounds their number.
const STEP: Duration = Duration::from_millis(250);
/// No rate is reported before this much time was measured.
const SEEN_MIN: Duration = Duration::from_secs(1);

/// Recent samples of the amount done.
#[derive(Debug, Clone, Default)]
pub struct RateWindow {
    samples: VecDeque<(Duration, u64)>,
}

impl RateWindow {
    /// An empty window.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that `done` was done in total at time `now`.
    pub fn sample(&mut self, now: Duration, done: u64) {
        // The newest sample is replaced until it is a step away from the previous one.
        if let [.., (before, _), newest] = self.samples.make_contiguous()
            && now.saturating_sub(*before) < STEP
        {
            *newest = (now, done);
        } else {
            self.samples.push_back((now, done));
        }
        while self.samples.len() > 2 && now.saturating_sub(self.samples[1].0) >= WINDOW {
            self.samples.pop_front();
        }
    }

    /// Amount per second over the window; `None` if too little time was measured.
    pub fn per_second(&self) -> Option<u64> {
        let (&(first_time, first_done), &(last_time, last_done)) = (self.samples.front()?, self.samples.back()?);
        let seen = last_time.saturating_sub(first_time);
        if seen < SEEN_MIN {
            return None;
        }
        let done = u128::from(last_done.saturating_sub(first_done));
        u64::try_from(done * 1_000_000_000 / seen.as_nanos()).ok()
    }

    /// Time until `total` at the present rate, in whole seconds; `None` if the rate is zero or the total is unknown.
    pub fn left(&self, total: u64) -> Option<Duration> {
        let rate = self.per_second().filter(|&rate| rate > 0)?;
        let &(_, done) = self.samples.back()?;
        Some(Duration::from_secs(total.saturating_sub(done).div_ceil(rate)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::RateWindow;

    fn window(samples: &[(u64, u64)]) -> RateWindow {
        let mut window = RateWindow::new();
        for &(millis, done) in samples {
            window.sample(Duration::from_millis(millis), done);
        }
        window
    }

    #[test]
    fn nothing_is_said_before_a_second_has_been_seen() {
        assert_eq!(window(&[]).per_second(), None);
        assert_eq!(window(&[(0, 0), (999, 500)]).per_second(), None);
        assert_eq!(window(&[(0, 0), (1000, 500)]).per_second(), Some(500));
    }

    #[test]
    fn only_the_recent_past_counts() {
        // 1000 a second for a minute, then 10 a second for ten.
        let mut samples: Vec<(u64, u64)> = (0..=60).map(|second| (second * 1000, second * 1000)).collect();
        samples.extend((61..=70).map(|second| (second * 1000, 60_000 + (second - 60) * 10)));
        let window = window(&samples);
        assert_eq!(window.per_second(), Some(10));
        assert_eq!(window.left(60_200), Some(Duration::from_secs(10)));
    }

    #[test]
    fn a_stall_has_a_rate_of_nothing_and_no_end() {
        let stalled = window(&[(0, 0), (1000, 500), (30_000, 500)]);
        assert_eq!(stalled.per_second(), Some(0));
        assert_eq!(stalled.left(1000), None);
    }

    #[test]
    fn the_time_left_is_rounded_up_and_never_negative() {
        let window = window(&[(0, 0), (2000, 200)]);
        assert_eq!(window.left(350), Some(Duration::from_secs(2)));
        assert_eq!(window.left(100), Some(Duration::ZERO));
    }

    #[test]
    fn frequent_samples_take_no_memory() {
        let samples: Vec<(u64, u64)> = (0..100_000).map(|millis| (millis, millis)).collect();
        let window = window(&samples);
        assert!(window.samples.len() <= 42, "{}", window.samples.len());
        assert_eq!(window.per_second(), Some(1000));
    }
}
