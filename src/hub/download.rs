//! One file: parallel ranges, retries, resume, checksum.

use std::{
    fs,
    io::{self, Read},
    ops::Range,
    path::Path,
    sync::{Condvar, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use selkie_core::Error;

use crate::hub::{
    assemble::Assembler,
    fault::Fault,
    http::{Client, Reply},
};

/// Bytes of one request, and how far requests run ahead of what is written: what waits for bytes before it waits in memory.
const RANGE: u64 = 8 << 20;
const AHEAD: u64 = 64 << 20;
/// Connections to a server at a time.
const CONNECTIONS: u64 = 6;
/// Attempts in a row that bring nothing, and the time before the second one; it doubles each time.
const ATTEMPTS: u32 = 6;
const PAUSE: Duration = Duration::from_millis(200);
/// Bytes read at once.
const PIECE: usize = 128 << 10;

/// A file to download.
pub struct Download<'a> {
    /// Whom to ask.
    pub client: &'a Client,
    /// Where the hub has it.
    pub url: &'a str,
    /// What names its content, a sha256 if `hashed`.
    pub etag: &'a str,
    /// Whether the content is compared with the etag.
    pub hashed: bool,
    /// Its size in bytes.
    pub size: u64,
    /// Where it grows. What is there is its start.
    pub part: &'a Path,
}

impl Download<'_> {
    /// Downloads what is missing of it and checks the whole.
    ///
    /// # Errors
    /// The part stays, unless all of it is there and is wrong.
    pub fn run(&self) -> Result<(), Fault> {
        loop {
            let part = Assembler::open(self.part, self.size, self.hashed).map_err(|e| self.local(e))?;
            let kept = part.written();
            let found = self.fill(part)?.finish().map_err(|e| self.local(e))?;
            if found.as_deref().is_none_or(|sum| sum == self.etag) {
                return Ok(());
            }
            fs::remove_file(self.part).map_err(|e| self.local(e))?;
            self.client.progress.add(-(self.size as i64));
            if kept == 0 {
                let why = format!(
                    "{}: what came has the sha256 {}, not {} as the hub says; it was removed",
                    self.url,
                    found.unwrap_or_default(),
                    self.etag
                );
                return Err(Fault::Nonsense(why));
            }
            let progress = &self.client.progress;
            progress.say(format_args!("{}: the part that was here is damaged; starting again", self.url));
        }
    }

    fn fill(&self, part: Assembler) -> Result<Assembler, Fault> {
        let start = part.written();
        let state = State { part, next: start, answered: false, fault: None };
        let transfer = Transfer {
            file: self,
            start,
            storage: Mutex::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        let workers = (self.size - start).div_ceil(RANGE).clamp(1, CONNECTIONS);
        thread::scope(|scope| {
            for _ in 1..workers {
                scope.spawn(|| transfer.work());
            }
            transfer.work();
        });
        let state = transfer.state.into_inner().expect("no worker panicked");
        state.fault.map_or(Ok(state.part), Err)
    }

    fn local(&self, e: io::Error) -> Fault {
        Fault::Local(Error::io(self.part, e))
    }
}

struct State {
    part: Assembler,
    /// Where the next request begins.
    next: u64,
    /// Whether there was an answer: until then there is one request only, which shows if the server sends ranges.
    answered: bool,
    /// What ended the download.
    fault: Option<Fault>,
}

struct Transfer<'a> {
    file: &'a Download<'a>,
    start: u64,
    /// Where the hub sends requests for this file, if anywhere; such addresses are valid for some time.
    storage: Mutex<Option<String>>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Transfer<'_> {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no worker panicked")
    }

    /// Requests ranges until there are no more.
    fn work(&self) {
        while let Some(range) = self.claim() {
            if let Err(fault) = self.fetch(range) {
                self.lock().fault.get_or_insert(fault);
                self.changed.notify_all();
            }
        }
    }

    /// The next range; waits while too much is on its way.
    fn claim(&self) -> Option<Range<u64>> {
        let mut state = self.lock();
        loop {
            if state.fault.is_some() || state.next >= self.file.size {
                return None;
            }
            let may = if state.answered { state.next < state.part.written() + AHEAD } else { state.next == self.start };
            if may {
                let range = state.next..(state.next + RANGE).min(self.file.size);
                state.next = range.end;
                return Some(range);
            }
            state = self.changed.wait(state).expect("no worker panicked");
        }
    }

    /// All of a range, in as many requests as it takes.
    fn fetch(&self, range: Range<u64>) -> Result<(), Fault> {
        let Range { start: mut at, mut end } = range;
        let mut attempts = 0;
        while at < end {
            let before = at;
            let Err(fault) = self.request(&mut at, &mut end) else { continue };
            attempts = if at > before { 1 } else { attempts + 1 };
            if !fault.is_transient() || attempts >= ATTEMPTS {
                return Err(fault);
            }
            tracing::info!("{fault}; trying again from byte {at}");
            thread::sleep(PAUSE * 2u32.pow(attempts - 1));
            if self.lock().fault.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// One request for `at..end`; `at` moves on with what came. A server that knows no ranges sends everything from the start,
    /// to one connection.
    fn request(&self, at: &mut u64, end: &mut u64) -> Result<(), Fault> {
        let mut reply = self.open(*at..*end)?;
        let whole = reply.status != 206;
        {
            let mut state = self.lock();
            if whole && !state.answered {
                (state.next, *end) = (self.file.size, self.file.size);
            }
            state.answered = true;
            self.changed.notify_all();
        }
        let cut =
            |why: String| Fault::Cut(format!("{}: the connection broke at byte {at}: {why}", self.file.url, at = *at));
        let mut body = reply.body.as_reader();
        if whole {
            let known = io::copy(&mut (&mut body).take(*at), &mut io::sink()).map_err(|e| cut(e.to_string()))?;
            if known < *at {
                return Err(cut("it ended".into()));
            }
        }
        let mut buffer = vec![0; PIECE];
        while *at < *end {
            let most = buffer.len().min((*end - *at) as usize);
            let read = body.read(&mut buffer[..most]);
            match read {
                Ok(0) => return Err(Fault::Cut(format!("{}: the connection ended at byte {at}", self.file.url))),
                Ok(n) => {
                    let mut state = self.lock();
                    if state.fault.is_some() {
                        *at = *end;
                        return Ok(());
                    }
                    state.part.add(*at, &buffer[..n]).map_err(|e| self.file.local(e))?;
                    *at += n as u64;
                    self.changed.notify_all();
                    drop(state);
                    self.file.client.progress.add(n as i64);
                }
                Err(e) => return Err(Fault::Cut(format!("{}: the connection broke at byte {at}: {e}", self.file.url))),
            }
        }
        Ok(())
    }

    /// The answer to one request, which is of the right file.
    fn open(&self, range: Range<u64>) -> Result<Reply, Fault> {
        let storage = self.storage.lock().expect("no worker panicked").clone();
        if let Some(url) = storage {
            match self.file.client.get(&url, Some(range.clone())) {
                // The address is no longer valid; the hub has another one.
                Err(Fault::Status { status: 400..=410, .. }) => {
                    *self.storage.lock().expect("no worker panicked") = None
                }
                reply => return self.checked(reply?, &range),
            }
        }
        let reply = match self.file.client.get(self.file.url, Some(range.clone())) {
            Err(Fault::Status { status: 416, .. }) => {
                return Err(Fault::Changed(format!("{}: it is shorter than listed", self.file.url)));
            }
            reply => self.checked(reply?, &range)?,
        };
        if reply.url != self.file.url {
            *self.storage.lock().expect("no worker panicked") = Some(reply.url.clone());
        }
        Ok(reply)
    }

    fn checked(&self, reply: Reply, range: &Range<u64>) -> Result<Reply, Fault> {
        let changed = |what: &str| Err(Fault::Changed(format!("{}: {what}", self.file.url)));
        // Servers that are no hub make up etags of their own, which have other lengths.
        let other = |etag: &String| etag.len() == self.file.etag.len() && etag != self.file.etag;
        if reply.meta.etag.as_ref().is_some_and(other) {
            return changed("its content is no longer the one that was listed");
        }
        match (reply.status, reply.part) {
            (206, Some((start, _))) if start != range.start => Err(Fault::Nonsense(format!(
                "{}: the server sends another range than the one asked for",
                self.file.url
            ))),
            (206, Some((_, Some(total)))) if total != self.file.size => changed("its size is no longer the one listed"),
            (200 | 206, _) => Ok(reply),
            (status, _) => Err(Fault::Nonsense(format!("{}: the server answers {status}", self.file.url))),
        }
    }
}
