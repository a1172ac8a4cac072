//! Parsers of single values.

use std::time::Duration;

use clap::builder::RangedU64ValueParser;

pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("{e}")),
    }
}

pub fn one_to(most: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most as u64)
}

/// A size in bytes: `512MiB`, `4GiB`, `1.5GB`, `1000000`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("unknown unit {unit:?}; write for example 512MiB or 4GiB")),
    };
    let bytes = number.parse::<f64>().map_err(|_| "write for example 512MiB or 4GiB".to_owned())? * factor as f64;
    if bytes < 1.0 || bytes >= u64::MAX as f64 {
        return Err("is not a possible size".into());
    }
    Ok(bytes as u64)
}

/// A time: `90s`, `30m`, `12h`, `7d`.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let write = || "write for example 12h or 7d".to_owned();
    let (number, unit) = text.split_at(text.len() - text.chars().next_back().map_or(0, char::len_utf8));
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(write()),
    };
    let number = number.parse::<u32>().map_err(|_| write())?;
    if number == 0 { Err("must be at least 1".into()) } else { Ok(Duration::from_secs(u64::from(number) * seconds)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(parse_time("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_time("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for bad in ["", "d", "7", "0h", "-1h", "1.5h", "7 d", "7é"] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("4GiB"), Ok(4 << 30));
        assert_eq!(parse_size("1.5 MB"), Ok(1_500_000));
        assert_eq!(parse_size("77"), Ok(77));
        for bad in ["", "GiB", "4 apples", "0", "-1", "1e3"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
