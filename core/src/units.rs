//! Numbers for people, in one style everywhere.

use std::fmt::Display;

/// A whole number, not negative, with thousands separators: `1,312`.
pub fn thousands(n: impl Display) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    out
}

/// A number of bytes in a readable unit: `100 B`, `13.5 MiB`.
pub fn size(bytes: u64) -> String {
    let mut n = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if n < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{n:.1} {unit}") };
        }
        n /= 1024.0;
    }
    format!("{n:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_and_units() {
        assert_eq!([0, 12, 999, 1000, 1234567].map(thousands), ["0", "12", "999", "1,000", "1,234,567"]);
        assert_eq!([100, 1024, 13 << 20].map(size), ["100 B", "1.0 KiB", "13.0 MiB"]);
        assert_eq!(size(u64::MAX), "16777216.0 TiB");
    }
}
