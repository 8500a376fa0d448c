//! Dates of the Gregorian calendar.

/// Year, month and day of a day that is counted from 1970-01-01. Source: Hinnant: chrono-compatible low-level date algorithms (2013).
pub(crate) fn year_month_day(day: i64) -> (i64, i64, i64) {
    let shifted = day + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (d, m) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    (year + era * 400 + i64::from(m <= 2), m, d)
}

/// The moment `seconds` after 1970-01-01 in UTC, as C's `strftime` writes it: `%Y %y %m %d %e %b %B %a %A %H %I %M %S %p %%`, and `%-d` and
/// its like without a zero in front.
///
/// # Errors
/// With the directive that is not one of these.
#[cfg(feature = "chat")]
pub(crate) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
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
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    let (days, second) = ((seconds / 86_400) as i64, seconds % 86_400);
    let (year, month, day) = year_month_day(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[((days + 4) % 7) as usize]);
    let hour = second / 3600;
    let (mut text, mut rest) = (String::new(), format.chars());
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = rest.next();
        let bare = directive == Some('-');
        if bare {
            directive = rest.next();
        }
        let two = |number: u64| if bare { number.to_string() } else { format!("{number:02}") };
        text += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => two((year % 100) as u64),
            Some('m') => two(month as u64),
            Some('d') => two(day as u64),
            Some('e') => format!("{day:2}"),
            Some('b') => month_name[..3].into(),
            Some('B') => month_name.into(),
            Some('a') => day_name[..3].into(),
            Some('A') => day_name.into(),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(second / 60 % 60),
            Some('S') => two(second % 60),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('%') => "%".into(),
            other => {
                let other = other.map_or(String::new(), String::from);
                return Err(format!(
                    "strftime: got the directive %{other}, wanted one of %Y %y %m %d %e %b %B %a %A %H %I %M %S %p %%"
                ));
            }
        };
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        let dates = [0, 59, 11_016, 19_723, 20_781].map(year_month_day);
        assert_eq!(dates, [(1970, 1, 1), (1970, 3, 1), (2000, 2, 29), (2024, 1, 1), (2026, 11, 24)]);
    }

    #[cfg(feature = "chat")]
    #[test]
    fn moments_are_written_as_c_writes_them() {
        // 2026-11-24, a Tuesday, 15:04:05.
        let at = 20_781 * 86_400 + 15 * 3600 + 4 * 60 + 5;
        let written = strftime("%A %a, %d %B %b %Y %y-%m %H:%M:%S %I %p %-I %%", at).unwrap();
        assert_eq!(written, "Tuesday Tue, 24 November Nov 2026 26-11 15:04:05 03 PM 3 %");
        assert_eq!(strftime("%-d %e %I %p", 0).unwrap(), "1  1 12 AM");
        let refused = ["%Q", "100%"].map(|format| strftime(format, 0).unwrap_err());
        assert!(
            refused[0].contains("the directive %Q,") && refused[1].contains("the directive %,"),
            "{refused:?}"
        );
    }
}
