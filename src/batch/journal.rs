//! The answers of a run on disk.
//!
//! Each answer is appended to `.OUT.partial` as soon as it is complete. After the last one the file is renamed to `OUT`, in the
//! order of the requests unless another order was requested. If the run ends early, `.OUT.partial` remains and `--resume`
//! continues from it. `OUT` itself is only ever replaced by a complete file.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs::{self, File},
    io::{self, BufRead, BufReader, Seek, Write},
    path::{Path, PathBuf},
};

use selkie_core::Error;

use super::request::{Known, Line};
use crate::{
    failure::{Failure, Outcome},
    output_file::{self, OutputFile},
    terminal,
};

/// The answers of a run, and which requests they belong to.
pub struct Journal {
    target: PathBuf,
    partial: PathBuf,
    file: File,
    answers: Vec<Place>,
    /// Bytes of whole answers.
    end: u64,
}

/// The position of an answer in the file.
#[derive(Clone, Copy)]
struct Place {
    request: usize,
    start: u64,
    len: u64,
}

/// `.OUT.partial` of `OUT`, whose links were followed.
pub fn partial(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default();
    let name: OsString = [".".as_ref(), name, ".partial".as_ref()].into_iter().collect();
    target.with_file_name(name)
}

impl Journal {
    /// A run without answers.
    ///
    /// # Errors
    /// If there are answers of an unfinished earlier run, or the file cannot be written.
    pub fn start(target: &Path) -> Outcome<Self> {
        let (target, partial) = places(target)?;
        let left = match File::open(&partial).map(BufReader::new) {
            Ok(file) => file.split(b'\n').map_while(Result::ok).filter(|line| line.ends_with(b"}")).count(),
            Err(_) => 0,
        };
        if left > 0 {
            return Err(Failure::Usage(format!(
                "{}: {left} answers of a run that did not reach its end; --resume goes on from there, or remove the file",
                partial.display()
            )));
        }
        Self::create(target, partial, |_| Ok(Vec::new()))
    }

