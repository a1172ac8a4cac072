//! The Host header of requests to a server for this machine. Other names are refused, against DNS rebinding: a foreign site
//! whose name was made to point to this machine.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::{HeaderMap, header};

use super::refusal::Refusal;

/// The names by which a server may be called: `localhost` and IP addresses at its port, and those that the user gave.
#[derive(Clone, Debug)]
pub struct Hosts {
    port: u16,
    others: Vec<String>,
}

impl Hosts {
    /// For a server at `port` that is also called by `others`.
    pub fn new(port: u16, others: Vec<String>) -> Self {
        Self { port, others }
    }

    /// # Errors
    /// 403 for another name.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let mut hosts = headers.get_all(header::HOST).iter();
        match (hosts.next().and_then(|host| host.to_str().ok()), hosts.next()) {
            (Some(host), None) if self.has(host.trim()) => Ok(()),
            _ => {
                let why =
                    "this server answers to its address and to localhost, with its port, only; --allow-host adds names";
                Err(Refusal::new(403, why).coded("unknown_host"))
            }
        }
    }

    fn has(&self, host: &str) -> bool {
        if self.others.iter().any(|other| other.eq_ignore_ascii_case(host)) {
            return true;
        }
        let (name, at) = match host.rsplit_once(':') {
            Some((name, at)) if !at.ends_with(']') => (name, at),
            _ => (host, "80"),
        };
        let v6 = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
        let address = v6.map_or_else(|| name.parse::<Ipv4Addr>().is_ok(), |n| n.parse::<Ipv6Addr>().is_ok());
        // Digits only: `u16::from_str` would take a sign.
        let digits = at.bytes().all(|b| b.is_ascii_digit());
        digits && at.parse() == Ok(self.port) && (name.eq_ignore_ascii_case("localhost") || address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        let at = |port, host: &str| Hosts::new(port, vec!["tunnel:9000".into()]).has(host);
        for host in
            ["localhost:8080", "LocalHost:8080", "127.0.0.1:8080", "[::1]:8080", "192.168.0.7:8080", "Tunnel:9000"]
        {
            assert!(at(8080, host), "{host}");
        }
        assert!(at(80, "localhost") && at(80, "[::1]"));
        for host in [
            "",
            "localhost",
            "localhost:80",
            "evil.example:8080",
            "localhost.evil.example:8080",
            "127.0.0.1.evil.example:8080",
            "127.0.0.1",
            "[::1]",
            "::1:8080",
            "localhost:8080:8080",
            "localhost:+8080",
            "user@localhost:8080",
            "localhost.:8080",
            "tunnel:8080",
        ] {
            assert!(!at(8080, host), "{host}");
        }
    }

    #[test]
    fn there_is_one_host() {
        let check = |hosts: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, host.parse().unwrap());
            }
            Hosts::new(8080, Vec::new()).check(&headers).is_ok()
        };
        assert!(check(&["localhost:8080"]) && check(&["  localhost:8080 "]));
        assert!(
            !check(&[]) && !check(&["localhost:8080", "evil.example"]) && !check(&["localhost:8080", "localhost:8080"])
        );
    }
}
