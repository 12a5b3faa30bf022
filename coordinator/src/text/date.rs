//! Dates in UTC: `strftime_now`, for templates that tell the model the date, and times in headers.
use minijinja::{Error, ErrorKind};
use shared::clock::since_1970;

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

pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(format, since_1970().as_secs())
}

/// Formats a time in seconds since 1970 as C's `strftime` does in the C locale.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (year, month, day, day_of_year) = date_of(days);
    let weekday = DAYS[(days as usize + 4) % 7];
    let name = MONTHS[month as usize - 1];
    let hour_12 = (hour + 11) % 12 + 1;
    let half = if hour < 12 { "AM" } else { "PM" };
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = chars.next();
        // glibc's `-` flag: no leading zeros.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let number = |value: u64, width: usize| {
            if bare { value.to_string() } else { format!("{value:0width$}") }
        };
        text.push_str(&match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') if !bare => format!("{day:2}"),
            Some('e') => day.to_string(),
            Some('j') => number(day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(hour_12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => half.to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('B') => name.to_owned(),
            Some('b' | 'h') => name[..3].to_owned(),
            Some('F') => format!("{year:04}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('D') => format!("{month:02}/{day:02}/{:02}", year % 100),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('s') => seconds.to_string(),
            Some('%') => "%".to_owned(),
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                let message = format!("strftime_now: `%{directive}` is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        });
    }
    Ok(text)
}

/// A time in seconds since 1970 as RFC 3339 writes it.
pub(crate) fn rfc_3339(seconds: u64) -> String {
    let (year, month, day, _) = date_of(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month, day of the month and day of the year of a day counted from 1970-01-01.
fn date_of(days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let (mut year, mut left) = (1970, days);
    loop {
        let length = 365 + u64::from(leap(year));
        if left < length {
            break;
        }
        (year, left) = (year + 1, left - length);
    }
    let day_of_year = left + 1;
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if left < length {
            break;
        }
        (month, left) = (month + 1, left - length);
    }
    (year, month, left + 1, day_of_year)
}
