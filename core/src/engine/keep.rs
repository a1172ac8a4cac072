//! What an engine holds goes to disk before it ends.

use super::{Engine, lower::Lower};
use crate::{
    backend::Backend,
    error::Result,
    state::cache::Evicted,
    tier::{Content, Host, Name},
};

impl Lower {
    /// Whether this has something that the disk lacks and that was not written before: what was may be gone for lack of room.
    fn keeps(&mut self, lost: &Evicted) -> bool {
        let values = [(Content::Page, lost.page), (self.state_content(), lost.slot)];
        let mut names = values.into_iter().filter(|(_, entry)| *entry != 0);
        names.any(|(content, _)| {
            let name = Name { key: lost.key, content };
            self.wants(&name) && self.kept.insert(name)
        })
    }
}

impl<B: Backend> Engine<B> {
    /// Writes what the tree holds to disk, if there is that tier, so that the next process finds it. Nobody needs the engine any
    /// more.
    ///
    /// # Errors
    /// A device error.
    pub async fn retire(&mut self) -> Result<()> {
        let Some(mut lower) = self.lower.take_if(|lower| lower.disk.is_some() && !self.failed) else { return Ok(()) };
        lower.host = Host::new(0);
        for lost in self.scheduler.contents() {
            self.copy(&mut lower, lost)?;
            // One at a time: there may be more than the host has memory for.
            lower.settle().await?;
            if let Some(disk) = &lower.disk {
                disk.flush();
            }
        }
        Ok(())
    }

    /// Writes some of what the tree holds to disk, if there is that tier, for a process that does not learn of its end. To be called
    /// while no request runs, until it returns false: then there is nothing more to write.
    ///
    /// The future may be dropped before it is ready.
    ///
    /// # Errors
    /// A device error.
    pub async fn keep(&mut self) -> Result<bool> {
        let Some(mut lower) = self.lower.take_if(|lower| lower.disk.is_some() && !self.failed) else {
            return Ok(false);
        };
        let next = self.scheduler.contents().into_iter().find(|lost| lower.keeps(lost));
        let more = next.is_some();
        let copied = next.map_or(Ok(()), |lost| self.copy(&mut lower, lost));
        let lower = self.lower.insert(lower);
        copied?;
        lower.settle().await?;
        if let Some(disk) = &lower.disk {
            disk.flush();
        }
        Ok(more)
    }

    /// Goes on without a disk tier. What is there stays.
    pub fn close_disk(&mut self) {
        if let Some(lower) = &mut self.lower {
            lower.disk = None;
        }
    }
}