    /// The answers of an earlier run to `lines`, but those that are errors: of one that did not reach its end or, if there
    /// is none, of a complete one.
    ///
    /// # Errors
    /// If files cannot be read or written, or none of the answers belongs to one of the lines.
    pub fn resume(target: &Path, lines: &[Line]) -> Outcome<Self> {
        let (target, partial) = places(target)?;
        let found = [&partial, &target].into_iter().find_map(|path| match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            file => Some((path.clone(), file)),
        });
        let Some((path, file)) = found else { return Self::create(target, partial, |_| Ok(Vec::new())) };
        let mut file = file.map_err(|e| Error::io(&path, e))?;
        let (kept, foreign) = keep(&file, lines).map_err(|e| Error::io(&path, e))?;
        if foreign > 0 && kept.is_empty() {
            let why = "the answers in this file belong to other requests; without --resume they are replaced";
            return Err(Failure::Usage(format!("{}: {why}", path.display())));
        }
        if foreign > 0 {
            let name = path.display();
            terminal::note(format_args!("{name}: {foreign} answers belong to no line of the input and are left out"));
        }
        Self::create(target, partial, |out| copy(&mut file, &kept, out))
    }

    /// A file with the answers that `fill` writes.
    fn create(
        target: PathBuf,
        partial: PathBuf,
        fill: impl FnOnce(&mut OutputFile) -> io::Result<Vec<Place>>,
    ) -> Outcome<Self> {
        let mode = match output_file::mode(&target)? {
            None => output_file::mode(&partial)?,
            mode => mode,
        };
        let mut out = OutputFile::beside(partial.clone(), mode).map_err(|e| match e {
            // The error names the user's file, because the cause is its folder.
            Error::Io { source, .. } => Error::io(&target, source),
            e => e,
        })?;
        let answers = fill(&mut out).map_err(|e| out.error(e))?;
        let end = answers.last().map_or(0, |a| a.start + a.len);
        Ok(Self { target, partial, file: out.publish()?, answers, end })
    }

    /// The requests that have an answer.
    pub fn answered(&self) -> impl Iterator<Item = usize> {
        self.answers.iter().map(|a| a.request)
    }

    /// How many answers there are.
    pub fn len(&self) -> usize {
        self.answers.len()
    }

    /// The file that holds them.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Appends the answer to a request.
    ///
    /// # Errors
    /// If it cannot be written, in which case nothing of it is left in the file.
    pub fn add(&mut self, request: usize, line: &str) -> Outcome {
        let line = format!("{line}\n");
        if let Err(e) = self.file.write_all(line.as_bytes()) {
            let _ = self.file.set_len(self.end);
            return Err(Error::io(&self.partial, e).into());
        }
        let len = line.len() as u64;
        self.answers.push(Place { request, start: self.end, len });
        self.end += len;
        Ok(())
    }

    /// Gives the file the name of the output; `ordered`: after the answers were brought into the order of the requests.
    ///
    /// # Errors
    /// If that fails; all answers are still in [`Journal::path`].
    pub fn finish(mut self, ordered: bool) -> Outcome {
        let sorted = self.answers.is_sorted_by_key(|a| a.request);
        let done = if ordered && !sorted { self.sort() } else { self.rename() };
        done.map_err(|e| {
            let order = if sorted { "" } else { ", in the order of completion" };
            Failure::Other(format!("{e}; all {} answers are in {}{order}", self.len(), self.partial.display()))
        })
    }

    fn sort(&mut self) -> Result<(), Error> {
        self.answers.sort_by_key(|a| a.request);
        let mode = self.file.metadata().map_err(|e| Error::io(&self.partial, e))?.permissions();
        let mut out = OutputFile::beside(self.target.clone(), Some(mode))?;
        copy(&mut self.file, &self.answers, &mut out).map_err(|e| out.error(e))?;
        out.commit()?;
        // The output is complete even if this fails.
        let _ = fs::remove_file(&self.partial);
        Ok(())
    }

    fn rename(&mut self) -> Result<(), Error> {
        self.file.sync_all().map_err(|e| Error::io(&self.partial, e))?;
        fs::rename(&self.partial, &self.target).map_err(|e| Error::io(&self.target, e))
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if self.answers.is_empty() {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Resolved target and its `.partial`, which no other process is writing.
fn places(target: &Path) -> Outcome<(PathBuf, PathBuf)> {
    let target = output_file::resolve(target)?;
    let partial = partial(&target);
    if output_file::is_locked(&partial) {
        return Err(Error::io(partial, io::Error::other("another run is writing this file")).into());
    }
    Ok((target, partial))
}

/// Copies answers one after another; returns their new positions.
fn copy(from: &mut File, answers: &[Place], to: &mut OutputFile) -> io::Result<Vec<Place>> {
    let (mut copied, mut end) = (Vec::with_capacity(answers.len()), 0);
    from.rewind()?;
    let mut reader = BufReader::new(from);
    let mut at = 0;
    for a in answers {
        // Keeps the buffer if it holds the next answer.
        reader.seek_relative((a.start as i64).wrapping_sub(at))?;
        let bytes = io::copy(&mut io::Read::take(&mut reader, a.len), to)?;
        if bytes < a.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at = (a.start + a.len) as i64;
        copied.push(Place { start: end, ..*a });
        end += a.len;
    }
    Ok(copied)
}

/// The first answer to each of `lines` that is not an error, in the order of the file, and the number of answers to other lines.
fn keep(file: &File, lines: &[Line]) -> io::Result<(Vec<Place>, usize)> {
    let requests = Requests::new(lines);
    let mut done = vec![false; lines.len()];
    let (mut kept, mut foreign, mut start) = (Vec::new(), 0, 0);
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        let len = line.len() as u64;
        // A killed run may have left a part of its last answer.
        let known = line.ends_with(b"\n").then(|| serde_json::from_slice::<Known>(&line).ok()).flatten();
        if let Some(known) = known.filter(Known::is_answer) {
            match requests.find(&known) {
                Some(request) if !done[request] => {
                    done[request] = true;
                    kept.push(Place { request, start, len });
                }
                Some(_) => {}
                None => foreign += 1,
            }
        }
        start += len;
        line.clear();
    }
    Ok((kept, foreign))
}

/// The key that matches an answer with its request: the id if it is unique, else the number and the text of the line.
struct Requests {
    by_id: HashMap<String, Option<usize>>,
    by_line: HashMap<(usize, String), usize>,
}

impl Requests {
    fn new(lines: &[Line]) -> Self {
        let mut by_id = HashMap::new();
        let mut by_line = HashMap::with_capacity(lines.len());
        for (request, line) in lines.iter().enumerate() {
            by_line.insert((line.number, line.hash()), request);
            if let Some(id) = line.id() {
                by_id.entry(id.get().to_owned()).and_modify(|of| *of = None).or_insert(Some(request));
            }
        }
        Self { by_id, by_line }
    }

    fn find(&self, known: &Known) -> Option<usize> {
        let by_id = known.key().and_then(|id| *self.by_id.get(id.get())?);
        by_id.or_else(|| self.by_line.get(&(known.line?, known.line_hash.clone()?)).copied())
    }
}
