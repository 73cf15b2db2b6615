//! The date for `strftime_now`, in UTC. It must not know templates.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Seconds since 1970.
pub(super) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// Year, month (1 to 12) and day of a number of days since 1970, in the Gregorian calendar.
///
/// Source: Howard Hinnant, "chrono-compatible low-level date algorithms".
fn civil(days: i64) -> (i64, usize, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month as usize, day)
}

/// Formats a time as C's `strftime` does in the C locale; unknown directives stay as they are.
pub(super) fn strftime(format: &str, unix_seconds: i64) -> String {
    let days = unix_seconds.div_euclid(86_400);
    let seconds = unix_seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let week_day = (days + 4).rem_euclid(7) as usize;
    let first = |y: i64| {
        let y = y - 1;
        y * 365 + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) - 719_162
    };
    let year_day = days - first(year) + 1;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let mut number = |value: i64, width: usize| {
            let width = if padded { width } else { 0 };
            // Writing to a string cannot fail.
            let _ = write!(out, "{value:0width$}");
        };
        match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year.rem_euclid(100), 2),
            Some('m') => number(month as i64, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(year_day, 3),
            Some('f') => number(0, 6),
            Some('w') => number(week_day as i64, 0),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('B') => out.push_str(MONTHS[month - 1]),
            Some('b' | 'h') => out.push_str(&MONTHS[month - 1][..3]),
            Some('A') => out.push_str(DAYS[week_day]),
            Some('a') => out.push_str(&DAYS[week_day][..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&strftime("%Y-%m-%d", unix_seconds)),
            Some('T' | 'X') => out.push_str(&strftime("%H:%M:%S", unix_seconds)),
            Some('D' | 'x') => out.push_str(&strftime("%m/%d/%y", unix_seconds)),
            Some('R') => out.push_str(&strftime("%H:%M", unix_seconds)),
            Some('c') => out.push_str(&strftime("%a %b %e %H:%M:%S %Y", unix_seconds)),
            Some('s') => number(unix_seconds, 0),
            // A time without a zone, as `datetime.now()` gives it.
            Some('z' | 'Z') => {}
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        // Checked with Python's datetime.fromtimestamp(t, UTC).strftime.
        let all = "%Y-%m-%d %H:%M:%S %j %a %A %b %B %y %I %p %-d %e %w %% %Q";
        for (time, expected) in [
            (0, "1970-01-01 00:00:00 001 Thu Thursday Jan January 70 12 AM 1  1 4 % %Q"),
            (
                1_709_210_096,
                "2024-02-29 12:34:56 060 Thu Thursday Feb February 24 12 PM 29 29 4 % %Q",
            ),
            (
                4_102_444_799,
                "2099-12-31 23:59:59 365 Thu Thursday Dec December 99 11 PM 31 31 4 % %Q",
            ),
        ] {
            assert_eq!(strftime(all, time), expected);
        }
    }
}
