//! Texts for people.

/// Makes what an image says fit for a terminal: it may hold anything, control characters go.
#[must_use]
pub fn printable(text: &str) -> String {
    let escaped = text.chars().map(|char| match char {
        char if char.is_control() => char.escape_default().to_string(),
        char => char.to_string(),
    });
    escaped.collect()
}

/// Writes seconds since 1970 as a date of the Gregorian calendar and a time, UTC.
pub fn date(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Years that begin with March put the leap day at their end; eras of 400 of them are alike.
    let since_era = days + 719_468;
    let (era, day) = (since_era / 146_097, since_era % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = 400 * era + year + next;
    let (hour, minute, second) = (time / 3_600, time / 60 % 60, time % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// How a task with this wait status ended.
pub(crate) fn describe_status(status: i32) -> String {
    match status & 0x7f {
        0 => format!("exit status {}", status >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses_are_told() {
        assert_eq!(describe_status(3 << 8), "exit status 3");
        assert_eq!(describe_status(9), "signal 9");
    }

    #[test]
    fn dates_are_told() {
        assert_eq!(date(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(date(4_107_542_400), "2100-03-01 00:00:00 UTC");
        assert_eq!(date(1_767_225_599), "2025-12-31 23:59:59 UTC");
        let _ = date(u64::MAX / 1_000_000_000);
    }
}
