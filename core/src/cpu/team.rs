//! The threads that help with forked work.
//!
//! A decode step forks about a hundred times for ten to fifty microseconds each: too short to wake a sleeping thread.
//! So threads borrowed from rayon's pool stay for a moment after they helped and watch for the next fork. The caller
//! does not wait for absent helpers: it starts immediately and takes pieces like the others. When no piece is left it
//! shuts the gate and waits only for the helpers that are still inside with their last piece.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A fork's work: what to call, by piece.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// How long a helper watches for the next fork before it goes back to rayon: longer than the host's work between the
/// ops of a step and between steps.
const LINGER: Duration = Duration::from_micros(200);

/// Bit of [`Team::gate`]: helpers may enter.
const OPEN: u64 = 1 << 31;

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

static TEAM: Team = Team {
    busy: AtomicBool::new(false),
    gate: AtomicU64::new(0),
    helpers: AtomicUsize::new(0),
    next: AtomicUsize::new(0),
    failed: AtomicBool::new(false),
    work: UnsafeCell::new(None),
};

/// Calls `f(i)` once for every `i < n` on up to `threads` threads, this one included. `false`: nothing was called,
/// because another fork is under way.
pub(super) fn fork(n: usize, threads: usize, f: Work<'_>) -> bool {
    if TEAM.busy.swap(true, Ordering::Acquire) {
        return false;
    }
    // SAFETY: the owner of `busy` is the only thread here, the gate is shut and no helper is inside. `Shut` below keeps `f`
    // borrowed until that is so again, also when `f` panics.
    unsafe { *TEAM.work.get() = Some((std::mem::transmute::<Work<'_>, Work<'static>>(f), n)) };
    TEAM.next.store(0, Ordering::Relaxed);
    TEAM.failed.store(false, Ordering::Relaxed);
    let number = TEAM.gate.load(Ordering::Relaxed) >> 32;
    TEAM.gate.store(number.wrapping_add(1) << 32 | OPEN, Ordering::Release);
    let shut = Shut;
    while TEAM.helpers.load(Ordering::Relaxed) + 1 < threads.min(n) {
        TEAM.helpers.fetch_add(1, Ordering::Relaxed);
        rayon::spawn(help);
    }
    take_pieces(n, f);
    drop(shut);
    true
}

fn take_pieces(n: usize, f: Work<'_>) {
    loop {
        let i = TEAM.next.fetch_add(1, Ordering::Relaxed);
        if i >= n {
            break;
        }
        f(i);
    }
}

/// Ends a fork: shuts the gate and waits until no helper is inside.
struct Shut;

impl Drop for Shut {
    fn drop(&mut self) {
        let mut gate = TEAM.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while gate & (OPEN - 1) != 0 {
            spins += 1;
            // The helper may have lost its processor: to this thread, if there are more threads than processors.
            if spins > 2000 {
                std::thread::yield_now()
            } else {
                spin_loop()
            }
            gate = TEAM.gate.load(Ordering::Acquire);
        }
        let failed = TEAM.failed.load(Ordering::Relaxed);
        TEAM.busy.store(false, Ordering::Release);
        assert!(!failed || std::thread::panicking(), "a helper's piece panicked");
    }
}

/// The life of a helper: enters each fork once, leaves when none has come for a while.
fn help() {
    let (mut seen, mut spins, mut idle_since) = (0, 0u32, Instant::now());
    loop {
        let gate = TEAM.gate.load(Ordering::Acquire);
        if gate & OPEN != 0 && gate >> 32 != seen {
            if TEAM.gate.compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                seen = gate >> 32;
                // SAFETY: this thread is inside, so the work stays valid and unwritten.
                let work = unsafe { *TEAM.work.get() };
                let (f, n) = work.expect("an open gate has work behind it");
                if catch_unwind(AssertUnwindSafe(|| take_pieces(n, f))).is_err() {
                    TEAM.failed.store(true, Ordering::Relaxed);
                }
                TEAM.gate.fetch_sub(1, Ordering::Release);
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
    TEAM.helpers.fetch_sub(1, Ordering::Relaxed);
}
