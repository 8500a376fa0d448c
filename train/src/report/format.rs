//! Numbers formatted for readers, and text escaped for HTML.

/// With a comma after every three digits: `1,234,567`.
pub(super) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// In words from a million on: `1.9 million`.
pub(super) fn count(value: u64) -> String {
    let [thousand, million, billion] = [1e3, 1e6, 1e9];
    match value as f64 {
        v if v >= 999.5 * billion => format!("{} trillion", number(v / billion / thousand)),
        v if v >= 999.5 * million => format!("{} billion", number(v / billion)),
        v if v >= 999.5 * thousand => format!("{} million", number(v / million)),
        _ => grouped(value),
    }
}

/// Three digits, or four from 1 to 10 on: `2.413`, `0.0312`, `19,900`, `3e-5`.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "not finite".to_owned();
    }
    if size >= 1e15 || (size > 0.0 && size < 1e-3) {
        return format!("{:e}", super::curves::significant(value, 3));
    }
    if size >= 1000.0 {
        let sign = if value < 0.0 { "-" } else { "" };
        return format!("{sign}{}", grouped(super::curves::significant(size, 3) as u64));
    }
    super::curves::significant(value, if (1.0..10.0).contains(&size) { 4 } else { 3 }).to_string()
}

/// In units of 1024: `1.55 MiB`.
pub(super) fn bytes(value: u64) -> String {
    let mut size = value as f64;
    for unit in ["bytes", "KiB", "MiB", "GiB"] {
        if size < 1000.0 {
            return format!("{} {unit}", super::curves::significant(size, 3));
        }
        size /= 1024.0;
    }
    format!("{} TiB", super::curves::significant(size, 3))
}

/// `34.2 s`, `12 min 3 s`, `3 h 12 min`.
pub(super) fn seconds(value: f64) -> String {
    let whole = value.round() as u64;
    match whole {
        _ if value < 60.0 => format!("{} s", super::curves::significant(value, 3)),
        0..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

/// `1.2 TFLOP/s` for a rate of 1.2e12 and the unit `FLOP/s`.
pub(super) fn rate(value: f64, unit: &str) -> String {
    let (size, prefix) = match value {
        v if v >= 1e12 => (v / 1e12, "T"),
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v => (v, ""),
    };
    format!("{} {prefix}{unit}", super::curves::significant(size, 3))
}

/// Escapes text for an HTML element or a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // HTML has no place for NUL, and a browser would say so.
            '\0' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(count(120_576), "120,576");
        assert_eq!(count(1_912_345), "1.912 million");
        assert_eq!(count(999_900), "1 million");
        assert_eq!(count(7_000_000_000), "7 billion");
        assert_eq!(
            [2.412_92, 0.031_24, 19_856.19, 3e-5, 0.0, 12.345].map(number),
            ["2.413", "0.0312", "19,900", "3e-5", "0", "12.3"]
        );
        assert_eq!(number(f64::NAN), "not finite");
        assert_eq!([0, 1536, 1_629_304].map(bytes), ["0 bytes", "1.5 KiB", "1.55 MiB"]);
        assert_eq!(
            [0.774, 59.9, 723.0, 11_533.0].map(seconds),
            ["0.774 s", "59.9 s", "12 min 3 s", "3 h 12 min"]
        );
        assert_eq!(rate(1.234e12, "FLOP/s"), "1.23 TFLOP/s");
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(escape("<a href=\"x\">&'"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
    }
}
