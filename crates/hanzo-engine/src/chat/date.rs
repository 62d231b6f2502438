//! `strftime_now`: today's date for templates that tell it to the model. Time is UTC, names are English.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
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

/// `time` in UTC as the C function strftime writes it, for the conversions that templates use; others stay as they are.
pub(super) fn format(pattern: &str, time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, second) = (seconds / 86400, seconds % 86400);
    let (year, month, day, year_day) = civil(days);
    let weekday = ((days + 4) % 7) as usize; // 1970-01-01 was a Thursday
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut chars = pattern.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            out.push(char);
            continue;
        }
        let (padded, conversion) = match chars.next() {
            Some('-') => (false, chars.next()),
            other => (true, other),
        };
        let number = |value: u64, width: usize| {
            if padded { format!("{value:0width$}") } else { value.to_string() }
        };
        let text = match conversion {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') => format!("{day:2}"),
            Some('j') => number(year_day, 3),
            Some('B') => MONTHS[month as usize - 1].to_owned(),
            Some('b' | 'h') => MONTHS[month as usize - 1][..3].to_owned(),
            Some('A') => DAYS[weekday].to_owned(),
            Some('a') => DAYS[weekday][..3].to_owned(),
            Some('w') => weekday.to_string(),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        out.push_str(&text);
    }
    out
}

/// Year, month (1..=12), day (1..=31) and day of the year (1..=366) of a day counted from 1970-01-01.
fn civil(mut days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // The calendar repeats every 400 years, which are 146097 days.
    let mut year = 1970 + days / 146097 * 400;
    days %= 146097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let year_day = days + 1;
    let mut month = 1;
    loop {
        let length = match month {
            2 => 28 + u64::from(leap(year)),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        if days < length {
            return (year, month, days + 1, year_day);
        }
        days -= length;
        month += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64, pattern: &str) -> String {
        format(pattern, UNIX_EPOCH + Duration::from_secs(seconds))
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S"), "Thursday 01 January 1970 00:00:00");
        assert_eq!(at(951_782_400, "%Y-%m-%d %j %a"), "2000-02-29 060 Tue");
        assert_eq!(
            at(1_732_838_400 + 13 * 3600 + 5, "%F %T %I%p %-d %e %y %b"),
            "2024-11-29 13:00:05 01PM 29 29 24 Nov"
        );
        assert_eq!(at(4_107_542_400, "%d %b %Y"), "01 Mar 2100", "2100 is no leap year");
        assert_eq!(at(0, "100%% %q %"), "100% %q %");
    }
}
