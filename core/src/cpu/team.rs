//! The threads that help with forked work.
//!
//! A decode step forks about a hundred times for ten to fifty microseconds each: too short to wake a sleeping thread.
//! So threads borrowed from rayon's pool stay for a moment after they helped and watch for the next fork. The caller
//! does not wait for absent helpers: it starts immediately and takes pieces like the others. When no piece is left it
//! shuts the gate and waits only for the helpers that are still inside with their last piece.
//!
//! All threads of the process share one team, except those that were given one of their own: ranks, which work concurrently.

use std::cell::{RefCell, UnsafeCell};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// A fork's work: what to call, by piece.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// How long a helper watches for the next fork before it goes back to rayon: longer than the host's work between the
/// ops of a step and between steps.
const LINGER: Duration = Duration::from_micros(200);

/// Bit of [`Team::gate`]: helpers may enter.
const OPEN: u64 = 1 << 31;

#[derive(Default)]
struct Team {
    /// A fork is under way. Others that come meanwhile run alone.
    busy: AtomicBool,
    /// Number of the fork (upper half), [`OPEN`], and how many helpers are inside (the rest).
    gate: AtomicU64,
    /// Helpers that watch the gate or are about to.
    helpers: AtomicUsize,
    /// Next piece to take.
    next: AtomicUsize,
    /// A helper's piece panicked.
    failed: AtomicBool,
    /// Valid while the gate is open or a helper is inside: the work and its number of pieces.
    work: UnsafeCell<Option<(Work<'static>, usize)>>,
}

// SAFETY: `work` is written by the owner of `busy` alone while the gate is shut and no helper is inside; helpers read it
// only between entering the open gate and leaving.
unsafe impl Sync for Team {}

static SHARED: LazyLock<Arc<Team>> = LazyLock::new(Arc::default);

thread_local! {
    /// The team of this thread alone, and its threads.
    static OWN: RefCell<Option<(Arc<Team>, usize)>> = const { RefCell::new(None) };
}

/// Gives the calling thread a team of its own, of `threads` threads with itself.
pub(super) fn own(threads: usize) {
    OWN.set(Some((Arc::default(), threads)));
}

/// Threads of the calling thread's own team, if it has one.
pub(super) fn own_threads() -> Option<usize> {
    OWN.with_borrow(|own| own.as_ref().map(|(_, threads)| *threads))
}

/// Calls `f(i)` once for every `i < n` on up to `threads` threads, this one included. `false`: nothing was called,
/// because another fork is under way.
pub(super) fn fork(n: usize, threads: usize, f: Work<'_>) -> bool {
    let team = OWN.with_borrow(|own| own.as_ref().map_or_else(|| SHARED.clone(), |(team, _)| team.clone()));
    if team.busy.swap(true, Ordering::Acquire) {
        return false;
    }
    // SAFETY: the owner of `busy` is the only thread here, the gate is shut and no helper is inside. `Shut` below keeps `f`
    // borrowed until that is so again, also when `f` panics.
    unsafe { *team.work.get() = Some((std::mem::transmute::<Work<'_>, Work<'static>>(f), n)) };
    team.next.store(0, Ordering::Relaxed);
    team.failed.store(false, Ordering::Relaxed);
    let number = team.gate.load(Ordering::Relaxed) >> 32;
    team.gate.store(number.wrapping_add(1) << 32 | OPEN, Ordering::Release);
    let shut = Shut(&team);
    while team.helpers.load(Ordering::Relaxed) + 1 < threads.min(n) {
        team.helpers.fetch_add(1, Ordering::Relaxed);
        let team = team.clone();
        rayon::spawn(move || help(&team));
    }
    take_pieces(&team, n, f);
    drop(shut);
    true
}

fn take_pieces(team: &Team, n: usize, f: Work<'_>) {
    loop {
        let i = team.next.fetch_add(1, Ordering::Relaxed);
        if i >= n {
            break;
        }
        f(i);
    }
}

/// Ends a fork: shuts the gate and waits until no helper is inside.
struct Shut<'a>(&'a Team);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        let team = self.0;
        let mut gate = team.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while gate & (OPEN - 1) != 0 {
            spins += 1;
            // The helper may have lost its processor: to this thread, if there are more threads than processors.
            if spins > 2000 {
                std::thread::yield_now()
            } else {
                spin_loop()
            }
            gate = team.gate.load(Ordering::Acquire);
        }
        let failed = team.failed.load(Ordering::Relaxed);
        team.busy.store(false, Ordering::Release);
        assert!(!failed || std::thread::panicking(), "a helper's piece panicked");
    }
}

/// The life of a helper: enters each fork once, leaves when none has come for a while.
fn help(team: &Team) {
    let (mut seen, mut spins, mut idle_since) = (0, 0u32, Instant::now());
    loop {
        let gate = team.gate.load(Ordering::Acquire);
        if gate & OPEN != 0 && gate >> 32 != seen {
            if team.gate.compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                seen = gate >> 32;
                // SAFETY: this thread is inside, so the work stays valid and unwritten.
                let work = unsafe { *team.work.get() };
                let (f, n) = work.expect("an open gate has work behind it");
                if catch_unwind(AssertUnwindSafe(|| take_pieces(team, n, f))).is_err() {
                    team.failed.store(true, Ordering::Relaxed);
                }
                team.gate.fetch_sub(1, Ordering::Release);
                (spins, idle_since) = (0, Instant::now());
            }
            continue;
        }
        spins += 1;
        spin_loop();
        if spins.is_multiple_of(64) && idle_since.elapsed() > LINGER {
            break;
        }
    }
    team.helpers.fetch_sub(1, Ordering::Relaxed);
}
