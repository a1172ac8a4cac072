//! Names of models: `owner/name[@revision][:file]`.

use std::fmt;

use selkie_core::source::is_plain_file_name;

/// The longest owner or name.
const LONGEST_PART: usize = 96;
/// The revision of a name without one.
const MAIN: &str = "main";

/// A model of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The account that published it.
    pub owner: String,
    /// Its name in that account.
    pub model: String,
    /// Branch, tag or commit.
    pub revision: Option<String>,
    /// The requested file of weights, with `/` between folders.
    pub file: Option<String>,
}

impl Name {
    /// Parses `text` as a name, without a check that the model exists. Text that starts with a dot, a slash or a tilde,
    /// or does not have exactly one slash, is a path.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, file) = split(text, ':');
        let (repo, revision) = split(rest, '@');
        let (owner, model) = repo.split_once('/')?;
        let good = is_part(owner)
            && is_part(model)
            && revision.is_none_or(is_revision)
            && file.is_none_or(|file| file.split('/').all(is_plain_file_name));
        good.then(|| Self {
            owner: owner.into(),
            model: model.into(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// `owner/name`.
    pub fn repo(&self) -> String {
        format!("{}/{}", self.owner, self.model)
    }

    /// Branch, tag or commit: `main` if the name has none.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.model)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    match text.split_once(at) {
        Some((before, after)) => (before, Some(after)),
        None => (text, None),
    }
}

/// The hub's own rule for owners and names. Without `--`, which separates them in the names of the cache's folders.
pub fn is_part(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let edge = |c: char| matches!(c, '.' | '-');
    !text.is_empty()
        && text.len() <= LONGEST_PART
        && text.chars().all(inner)
        && !text.starts_with(edge)
        && !text.ends_with(edge)
        && !text.contains("..")
        && !text.contains("--")
}

fn is_revision(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | '+');
    text.chars().all(inner) && text.split('/').all(is_plain_file_name)
}

/// The candidates most like `wanted`, at most three, the nearest first: those that a few changed letters make of it, or that
/// contain it.
pub fn nearest<'a>(wanted: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let wanted = wanted.to_lowercase();
    let mut near: Vec<(usize, &str)> = candidates
        .into_iter()
        .filter_map(|name| {
            let lower = name.to_lowercase();
            let steps = distance(&wanted, &lower);
            let inside = lower.contains(&wanted) || wanted.contains(&*lower);
            (inside || steps <= wanted.len() / 3).then_some((steps, name))
        })
        .collect();
    near.sort();
    near.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Letters to insert, remove or replace to make `b` of `a` (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> Option<(String, String, Option<String>)> {
        Name::parse(text).map(|n| {
            assert_eq!(n.to_string(), text);
            (n.repo(), n.revision().to_owned(), n.file)
        })
    }

    #[test]
    fn names_have_an_owner_and_maybe_a_revision_and_a_file() {
        let some = |repo: &str, revision: &str, file: Option<&str>| {
            Some((repo.to_owned(), revision.to_owned(), file.map(str::to_owned)))
        };
        assert_eq!(parts("ibm/granite-4.0"), some("ibm/granite-4.0", "main", None));
        assert_eq!(parts("ibm/granite@v1"), some("ibm/granite", "v1", None));
        assert_eq!(parts("ibm/granite@refs/pr/1"), some("ibm/granite", "refs/pr/1", None));
        assert_eq!(parts("ibm/granite:a.gguf"), some("ibm/granite", "main", Some("a.gguf")));
        assert_eq!(parts("ibm/granite@v1:sub/a.gguf"), some("ibm/granite", "v1", Some("sub/a.gguf")));
    }

    #[test]
    fn paths_are_no_names() {
        for path in [
            "",
            "granite",
            "./granite",
            "../a",
            "/a/b",
            "~/a",
            "a/b/c",
            "a/",
            "a//b",
            "a\\b",
            "C:/a",
            "a/..",
            "a/.b",
            "a/b@",
            "a/b:",
            "a/b@../c",
            "a/b:../c",
            "a/b:/c",
            "a/b@x/../y",
            "a b/c",
            "a/b--c",
            "models--a/b",
        ] {
            assert_eq!(Name::parse(path), None, "{path:?}");
        }
    }

    #[test]
    fn the_nearest_names_come_first() {
        let names = ["model.safetensors", "granite-Q4_K_M.gguf", "granite-Q8_0.gguf", "README.md"];
        assert_eq!(nearest("granite-q8_0.gguf", names), ["granite-Q8_0.gguf", "granite-Q4_K_M.gguf"]);
        assert_eq!(nearest("Q8_0", names), ["granite-Q8_0.gguf"]);
        assert_eq!(nearest("something else", names), [""; 0]);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
