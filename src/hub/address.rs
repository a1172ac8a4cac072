//! Web addresses: joining, comparing, encoding.

/// The address that `location` means in an answer from `base`.
pub fn join(base: &str, location: &str) -> Option<String> {
    let (scheme, rest) = base.split_once("://")?;
    let next = if location.starts_with("http://") || location.starts_with("https://") {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{}{location}", rest.split(['/', '?', '#']).next()?)
    } else {
        format!("{}/{location}", without_query(base).rsplit_once('/')?.0)
    };
    host(&next).is_some().then_some(next)
}

/// Scheme, host and port, in one spelling.
pub fn origin(url: &str) -> Option<String> {
    let host = host(url)?.to_ascii_lowercase();
    Some(match url.starts_with("https:") {
        true => format!("https://{}", host.strip_suffix(":443").unwrap_or(&host)),
        false => format!("http://{}", host.strip_suffix(":80").unwrap_or(&host)),
    })
}

/// Host and port of a web address.
pub fn host(url: &str) -> Option<&str> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"))?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let host = authority.rsplit('@').next()?;
    (!host.is_empty() && !host.starts_with(':')).then_some(host)
}

/// Whether a host is this machine: no other machine can read the traffic.
pub fn is_loopback(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost" || name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Signed addresses carry their permission in the query, which must not be shown.
pub fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or(url)
}

/// `text` as one part of an address.
pub fn encode(text: &str, keep_slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(b.into()),
            b'/' if keep_slashes => out.push('/'),
            _ => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_relative_to_where_they_come_from() {
        let base = "https://hub.example:8443/a/b?c=/d";
        assert_eq!(join(base, "https://cdn.example/x").unwrap(), "https://cdn.example/x");
        assert_eq!(join(base, "//cdn.example/x").unwrap(), "https://cdn.example/x");
        assert_eq!(join(base, "/x?y").unwrap(), "https://hub.example:8443/x?y");
        assert_eq!(join(base, "x").unwrap(), "https://hub.example:8443/a/x");
        assert_eq!(join(base, "https:///x"), None);
    }

    #[test]
    fn origins_are_compared_and_not_prefixes() {
        assert_eq!(origin("https://Hub.example:443/a"), origin("https://hub.example/b?c"));
        for other in
            ["http://hub.example", "https://hub.example.evil/", "https://hub.example@evil/", "https://hub.example:1/"]
        {
            assert_ne!(origin(other), origin("https://hub.example/"), "{other}");
        }
    }

    #[test]
    fn hosts_and_encoding() {
        assert_eq!(host("http://127.0.0.1:80/x"), Some("127.0.0.1:80"));
        assert_eq!(host("ftp://x/"), None);
        assert_eq!(host("https://"), None);
        assert!(is_loopback("127.0.0.1:9") && is_loopback("localhost") && is_loopback("[::1]:80"));
        assert!(!is_loopback("10.0.0.1:80") && !is_loopback("localhost.example"));
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(encode("a b/ä.json", true), "a%20b/%C3%A4.json");
    }
}
