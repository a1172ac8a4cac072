//! Values in two files of equal cells, one of pages and one of states: for a page, which opens files slowly and then reads and writes
//! them at once. One process has them at a time.
//!
//! A **cell** is the time of its last use (u64, milliseconds since 1970) and a record. Of a free cell the head is not that of a
//! record. A value is written after its head was made invalid and before the new one, so that a process that ends meanwhile leaves
//! a free cell; what a loss of power does, the checksum finds. Free cells at the end are cut off, others are used again.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use super::{
    Content, Flat, Flats, Name,
    record::{self, HEAD, TAIL, bad},
    shelf::lock,
    storage::{Found, Storage, Stored},
};
use crate::{digest::Digest, state::PrefixKey};

/// Bytes of the time of the last use.
const TIME: usize = 8;

/// Both files.
#[derive(Debug)]
pub struct Cells {
    pages: Mutex<Sheet>,
    states: Mutex<Sheet>,
    now: fn() -> u64,
}

/// One file.
#[derive(Debug)]
struct Sheet {
    file: Arc<dyn Flat>,
    content: Content,
    /// Bytes of a value.
    value: u64,
    /// What each cell holds, and when it was last used; `None`: it is free.
    cells: Vec<Option<(PrefixKey, u64)>>,
    index: HashMap<PrefixKey, usize>,
}

impl Cells {
    /// Reads the heads of all cells. `bytes` are those of a page and of a state, which is a `state`.
    ///
    /// # Errors
    /// Those of the files.
    pub fn open(flats: &Flats, bytes: [u64; 2], state: Content) -> io::Result<Self> {
        Ok(Self {
            pages: Mutex::new(Sheet::open(flats.pages.clone(), Content::Page, bytes[0])?),
            states: Mutex::new(Sheet::open(flats.states.clone(), state, bytes[1])?),
            now: flats.now,
        })
    }

    fn sheet(&self, content: Content) -> &Mutex<Sheet> {
        match content {
            Content::Page => &self.pages,
            Content::State | Content::Int8 => &self.states,
        }
    }
}

impl Storage for Cells {
    fn list(&self) -> io::Result<Vec<Found>> {
        let now = (self.now)();
        let mut found = Vec::new();
        for sheet in [&self.pages, &self.states] {
            let sheet = lock(sheet);
            found.extend(sheet.cells.iter().flatten().map(|&(key, used)| Found {
                file: Stored { folder: None, name: Name { key, content: sheet.content } },
                bytes: sheet.cell(),
                age: Duration::from_millis(now.saturating_sub(used)),
            }));
        }
        Ok(found)
    }

    fn write(&self, name: &Name, pieces: [&[u8]; 3]) -> io::Result<()> {
        lock(self.sheet(name.content)).write(name.key, pieces, (self.now)())
    }

    fn read(&self, name: &Name, pieces: [&mut [u8]; 3], ttl: Duration) -> io::Result<bool> {
        lock(self.sheet(name.content)).read(name.key, pieces, (self.now)(), ttl)
    }

    fn remove(&self, file: &Stored) -> io::Result<()> {
        lock(self.sheet(file.name.content)).remove(file.name.key)
    }

    fn label(&self, name: &Name) -> String {
        format!("the {:?} {}", name.content, name.key.0)
    }
}

impl Sheet {
    fn open(file: Arc<dyn Flat>, content: Content, value: u64) -> io::Result<Self> {
        let (cells, index) = (Vec::new(), HashMap::new());
        let mut sheet = Self { file, content, value, cells, index };
        let mut start = [0; TIME + HEAD];
        // What is behind the last whole cell was not completely written.
        for i in 0..sheet.file.size()? / sheet.cell() {
            sheet.file.read(i * sheet.cell(), &mut start)?;
            let key = sheet.parse(&start[TIME..]).filter(|key| !sheet.index.contains_key(key));
            if let Some(key) = key {
                sheet.index.insert(key, i as usize);
            }
            let used = u64::from_le_bytes(start[..TIME].try_into().unwrap_or_default());
            sheet.cells.push(key.map(|key| (key, used)));
        }
        Ok(sheet)
    }

    /// The key in a head of a record of this file.
    fn parse(&self, head: &[u8]) -> Option<PrefixKey> {
        let key = PrefixKey(Digest(head.get(16..48)?.try_into().ok()?));
        (record::head(&Name { key, content: self.content }, self.value) == head).then_some(key)
    }

    /// Bytes of a cell.
    fn cell(&self) -> u64 {
        (TIME + HEAD + TAIL) as u64 + self.value
    }

    fn write(&mut self, key: PrefixKey, [head, value, tail]: [&[u8]; 3], now: u64) -> io::Result<()> {
        if value.len() as u64 != self.value {
            return Err(bad("it has another length than values of this model"));
        }
        // Its content is that of the new value or damaged.
        self.remove(key)?;
        let i = self.cells.iter().position(Option::is_none).unwrap_or(self.cells.len());
        let at = i as u64 * self.cell();
        let behind = at + (TIME + HEAD) as u64;
        self.file.write(behind, value)?;
        self.file.write(behind + self.value, tail)?;
        // The cell is free until these bytes are there.
        let mut start = [0; TIME + HEAD];
        start[..TIME].copy_from_slice(&now.to_le_bytes());
        start[TIME..].copy_from_slice(head);
        self.file.write(at, &start)?;
        if i == self.cells.len() {
            self.cells.push(None);
        }
        self.cells[i] = Some((key, now));
        self.index.insert(key, i);
        Ok(())
    }

    fn read(&mut self, key: PrefixKey, pieces: [&mut [u8]; 3], now: u64, ttl: Duration) -> io::Result<bool> {
        let i = *self.index.get(&key).ok_or(io::ErrorKind::NotFound)?;
        if let Some((_, used)) = &mut self.cells[i] {
            if u128::from(now.saturating_sub(*used)) > ttl.as_millis() {
                return Ok(false);
            }
            *used = now;
        }
        if pieces[1].len() as u64 != self.value {
            return Err(bad("it has another length than values of this model"));
        }
        let cell = i as u64 * self.cell();
        let mut at = cell + TIME as u64;
        for piece in pieces {
            self.file.read(at, piece).map_err(|_| bad("it is cut"))?;
            at += piece.len() as u64;
        }
        // If that cannot be said, it is deleted earlier.
        let _ = self.file.write(cell, &now.to_le_bytes());
        Ok(true)
    }

    fn remove(&mut self, key: PrefixKey) -> io::Result<()> {
        let Some(i) = self.index.remove(&key) else { return Ok(()) };
        self.cells[i] = None;
        if i + 1 < self.cells.len() {
            return self.file.write(i as u64 * self.cell(), &[0; TIME + HEAD]);
        }
        while self.cells.last().is_some_and(Option::is_none) {
            self.cells.pop();
        }
        self.file.resize(self.cells.len() as u64 * self.cell())
    }
}
