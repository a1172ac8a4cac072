//! The contents of a repository: `GET /api/models/OWNER/NAME/revision/REV?blobs=true`.

use std::{io::Read, thread, time::Duration};

use selkie_core::source::is_plain_file_name;
use serde::Deserialize;

use crate::hub::{address::encode, fault::Fault, http::Client, name::Name, settings::Settings};

/// The longest answer that is read, in bytes.
const LONGEST_ANSWER: u64 = 64 << 20;
/// Attempts to get an answer from a reachable server, and the time before the second one; it doubles each time.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);

/// A commit of a repository.
#[derive(Clone, Debug)]
pub struct Listing {
    /// The commit's hash.
    pub commit: String,
    /// Its files.
    pub files: Vec<Remote>,
}

/// A file of a commit.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Its name, with `/` between folders.
    pub name: String,
    /// Size in bytes; 0 until it is known.
    pub size: u64,
    /// Names the content; empty until it is known.
    pub etag: String,
    /// Whether the etag is the sha256 of the content.
    pub hashed: bool,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Asks the hub for the files of a name's revision.
    ///
    /// # Errors
    /// Those of the request, and an answer that is not such a list.
    pub fn request(client: &Client, settings: &Settings, name: &Name) -> Result<Self, Fault> {
        let revision = encode(name.revision(), false);
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", settings.endpoint, name.repo());
        let nonsense = |why: String| Fault::Nonsense(format!("{url}: {why}"));
        let body = patiently(|| {
            let mut reply = client.get(&url, None)?;
            let mut body = Vec::new();
            let read = reply.body.as_reader().take(LONGEST_ANSWER).read_to_end(&mut body);
            read.map_err(|e| Fault::Cut(format!("{url}: {e}")))?;
            Ok(body)
        })?;
        let answer: Answer = serde_json::from_slice(&body)
            .map_err(|e| nonsense(format!("the answer is no list of a model's files: {e}; is HF_ENDPOINT right?")))?;
        if !is_name_of_content(&answer.sha) {
            return Err(nonsense(format!("{:?} is no commit", answer.sha)));
        }
        let files = answer.siblings.into_iter().filter_map(Remote::new).collect();
        Ok(Self { commit: answer.sha, files })
    }

    /// The file with this name.
    pub fn file(&self, name: &str) -> Option<&Remote> {
        self.files.iter().find(|f| f.name == name)
    }
}

impl Remote {
    /// `None` for a name that could mean a place outside the snapshot.
    fn new(file: Sibling) -> Option<Self> {
        if !file.rfilename.split('/').all(is_plain_file_name) {
            return None;
        }
        let hash = file.lfs.as_ref().and_then(|lfs| lfs.sha256.clone());
        let hashed = hash.as_deref().is_some_and(is_sha256);
        let size = file.lfs.and_then(|lfs| lfs.size).or(file.size);
        let etag = hash.or(file.blob_id).filter(|etag| is_name_of_content(etag));
        // Both or none: only then is the file known.
        let (etag, size) = etag.zip(size).unwrap_or_default();
        Some(Self { name: file.rfilename, size, hashed: hashed && !etag.is_empty(), etag })
    }

    /// Its address on the hub.
    pub fn url(&self, settings: &Settings, name: &Name, commit: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", settings.endpoint, name.repo(), encode(&self.name, true))
    }

    /// Asks for size and etag if the list had none, as those of some mirrors.
    ///
    /// # Errors
    /// Those of the request, and an answer without them.
    pub fn look_up(&mut self, client: &Client, settings: &Settings, name: &Name, commit: &str) -> Result<(), Fault> {
        if !self.etag.is_empty() {
            return Ok(());
        }
        let url = self.url(settings, name, commit);
        let meta = patiently(|| client.head(&url))?.meta;
        let etag = meta.etag.filter(|etag| is_name_of_content(etag));
        let Some((etag, size)) = etag.zip(meta.size) else {
            return Err(Fault::Nonsense(format!("{url}: the server says neither size nor etag")));
        };
        (self.hashed, self.etag, self.size) = (meta.linked && is_sha256(&etag), etag, size);
        Ok(())
    }
}

/// Asks again if the server is busy, but not if it is unreachable.
pub fn patiently<T>(ask: impl Fn() -> Result<T, Fault>) -> Result<T, Fault> {
    let mut attempt = 1;
    loop {
        match ask() {
            Err(fault @ (Fault::Cut(_) | Fault::Status { .. })) if fault.is_transient() && attempt < ATTEMPTS => {
                tracing::info!("{fault}; trying again");
                thread::sleep(PAUSE * 2u32.pow(attempt - 1));
                attempt += 1;
            }
            answer => return answer,
        }
    }
}

/// Whether `text` can be the name of a blob or a snapshot: the hub uses hexadecimal digits, mirrors use other letters too.
fn is_name_of_content(text: &str) -> bool {
    (1..=128).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_outside_the_snapshot_and_strange_etags_are_not_taken() {
        let remote = |json: &str| Remote::new(serde_json::from_str(json).unwrap());
        for name in ["../x", "/etc/passwd", "a/../../b", "a\\\\b", "a//b", ""] {
            assert!(remote(&format!(r#"{{"rfilename": "{name}", "size": 1, "blobId": "a1"}}"#)).is_none(), "{name}");
        }
        let file = remote(r#"{"rfilename": "a/b.json", "size": 3, "blobId": "a1"}"#).unwrap();
        assert_eq!((&*file.name, &*file.etag, file.size, file.hashed), ("a/b.json", "a1", 3, false));
        assert_eq!(remote(r#"{"rfilename": "a", "size": 3, "blobId": "../../x"}"#).unwrap().etag, "");
        assert_eq!(remote(r#"{"rfilename": "a"}"#).unwrap().etag, "");
        let sum = "ab".repeat(32);
        let json =
            format!(r#"{{"rfilename": "w", "size": 9, "blobId": "a1", "lfs": {{"sha256": "{sum}", "size": 7}}}}"#);
        let file = remote(&json).unwrap();
        assert_eq!((&*file.etag, file.size, file.hashed), (&*sum, 7, true));
    }
}
