//! When the next attempt is due.

use std::time::{Duration, SystemTime};

/// The longest wait that a `Retry-After` header can ask for; a longer one is shortened to it.
pub const MAX_RETRY_AFTER: Duration = Duration::from_mins(5);

/// Capped exponential back-off with full jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// The longest wait after the first failure; it doubles with every further one.
    pub initial: Duration,
    /// What it never exceeds.
    pub max: Duration,
}

impl Default for RetryPolicy {
    /// From 200 ms to 30 s.
    fn default() -> Self {
        Self { initial: Duration::from_millis(200), max: Duration::from_secs(30) }
    }
}

impl RetryPolicy {
    /// The longest wait after the failure number `failure`, counted from 1.
    #[must_use]
    pub fn ceiling(&self, failure: u32) -> Duration {
        self.initial.saturating_mul(2_u32.saturating_pow(failure.saturating_sub(1))).min(self.max)
    }

    /// A random wait between zero and [`RetryPolicy::ceiling`], so that failed attempts spread out.
    #[must_use]
    pub fn delay(&self, failure: u32, random: &mut fastrand::Rng) -> Duration {
        let ceiling = u64::try_from(self.ceiling(failure).as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(random.u64(0..=ceiling))
    }
}

/// Reads a `Retry-After` header: seconds in plain digits or an HTTP date, at most [`MAX_RETRY_AFTER`]. A date
/// that has passed is zero; anything else is `None`, as if the header weren't there.
#[must_use]
pub fn parse_retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim_matches([' ', '\t']);
    let wait = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        Duration::from_secs(text.parse().ok()?)
    } else {
        httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default()
    };
    Some(wait.min(MAX_RETRY_AFTER))
}

/// The wall clock. Only for what is shown or exchanged; waits are timed by the runtime's clock.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the wall clock's one home")]
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// A time as RFC 3339 in UTC with milliseconds: `2026-07-03T10:14:01.500Z`. A time outside the years 1970 to
/// 9999 is shown as the nearer end.
#[must_use]
pub fn rfc3339(time: SystemTime) -> String {
    /// The last second of the year 9999.
    const LAST: u64 = 253_402_300_799;
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs().min(LAST);
    // Days to a date of the Gregorian calendar, in years that start in March, after Howard Hinnant's
    // `civil_from_days`.
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_doubles_to_its_cap_and_never_overflows() {
        let policy = RetryPolicy::default();
        let mut random = fastrand::Rng::with_seed(1);
        assert_eq!(policy.ceiling(1), Duration::from_millis(200));
        assert_eq!(policy.ceiling(2), Duration::from_millis(400));
        for failure in [0, 1, 8, 9, 64, 10_000, u32::MAX] {
            assert!(policy.ceiling(failure) <= policy.max);
            assert!(policy.delay(failure, &mut random) <= policy.ceiling(failure));
        }
        assert_eq!(policy.ceiling(10_000), policy.max);
        let endless = RetryPolicy { initial: Duration::MAX, max: Duration::MAX };
        assert_eq!(endless.ceiling(10_000), Duration::MAX);
        let _wait = endless.delay(10_000, &mut random);
    }

    #[test]
    fn jitter_is_full() {
        let (policy, mut random) = (RetryPolicy::default(), fastrand::Rng::with_seed(7));
        let waits: Vec<_> = (0..200).map(|_| policy.delay(1, &mut random)).collect();
        assert!(waits.iter().any(|wait| *wait < policy.initial / 10));
        assert!(waits.iter().any(|wait| *wait > policy.initial / 10 * 9));
    }

    #[test]
    fn retry_after_is_digits_or_a_date_else_ignored() {
        let now = httpdate::parse_http_date("Fri, 03 Jul 2026 10:00:00 GMT").unwrap();
        let seconds = |n| Some(Duration::from_secs(n));
        for (text, wait) in [
            ("0", seconds(0)),
            ("7", seconds(7)),
            (" 7 ", seconds(7)),
            ("007", seconds(7)),
            ("300", seconds(300)),
            ("301", seconds(300)),
            ("18446744073709551615", seconds(300)),
            ("18446744073709551616", None),
            ("99999999999999999999999999999999", None),
            ("-1", None),
            ("+1", None),
            ("1.5", None),
            ("1e3", None),
            ("", None),
            (" ", None),
            ("soon", None),
            ("٣", None),
            ("NaN", None),
            ("Fri, 03 Jul 2026 10:00:09 GMT", seconds(9)),
            ("Friday, 03-Jul-26 10:00:09 GMT", seconds(9)),
            ("Fri, 03 Jul 2026 09:00:00 GMT", seconds(0)),
            ("Sat, 03 Jul 2027 10:00:00 GMT", seconds(300)),
            ("2026-07-03T10:00:09Z", None),
        ] {
            assert_eq!(parse_retry_after(text, now), wait, "{text:?}");
        }
    }

    #[test]
    fn times_are_shown_as_rfc_3339() {
        let at = |seconds, millis| {
            rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis))
        };
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399, 999), "2000-02-28T23:59:59.999Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_783_073_641, 500), "2026-07-03T10:14:01.500Z");
        assert_eq!(at(400_000_000_000, 0), "9999-12-31T23:59:59.000Z");
        assert_eq!(rfc3339(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), at(0, 0));
    }
}
