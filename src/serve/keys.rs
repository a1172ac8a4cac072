//! Keys that requests must have, and the namespace of each: prefixes are shared within a namespace only.

use std::{collections::HashMap, path::Path};

use axum::http::{HeaderMap, header};
use ring::digest::{SHA256, digest};

use super::refusal::Refusal;
use crate::{
    failure::{Failure, Outcome, json_error},
    input_file,
};

/// Most bytes of a file of keys.
const MAX_BYTES: u64 = 16 << 20;
/// Fewer bytes can be guessed.
const SHORTEST: usize = 16;

/// The keys, as digests: looking one up takes no time that tells how much of it was right.
#[derive(Debug)]
pub struct Keys(HashMap<[u8; 32], String>);

impl Keys {
    /// Reads a JSON object that maps keys to names of namespaces.
    ///
    /// # Errors
    /// If the file cannot be read or is no such object. No message contains a key.
    pub fn read(path: &Path) -> Outcome<Self> {
        let text = input_file::load_regular(path, MAX_BYTES)?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &[u8]) -> Outcome<Self> {
        let fail = |why: String| Failure::Other(format!("{}: {why}", path.display()));
        let keys: HashMap<String, String> = serde_json::from_slice(text).map_err(|e| {
            let place =
                json_error(&e).rsplit_once(" at line ").map_or_else(String::new, |(_, p)| format!(" (line {p})"));
            fail(format!("it must be a JSON object that maps keys to names of namespaces, all of them strings{place}"))
        })?;
        if keys.is_empty() {
            return Err(fail("it has no keys, so nobody could use the server".into()));
        }
        for (key, namespace) in &keys {
            if key.len() < SHORTEST || !key.bytes().all(|b| b.is_ascii_graphic()) {
                let why = "keys have at least 16 characters, all of them ASCII and none of them white space";
                return Err(fail(format!("the key of {namespace:?} is too short or has other characters; {why}")));
            }
            if namespace.chars().any(char::is_control) {
                return Err(fail(format!("the namespace {namespace:?} has a control character")));
            }
        }
        Ok(Self(keys.into_iter().map(|(key, namespace)| (hash(key.as_bytes()), namespace)).collect()))
    }

    /// The namespace of a request: its key is in `Authorization: Bearer` or in `x-api-key`.
    ///
    /// # Errors
    /// 401 if there is no key or another one.
    pub fn namespace(&self, headers: &HeaderMap) -> Result<String, Refusal> {
        let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
        });
        let key = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()));
        let Some(key) = key else {
            let why = "this server asks for a key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
            return Err(Refusal::new(401, why).coded("missing_api_key"));
        };
        let known = self.0.get(&hash(key)).cloned();
        known.ok_or_else(|| Refusal::new(401, "this server does not know that key").coded("invalid_api_key"))
    }
}

/// The engine's name of a caller's prefixes: different for different pairs, since no namespace has a control character.
pub fn prefix_namespace(namespace: &str, salt: &str) -> String {
    if salt.is_empty() { namespace.to_owned() } else { format!("{namespace}\0{salt}") }
}

fn hash(key: &[u8]) -> [u8; 32] {
    digest(&SHA256, key).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Outcome<Keys> {
        Keys::parse("keys.json".as_ref(), text.as_bytes())
    }

    #[test]
    fn a_key_has_a_namespace() {
        let keys = parse(r#"{"key-of-the-first-team": "first", "key-of-the-second-team": "second"}"#).unwrap();
        let with = |name: &'static str, value: &str| {
            keys.namespace(&HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]))
        };
        assert_eq!(with("authorization", "Bearer key-of-the-first-team").unwrap(), "first");
        assert_eq!(with("authorization", "bearer  key-of-the-first-team").unwrap(), "first");
        assert_eq!(with("x-api-key", "key-of-the-second-team").unwrap(), "second");
        for (name, value) in [
            ("authorization", "Bearer"),
            ("authorization", "Bearer key-of-the-first-tea"),
            ("authorization", "Basic key-of-the-first-team"),
            ("authorization", "key-of-the-first-team"),
            ("x-api-key", ""),
            ("cookie", "key-of-the-first-team"),
        ] {
            assert_eq!(with(name, value).unwrap_err().status, 401, "{name}: {value}");
        }
    }

    #[test]
    fn files_that_are_refused_show_no_key() {
        for text in [
            "[]",
            "{}",
            "{\"secret-secret-secret\": 1}",
            "{\"secret\": \"a\"}",
            "{\"secret secret secret\": \"a\"}",
            "{\"secret-secret-secret\": \"a\\u0000b\"}",
            "{\"secret-secret-secret\": \"a\"",
        ] {
            let why = parse(text).unwrap_err().message().unwrap();
            assert!(why.starts_with("keys.json: ") && !why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn pairs_of_namespace_and_salt_differ() {
        let names = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("a", "\0b")];
        let all: std::collections::HashSet<String> = names.map(|(n, s)| prefix_namespace(n, s)).into();
        assert_eq!(all.len(), names.len());
    }
}
