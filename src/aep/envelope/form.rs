//! The forms of two attributes that are more than strings.

/// `^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`
pub(super) fn is_traceparent(text: &str) -> bool {
    let mut parts = text.split('-');
    [2, 32, 16, 2].into_iter().all(|len| {
        parts.next().is_some_and(|part| {
            part.len() == len && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        })
    }) && parts.next().is_none()
}

/// RFC 3339 `date-time`: lower-case `t` and `z` are legal, so is a leap second; a zone name isn't.
pub(super) fn is_rfc3339(text: &str) -> bool {
    let Some((date, rest)) = text.split_at_checked(10) else { return false };
    let Some(rest) = rest.strip_prefix(['T', 't']) else { return false };
    let Some((clock, rest)) = rest.split_at_checked(8) else { return false };
    let [Some(year), Some(month), Some(day)] = fields(date, '-', [4, 2, 2]) else { return false };
    let [Some(hour), Some(minute), Some(second)] = fields(clock, ':', [2, 2, 2]) else { return false };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return false,
    };
    if !(1..=days).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return false;
    }
    let offset = match rest.strip_prefix('.') {
        None => rest,
        Some(fraction) => {
            let rest = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
            if rest.len() == fraction.len() {
                return false;
            }
            rest
        }
    };
    if offset == "Z" || offset == "z" {
        return true;
    }
    let Some(offset) = offset.strip_prefix(['+', '-']) else { return false };
    let [Some(hour), Some(minute)] = fields(offset, ':', [2, 2]) else { return false };
    hour <= 23 && minute <= 59
}

/// Exactly `N` numbers of the given widths, separated by `separator`.
fn fields<const N: usize>(text: &str, separator: char, widths: [usize; N]) -> [Option<u32>; N] {
    let mut parts = text.split(separator);
    let numbers = widths.map(|width| {
        let part = parts.next()?;
        let digits = part.len() == width && part.bytes().all(|b| b.is_ascii_digit());
        if digits { part.parse().ok() } else { None }
    });
    if parts.next().is_some() { [None; N] } else { numbers }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_checked_as_rfc_3339_says() {
        for legal in [
            "2026-07-03T10:14:00Z",
            "2026-07-03t10:14:00z",
            "2026-07-03T10:14:00.000Z",
            "2024-02-29T00:00:00+23:59",
            "2026-12-31T23:59:60Z",
            "2026-07-03T10:14:00.123456789012-00:00",
            "0000-01-01T00:00:00Z",
        ] {
            assert!(is_rfc3339(legal), "{legal}");
        }
        for illegal in [
            "",
            "2026-07-03",
            "2026-07-03T10:14:00",
            "2026-07-03 10:14:00Z",
            "2026-07-03T10:14Z",
            "2026-7-3T10:14:00Z",
            "2026-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "2026-07-32T00:00:00Z",
            "2026-07-03T24:00:00Z",
            "2026-07-03T10:60:00Z",
            "2026-07-03T10:14:61Z",
            "2026-07-03T10:14:00.Z",
            "2026-07-03T10:14:00+2:00",
            "2026-07-03T10:14:00+24:00",
            "2026-07-03T10:14:00UTC",
            "2026-07-03T10:14:00Z ",
            "2026-07-03T10:14:00ZZ",
            "２026-07-03T10:14:00Z",
            "2026-07-03T10:14:00+0000",
            "1900-02-29T00:00:00Z",
        ] {
            assert!(!is_rfc3339(illegal), "{illegal}");
        }
    }

    #[test]
    fn traceparents_are_lower_case_hex_of_exact_lengths() {
        assert!(is_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
        for illegal in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "zz-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        ] {
            assert!(!is_traceparent(illegal), "{illegal}");
        }
    }
}
