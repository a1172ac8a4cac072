//! From the path of a URL to a file below one folder, and never to one outside.

use std::{
    fs::{self, File, Metadata},
    io,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

/// The folder that is served.
#[derive(Debug)]
pub struct Site {
    /// Canonical: without symbolic links.
    root: PathBuf,
}

/// A file that may be sent.
#[derive(Debug)]
pub struct Found {
    /// Opened for reading.
    pub file: File,
    /// Its bytes.
    pub len: u64,
    /// Changes when the file does; with its quotes.
    pub etag: String,
    /// Its media type.
    pub mime: &'static str,
}

impl Site {
    /// The page in the folder `dir`, which has an `index.html`.
    ///
    /// # Errors
    /// If it has none.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let root = dir.canonicalize()?;
        if !root.join("index.html").is_file() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "no index.html in it"));
        }
        Ok(Self { root })
    }

    /// The file that the target of a request (`/path?query`) names; `None` if there is none or it lies elsewhere.
    pub fn find(&self, target: &str) -> Option<Found> {
        // Symbolic links may lead out, so the question is where the file is and not what it is called.
        let path = self.root.join(relative(target)?).canonicalize().ok()?;
        if !path.starts_with(&self.root) {
            return None;
        }
        // Before it is opened: opening a pipe waits for somebody who writes to it.
        fs::metadata(&path).ok().filter(Metadata::is_file)?;
        let file = File::open(&path).ok()?;
        let meta = file.metadata().ok().filter(Metadata::is_file)?;
        Some(Found { len: meta.len(), etag: etag(&meta), mime: mime(&path), file })
    }
}

/// The path below the root that a target names. Every part must be the plain name of a visible file on every system.
fn relative(target: &str) -> Option<PathBuf> {
    let path = target.split(['?', '#']).next().unwrap_or_default().strip_prefix('/')?;
    let mut relative = PathBuf::new();
    let mut parts = path.split('/').peekable();
    while let Some(part) = parts.next() {
        let name = decode(part)?;
        if name.is_empty() && parts.peek().is_none() {
            relative.push("index.html");
            break;
        }
        let plain = !name.is_empty() && !name.starts_with('.');
        if !plain || name.chars().any(|c| matches!(c, '/' | '\\' | ':') || c.is_control()) {
            return None;
        }
        relative.push(name);
    }
    Some(relative)
}

/// Undoes percent-encoding; `None` if it is broken or does not give UTF-8.
fn decode(part: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.bytes();
    while let Some(byte) = rest.next() {
        let byte = match byte {
            b'%' => {
                let digit = |c: Option<u8>| char::from(c?).to_digit(16);
                let high = digit(rest.next())?;
                u8::try_from(high * 16 + digit(rest.next())?).ok()?
            }
            byte => byte,
        };
        bytes.push(byte);
    }
    String::from_utf8(bytes).ok()
}

fn etag(meta: &Metadata) -> String {
    let modified = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    format!("\"{:x}-{:x}\"", meta.len(), modified.as_nanos())
}

fn mime(path: &Path) -> &'static str {
    match path.extension().and_then(|e| e.to_str()).unwrap_or_default() {
        "html" => "text/html; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "json" => "application/json",
        "webmanifest" => "application/manifest+json",
        "wasm" => "application/wasm",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "ico" => "image/vnd.microsoft.icon",
        "txt" | "md" | "ts" | "jinja" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_that_name_a_file() {
        for (target, path) in [
            ("/", "index.html"),
            ("/?v=1", "index.html"),
            ("/app.js", "app.js"),
            ("/js/worker.js?x=../y", "js/worker.js"),
            ("/models/demo/", "models/demo/index.html"),
            ("/a%20b%C3%A9.txt", "a b\u{e9}.txt"),
        ] {
            assert_eq!(relative(target), Some(path.into()), "{target}");
        }
    }

    #[test]
    fn targets_that_try_to_escape() {
        for target in [
            "",
            "*",
            "index.html",
            "http://localhost/",
            "//etc/passwd",
            "/../x",
            "/a/../x",
            "/..",
            "/.",
            "/./x",
            "/%2e%2e/x",
            "/%2E%2e%2fx",
            "/a%2fb",
            "/..%5cx",
            "/a\\..\\x",
            "/%5c%5chost/x",
            "/c:/x",
            "/c%3ax",
            "/x%00.js",
            "/.git/config",
            "/%2",
            "/%zz",
            "/%+1",
            "/%ff",
            "/a//b",
            "/a\nb",
        ] {
            assert_eq!(relative(target), None, "{target:?}");
        }
    }
}
