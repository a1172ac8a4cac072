//! From the path of a URL to a file below one folder, and never to one outside.

use std::{
    fs::{self, File, Metadata},
    io,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use crate::embedded;

/// The files that are served.
#[derive(Debug)]
pub enum Site {
    /// A folder: its canonical path, without symbolic links.
    Folder(PathBuf),
    /// The page that is part of the program.
    Program,
}

/// The files of the page that is part of the program, with a hash of each; none if it was built without.
const PAGE: &[(&str, u64, &[u8])] = include!(concat!(env!("OUT_DIR"), "/page.rs"));
/// Where the page looks for the demo model.
const DEMO: &str = "models/demo/";

/// A file that may be sent.
#[derive(Debug)]
pub struct Found {
    /// Its content.
    pub body: Body,
    /// Its bytes.
    pub len: u64,
    /// Changes when the file does; with its quotes.
    pub etag: String,
    /// Its media type.
    pub mime: &'static str,
}

/// The content of a file.
#[derive(Debug)]
pub enum Body {
    /// Opened for reading.
    File(File),
    /// A part of the program.
    Bytes(&'static [u8]),
}

impl Site {
    /// The page that is part of the program, if there is one.
    pub fn program() -> Option<Self> {
        (!PAGE.is_empty()).then_some(Self::Program)
    }

    /// The page in the folder `dir`, which has an `index.html`.
    ///
    /// # Errors
    /// If it has none.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let root = dir.canonicalize()?;
        if !root.join("index.html").is_file() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "no index.html in it"));
        }
        Ok(Self::Folder(root))
    }

    /// The file that the target of a request (`/path?query`) names; `None` if there is none or it lies elsewhere.
    pub fn find(&self, target: &str) -> Option<Found> {
        let relative = relative(target)?;
        let Self::Folder(root) = self else { return part_of_program(&relative) };
        // Symbolic links may lead out of the folder, so the check is on the real path.
        let path = root.join(relative).canonicalize().ok()?;
        if !path.starts_with(root) {
            return None;
        }
        // Checked before opening: opening a pipe waits for a writer.
        fs::metadata(&path).ok().filter(Metadata::is_file)?;
        let file = File::open(&path).ok()?;
        let meta = file.metadata().ok().filter(Metadata::is_file)?;
        Some(Found { len: meta.len(), etag: etag(&meta), mime: mime(&path), body: Body::File(file) })
    }
}

/// A file of the page that is part of the program, or of the demo model.
fn part_of_program(path: &Path) -> Option<Found> {
    let name = path.to_str()?.replace('\\', "/");
    let (bytes, etag) = match name.strip_prefix(DEMO) {
        Some(file) => {
            let (_, bytes) = embedded::DEMO.files.iter().find(|(name, _)| *name == file)?;
            (*bytes, format!("\"{}-{:x}\"", env!("SELKIE_COMMIT"), bytes.len()))
        }
        None => {
            let (_, hash, bytes) = PAGE.iter().find(|(known, ..)| *known == name)?;
            (*bytes, format!("\"{hash:x}\""))
        }
    };
    Some(Found { len: bytes.len() as u64, etag, mime: mime(path), body: Body::Bytes(bytes) })
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
    fn the_program_has_the_demo_model_of_its_page() {
        let found = part_of_program("models/demo/config.json".as_ref()).unwrap();
        let Body::Bytes(bytes) = found.body else { panic!("a part of the program") };
        assert_eq!((found.len, found.mime), (bytes.len() as u64, "application/json"));
        for name in ["models/demo/", "models/demo/other.json", "config.json", "models/demo/../demo/config.json"] {
            assert!(part_of_program(name.as_ref()).is_none(), "{name}");
        }
        // With the page in it, or without.
        assert_eq!(Site::program().is_some(), part_of_program("index.html".as_ref()).is_some());
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
