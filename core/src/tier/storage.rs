//! What a disk tier stands on.

use std::{fmt::Debug, io, sync::Arc, time::Duration};

use super::Name;

/// What threads may share, where there are threads.
#[cfg(not(target_arch = "wasm32"))]
pub trait Anywhere: Send + Sync {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: Send + Sync + ?Sized> Anywhere for T {}
/// A page has one thread, and its files belong to that.
#[cfg(target_arch = "wasm32")]
pub trait Anywhere {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> Anywhere for T {}

/// Bytes by name that survive the process. What one process, or one that ends at any time, leaves of a value is all of it or
/// damage that its checksum finds.
pub trait Storage: Anywhere + Debug {
    /// Everything there, of other models too.
    ///
    /// # Errors
    /// Those of the file system.
    fn list(&self) -> io::Result<Vec<Found>>;

    /// Stores these pieces, one after the other, under a name of this model.
    ///
    /// # Errors
    /// Those of the file system. Nothing has that name then.
    fn write(&self, name: &Name, pieces: [&[u8]; 3]) -> io::Result<()>;

    /// Fills these pieces and notes that they are used now. False if they were not used for longer than `ttl`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if what is stored has another length; those of the file system.
    fn read(&self, name: &Name, pieces: [&mut [u8]; 3], ttl: Duration) -> io::Result<bool>;

    /// Deletes what has that name, if it is there.
    ///
    /// # Errors
    /// Those of the file system.
    fn remove(&self, file: &Stored) -> io::Result<()>;

    /// The place of a name, for messages.
    fn label(&self, name: &Name) -> String;
}

/// Something that is stored.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The folder of another model; `None`: of this one.
    pub folder: Option<Arc<str>>,
    /// Its name there.
    pub name: Name,
}

/// One entry of a list.
#[derive(Debug)]
pub struct Found {
    /// Where.
    pub file: Stored,
    /// What it takes.
    pub bytes: u64,
    /// Time since its last use; zero for a time in the future, which is that of another clock.
    pub age: Duration,
}
