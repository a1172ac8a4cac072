//! Rooms: prompts that are computed for somebody who comes for them. A room holds the prompt's tokens; its states and pages are in
//! the prefix cache, as those of every prompt. So a room that nobody comes to costs a few bytes, for a while.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::sleep};

use crate::serve::refusal::Refusal;

/// How long a computed prompt can be fetched.
const KEPT: Duration = Duration::from_secs(30);
/// Most tokens in all rooms together: 256 MiB.
const MOST_TOKENS: usize = 64 << 20;

/// All rooms.
pub struct Rooms {
    open: Mutex<HashMap<u64, Arc<Room>>>,
    /// Changes when one is opened.
    opened: watch::Sender<()>,
    /// Tokens of rooms that somebody holds.
    tokens: Arc<AtomicUsize>,
    kept: Duration,
}

/// A prompt that is being computed, or was.
pub struct Room {
    pub tokens: Vec<u32>,
    pub namespace: String,
    progress: watch::Sender<Progress>,
    all: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Computing,
    Computed,
    Failed,
}

/// A room in the hands of the request that computes its prompt. Dropped before that, the room has failed.
pub struct Opened {
    rooms: Arc<Rooms>,
    number: u64,
    room: Arc<Room>,
}

impl Rooms {
    /// None yet.
    pub fn new() -> Arc<Self> {
        Self::keeping(KEPT)
    }

    fn keeping(kept: Duration) -> Arc<Self> {
        let opened = watch::Sender::new(());
        Arc::new(Self { open: Mutex::default(), opened, tokens: Arc::default(), kept })
    }

    /// Opens a room.
    ///
    /// # Errors
    /// 400 if its number is in use, 503 if there are too many.
    pub fn open(self: &Arc<Self>, number: u64, tokens: Vec<u32>, namespace: &str) -> Result<Opened, Refusal> {
        let count = tokens.len();
        let add = |all: usize| all.checked_add(count).filter(|sum| *sum <= MOST_TOKENS);
        if self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_err() {
            let why = "too many computed prompts wait for those who fetch them; try again later";
            return Err(Refusal { retry_after: Some(5), ..Refusal::new(503, why).coded("rooms_full") });
        }
        let progress = watch::Sender::new(Progress::Computing);
        let room = Arc::new(Room { tokens, namespace: namespace.to_owned(), progress, all: self.tokens.clone() });
        let mut open = self.lock();
        if open.get(&number).is_some_and(|old| *old.progress.borrow() == Progress::Computing) {
            return Err(Refusal::field("bootstrap_room", format!("`bootstrap_room` {number} is in use")));
        }
        open.insert(number, room.clone());
        drop(open);
        self.opened.send_replace(());
        Ok(Opened { rooms: self.clone(), number, room })
    }

    /// Waits for a room and takes it: nobody else finds it any more.
    pub async fn take(&self, number: u64) -> Arc<Room> {
        let mut opened = self.opened.subscribe();
        loop {
            if let Some(room) = self.lock().remove(&number) {
                return room;
            }
            // The sender is a part of this.
            let _ = opened.changed().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Room>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes a room, unless it was taken or its number has another one.
    fn close(&self, number: u64, room: &Weak<Room>) {
        let mut open = self.lock();
        if open.get(&number).is_some_and(|found| std::ptr::eq(Arc::as_ptr(found), room.as_ptr())) {
            open.remove(&number);
        }
    }
}

impl Room {
    /// Waits until its prompt is computed; false if it never will be.
    pub async fn computed(&self) -> bool {
        let mut progress = self.progress.subscribe();
        let done = progress.wait_for(|now| *now != Progress::Computing).await;
        done.is_ok_and(|now| *now == Progress::Computed)
    }

    /// Whether that wait would be over.
    pub fn is_over(&self) -> bool {
        *self.progress.borrow() != Progress::Computing
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.all.fetch_sub(self.tokens.len(), Ordering::Relaxed);
    }
}

impl Opened {
    /// The prompt is computed. The room is closed after a while.
    pub fn computed(self) {
        self.room.progress.send_replace(Progress::Computed);
        let (rooms, number, room) = (self.rooms.clone(), self.number, Arc::downgrade(&self.room));
        tokio::spawn(async move {
            sleep(rooms.kept).await;
            rooms.close(number, &room);
        });
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let failed = self.room.progress.send_if_modified(|now| {
            let failed = *now == Progress::Computing;
            *now = if failed { Progress::Failed } else { *now };
            failed
        });
        if failed {
            self.rooms.close(self.number, &Arc::downgrade(&self.room));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    fn run(work: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work);
    }

    #[test]
    fn whoever_comes_first_waits_for_the_other() {
        run(async {
            let rooms = Rooms::new();
            let early = {
                let rooms = rooms.clone();
                tokio::spawn(async move { rooms.take(7).await })
            };
            tokio::task::yield_now().await;
            let opened = rooms.open(7, vec![1, 2], "team").unwrap();
            let room = timeout(SOON, early).await.unwrap().unwrap();
            assert_eq!((&room.tokens[..], &*room.namespace), (&[1, 2][..], "team"));
            opened.computed();
            assert!(timeout(SOON, room.computed()).await.unwrap());
            // It was taken: nobody finds it again.
            assert!(timeout(Duration::from_millis(20), rooms.take(7)).await.is_err());
            drop(room);
            assert_eq!(rooms.tokens.load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn a_room_that_nobody_fetches_is_closed() {
        run(async {
            let rooms = Rooms::keeping(Duration::from_millis(20));
            rooms.open(1, vec![0; 9], "").unwrap().computed();
            assert_eq!((rooms.lock().len(), rooms.tokens.load(Ordering::Relaxed)), (1, 9));
            sleep(Duration::from_millis(200)).await;
            assert_eq!((rooms.lock().len(), rooms.tokens.load(Ordering::Relaxed)), (0, 0));
        });
    }

    #[test]
    fn a_request_that_fails_says_so_and_leaves_nothing() {
        run(async {
            let rooms = Rooms::new();
            let opened = rooms.open(1, vec![0; 9], "").unwrap();
            assert_eq!(rooms.open(1, vec![], "").err().unwrap().param.as_deref(), Some("bootstrap_room"));
            let room = rooms.take(1).await;
            drop(opened);
            assert!(!timeout(SOON, room.computed()).await.unwrap());
            drop(rooms.open(2, vec![0; 9], "").unwrap());
            drop(room);
            assert_eq!((rooms.lock().len(), rooms.tokens.load(Ordering::Relaxed)), (0, 0));
            assert_eq!(rooms.open(3, vec![0; MOST_TOKENS + 1], "").err().unwrap().status, 503);
        });
    }

    #[test]
    fn a_number_can_be_used_again_once_its_prompt_is_computed() {
        run(async {
            let rooms = Rooms::keeping(Duration::from_millis(20));
            rooms.open(1, vec![1], "").unwrap().computed();
            let _second = rooms.open(1, vec![2], "").unwrap();
            // The first one's end does not close the second.
            sleep(Duration::from_millis(100)).await;
            assert_eq!(rooms.take(1).await.tokens, [2]);
        });
    }
}
