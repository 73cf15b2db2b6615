//! The resident thread pool: one parallel region per round of a step, barriers inside it, and
//! counters that hand out work. It knows nothing of models, ops or kernels.
//!
//! Threads spin with a pause while work is near, then yield, then park. Arrival and release of
//! the barrier are on cache lines of their own, so that the waiting threads read a line that is
//! written once. Where other programs hold the cores and threads wait for each other more than they
//! work, the caller runs some regions alone. A panic in any thread poisons the pool: every barrier lets go with an error and
//! the region ends, so that nothing ever hangs on a thread that has gone.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::topology;

/// More threads than any machine runs; a number far beyond is a slip and would take memory first.
const THREADS_MAX: usize = 4096;
/// Pauses before a waiting thread starts to yield.
const SPINS: u32 = 2000;
/// The same where there are more threads than cores: the thread waited for needs this core.
const SPINS_CROWDED: u32 = 20;
/// Threads whose work is taken over when one's own is done: a look at each costs a cache line.
const NEIGHBOURS: usize = 7;
/// How long an idle worker stays awake after a region; the gap between two decoded tokens of a
/// busy engine is far below it.
const AWAKE: Duration = Duration::from_micros(500);
/// A region that was held up by threads without a core for at least so long, and for most of its
/// time, is followed by regions of the caller alone.
const HELD_UP: Duration = Duration::from_micros(500);
/// Regions that the caller runs alone after that: at first, and at most if it happens again.
const ALONE: (u32, u32) = (4, 256);

/// A thread of the region failed; the work is not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Poisoned;

/// A value alone on its cache lines (two of them: x86 fetches lines in pairs).
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

type Job<'a> = &'a (dyn Fn(&Team<'_>) -> Result<(), Poisoned> + Sync + 'a);

struct Shared {
    threads: u32,
    spins: u32,
    /// Replaced to start a region: its number, and in the low half how many threads take part.
    /// A worker that does not must learn all it needs from this one word.
    region: Padded<AtomicU64>,
    /// Threads that have come to the barrier.
    arrived: Padded<AtomicU32>,
    /// Bumped by the last to arrive.
    released: Padded<AtomicU32>,
    /// Workers that have left the region.
    left: Padded<AtomicU32>,
    /// Items claimed of each thread's own share, in even and in odd phases: see [`Team::share`].
    claimed: Box<[Padded<[AtomicUsize; 2]>]>,
    poisoned: Padded<AtomicBool>,
    quit: AtomicBool,
    sleepers: AtomicU32,
    /// Written by the caller before `region` is bumped, read by workers after they saw the bump.
    /// The second is the phase that the region begins with.
    job: UnsafeCell<Option<(Job<'static>, usize)>>,
    /// What the first panic said.
    cause: Mutex<Option<String>>,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. The caller writes it while no
// region runs (all workers have left the last one, an acquire load of `left` says so), and the
// release bump of `region` publishes it.
unsafe impl Sync for Shared {}
// SAFETY: the job is `Sync`, so that a reference to it may go to other threads.
unsafe impl Send for Shared {}

/// A thread's part in a region.
pub(crate) struct Team<'a> {
    /// This thread; 0 is the caller.
    pub(crate) ix: usize,
    /// Threads of the region.
    pub(crate) threads: usize,
    /// Barriers that this thread has passed so far, region ends included; the same for all.
    phase: Cell<usize>,
    /// How long this thread waited after it had done what pauses it had.
    held_up: Cell<Duration>,
    shared: &'a Shared,
}

/// The threads, and the door to them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// The phase that the next region begins with.
    phase: usize,
    /// Threads of the last region.
    active: usize,
    /// Regions that are left for the caller alone, and how many they were when they began.
    alone: u32,
    patience: u32,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Pool {
    /// Starts `threads - 1` workers, pinned to `cpus[1..]` where the list is long enough. The
    /// caller of [`Pool::run`] is thread 0 and is never pinned: it is not ours.
    pub(crate) fn new(threads: usize, cpus: &[usize]) -> std::io::Result<Pool> {
        let threads = threads.max(1);
        if threads > THREADS_MAX {
            let told = format!("expected at most {THREADS_MAX}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, told));
        }
        let crowded = threads > topology::usable_threads();
        let shared = Arc::new(Shared {
            threads: threads as u32,
            spins: if crowded { SPINS_CROWDED } else { SPINS },
            region: Padded::default(),
            arrived: Padded::default(),
            released: Padded::default(),
            left: Padded::default(),
            claimed: (0..threads).map(|_| Padded::default()).collect(),
            poisoned: Padded::default(),
            quit: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            cause: Mutex::new(None),
        });
        let mut pool = Pool {
            shared,
            workers: Vec::with_capacity(threads - 1),
            phase: 0,
            active: threads,
            alone: 0,
            patience: ALONE.0,
        };
        for ix in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let cpu = (cpus.len() >= threads).then(|| cpus[ix]);
            let worker =
                thread::Builder::new().name(format!("fornax-cpu-{ix}")).spawn(move || {
                    if let Some(cpu) = cpu {
                        topology::pin_to(cpu);
                    }
                    work(&shared, ix);
                })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads of a region, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.shared.threads as usize
    }

    /// Runs `job` on every thread and returns when all of them have left it.
    ///
    /// # Errors
    /// What the first panic said, for this region and every later one.
    pub(crate) fn run(&mut self, job: Job<'_>) -> Result<(), String> {
        self.run_on(self.threads(), job)
    }

    /// As [`Pool::run`] on the first `threads` threads, or on fewer where threads have lately
    /// waited for each other: nothing that a job computes may depend on how many they are.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn run_on(&mut self, threads: usize, job: Job<'_>) -> Result<(), String> {
        let threads = threads.clamp(1, self.threads());
        if self.alone > 0 {
            self.alone -= 1;
            return self.region(1, job).map(drop);
        }
        let since = Instant::now();
        let held_up = self.region(threads, job)?;
        if held_up > HELD_UP && held_up * 2 > since.elapsed() {
            self.alone = self.patience;
            self.patience = (self.patience * 2).min(ALONE.1);
        } else if threads > 1 {
            self.patience = (self.patience / 2).max(ALONE.0);
        }
        Ok(())
    }

    /// Lets the next region run on all of its threads, whatever was before.
    pub(crate) fn trust(&mut self) {
        self.alone = 0;
    }

    /// One region; returns how long the caller was held up in it.
    fn region(&mut self, threads: usize, job: Job<'_>) -> Result<Duration, String> {
        let s = &*self.shared;
        if s.poisoned.0.load(Ordering::Acquire) {
            return Err(self.cause());
        }
        if threads > self.active {
            // Those that come back do not know which phases they missed.
            for claimed in &s.claimed {
                claimed.0.iter().for_each(|c| c.store(0, Ordering::Relaxed));
            }
        }
        self.active = threads;
        // SAFETY: the lifetime is extended only until this function returns, and it returns
        // only after every worker of the region has left the job, panics included.
        let forever = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: no region runs, see `Sync for Shared`.
        unsafe { *s.job.get() = Some((forever, self.phase)) };
        s.left.0.store(0, Ordering::Relaxed);
        let number = (s.region.0.load(Ordering::Relaxed) >> 32) + 1;
        // Sequentially consistent, as is `sleepers`: either the worker that goes to sleep sees
        // the new word, or this thread sees the sleeper.
        s.region.0.store(number << 32 | threads as u64, Ordering::SeqCst);
        if threads > 1 && s.sleepers.load(Ordering::SeqCst) > 0 {
            self.workers[..threads - 1].iter().for_each(|w| w.thread().unpark());
        }
        let team = Team::new(s, 0, threads, self.phase);
        enter(&team, job);
        let mut wait = Wait::new(s.spins);
        while (s.left.0.load(Ordering::Acquire) as usize) + 1 < threads {
            wait.pause();
        }
        self.phase = team.phase.get() + 1;
        if s.poisoned.0.load(Ordering::Acquire) {
            return Err(self.cause());
        }
        Ok(team.held_up.get() + wait.held_up())
    }

    fn cause(&self) -> String {
        let cause = self.shared.cause.lock().unwrap_or_else(PoisonError::into_inner);
        cause.clone().unwrap_or_else(|| "a thread of the pool failed".into())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.shared.region.0.store(u64::MAX, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its jobs; there is nothing left to report here.
            let _ = worker.join();
        }
    }
}

impl<'a> Team<'a> {
    fn new(shared: &'a Shared, ix: usize, threads: usize, phase: usize) -> Team<'a> {
        let held_up = Cell::new(Duration::ZERO);
        let team = Team { ix, threads, phase: Cell::new(phase), held_up, shared };
        team.begin(phase);
        team
    }

    /// Waits for all threads of the region; everything written before is seen after.
    ///
    /// # Errors
    /// [`Poisoned`] where one of them failed; the job must then return at once.
    pub(crate) fn barrier(&self) -> Result<(), Poisoned> {
        self.barrier_with(|| {})
    }

    /// As [`Team::barrier`], and calls `idle` again and again while it waits.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn barrier_with(&self, mut idle: impl FnMut()) -> Result<(), Poisoned> {
        let s = self.shared;
        if self.threads > 1 {
            let round = s.released.0.load(Ordering::Relaxed);
            if s.arrived.0.fetch_add(1, Ordering::AcqRel) as usize + 1 == self.threads {
                s.arrived.0.store(0, Ordering::Relaxed);
                s.released.0.store(round.wrapping_add(1), Ordering::Release);
            } else {
                let mut wait = Wait::new(s.spins);
                while s.released.0.load(Ordering::Acquire) == round {
                    if s.poisoned.0.load(Ordering::Relaxed) {
                        return Err(Poisoned);
                    }
                    idle();
                    wait.pause();
                }
                self.held_up.set(self.held_up.get() + wait.held_up());
            }
        }
        self.begin(self.phase.get() + 1);
        Ok(())
    }

    /// Enters a phase: the counter of the next one is cleared, which nobody reads before this
    /// thread comes to the barrier, and nobody since the one that all have just passed.
    fn begin(&self, phase: usize) {
        self.phase.set(phase);
        self.shared.claimed[self.ix].0[(phase + 1) % 2].store(0, Ordering::Relaxed);
    }

    /// The items of `0..items` that thread `ix` is to begin with.
    pub(crate) fn own(&self, ix: usize, items: usize) -> std::ops::Range<usize> {
        items * ix / self.threads..items * (ix + 1) / self.threads
    }

    /// Calls `f` with every item of `0..items` that this thread gets hold of: its own run first,
    /// in order, so that it reads memory in one stream, then what its neighbours have not come
    /// to, so that a slow core delays nobody. At most one such loop may run between two barriers.
    #[inline]
    pub(crate) fn share(&self, items: usize, mut f: impl FnMut(usize)) {
        let set = self.phase.get() % 2;
        for step in 0..self.threads.min(1 + NEIGHBOURS) {
            let owner = (self.ix + step) % self.threads;
            let range = self.own(owner, items);
            let claimed = &self.shared.claimed[owner].0[set];
            // A look before the claim leaves the line where it is when nothing is left.
            while range.start + claimed.load(Ordering::Relaxed) < range.end {
                let item = range.start + claimed.fetch_add(1, Ordering::Relaxed);
                if item >= range.end {
                    break;
                }
                f(item);
            }
        }
    }
}

/// Waiting: pauses at first, then the core is given away.
struct Wait {
    pauses: u32,
    /// Since when it is given away.
    since: Option<Instant>,
}

impl Wait {
    fn new(pauses: u32) -> Wait {
        Wait { pauses, since: None }
    }

    fn pause(&mut self) {
        if self.pauses > 0 {
            self.pauses -= 1;
            spin_loop();
        } else {
            self.since.get_or_insert_with(Instant::now);
            thread::yield_now();
        }
    }

    /// How long it was given away.
    fn held_up(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// Runs the job on this thread and turns a panic into poison.
fn enter(team: &Team<'_>, job: Job<'_>) {
    let s = team.shared;
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(team))) {
        let mut cause = s.cause.lock().unwrap_or_else(PoisonError::into_inner);
        cause.get_or_insert_with(|| said(&*panic));
        s.poisoned.0.store(true, Ordering::Release);
    }
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("a thread of the pool panicked: {}", text.unwrap_or_else(|| "no message".into()))
}

/// A worker's life.
fn work(s: &Shared, ix: usize) {
    let mut seen = 0;
    loop {
        seen = next_region(s, seen);
        if s.quit.load(Ordering::SeqCst) {
            return;
        }
        let threads = seen as u32 as usize;
        if ix >= threads {
            continue;
        }
        // SAFETY: written before the store of `region` that `next_region` has seen; not written
        // again before this thread, which takes part, has counted itself in `left`.
        if let Some((job, phase)) = unsafe { *s.job.get() } {
            enter(&Team::new(s, ix, threads, phase), job);
        }
        s.left.0.fetch_add(1, Ordering::Release);
    }
}

/// Waits until the region's word differs from `seen`; returns it.
fn next_region(s: &Shared, seen: u64) -> u64 {
    let mut wait = Wait::new(s.spins);
    loop {
        let region = s.region.0.load(Ordering::SeqCst);
        if region != seen {
            return region;
        }
        wait.pause();
        if wait.held_up() > AWAKE {
            s.sleepers.fetch_add(1, Ordering::SeqCst);
            if s.region.0.load(Ordering::SeqCst) == seen {
                thread::park();
            }
            s.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_numbers_of_threads_are_refused() {
        for threads in [THREADS_MAX + 1, 1 << 31, 1 << 32, usize::MAX] {
            let e = Pool::new(threads, &[]).map(drop).unwrap_err();
            assert!(e.to_string().contains("at most 4096"), "{e}");
        }
    }

    #[test]
    fn every_item_runs_once_and_barriers_order_phases() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(threads, &[]).unwrap();
            let a: Vec<AtomicU32> = (0..100).map(|_| AtomicU32::new(0)).collect();
            for round in 1..=200 {
                let wrong = AtomicU32::new(0);
                pool.run(&|team| {
                    for phase in 0..5 {
                        team.share(a.len(), |i| {
                            a[i].fetch_add(1, Ordering::Relaxed);
                        });
                        team.barrier()?;
                        let want = (round - 1) * 5 + phase + 1;
                        if a.iter().any(|v| v.load(Ordering::Relaxed) != want) {
                            wrong.fetch_add(1, Ordering::Relaxed);
                        }
                        team.barrier()?;
                    }
                    Ok(())
                })
                .unwrap();
                assert_eq!(wrong.into_inner(), 0, "{threads} threads, round {round}");
            }
        }
    }

    #[test]
    fn threads_that_sat_out_a_region_are_whole_in_the_next() {
        let mut pool = Pool::new(4, &[]).unwrap();
        let n = 100;
        for round in 0..300usize {
            let threads = [4, 1, 3, 2, 1, 1, 4][round % 7];
            let count: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
            let seen = AtomicU32::new(0);
            pool.region(threads, &|team| {
                seen.fetch_add(1, Ordering::Relaxed);
                for _ in 0..round % 4 {
                    team.share(n, |i| {
                        count[i].fetch_add(1, Ordering::Relaxed);
                    });
                    team.barrier()?;
                }
                Ok(())
            })
            .unwrap();
            assert_eq!(seen.into_inner() as usize, threads);
            assert!(count.iter().all(|c| c.load(Ordering::Relaxed) as usize == round % 4));
        }
    }

    /// Threads that have to wait for cores which others hold must not cost many times what the
    /// caller alone would.
    #[test]
    fn a_machine_that_is_taken_does_not_stop_the_pool() {
        let stop = AtomicBool::new(false);
        let cores = topology::usable_threads();
        std::thread::scope(|scope| {
            for _ in 0..2 * cores {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        spin_loop();
                    }
                });
            }
            let seconds = |threads: usize| {
                let mut pool = Pool::new(threads, &[]).unwrap();
                let since = Instant::now();
                for _ in 0..400 {
                    let job = |team: &Team<'_>| {
                        for _ in 0..50 {
                            team.share(64, |i| {
                                std::hint::black_box((0..200).fold(i, |a, b| a ^ (b * 7)));
                            });
                            team.barrier()?;
                        }
                        Ok(())
                    };
                    pool.run(&job).unwrap();
                }
                since.elapsed().as_secs_f64()
            };
            let alone = seconds(1);
            let together = seconds(cores.max(2));
            stop.store(true, Ordering::Relaxed);
            // Without regions of the caller alone: over a hundred times.
            assert!(together < 25.0 * alone + 2.0, "{together} s together, {alone} s alone");
        });
    }

    #[test]
    fn workers_wake_after_they_slept() {
        let mut pool = Pool::new(3, &[]).unwrap();
        for _ in 0..3 {
            let count = AtomicU32::new(0);
            pool.region(3, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
                Ok(())
            })
            .unwrap();
            assert_eq!(count.into_inner(), 3);
            thread::sleep(AWAKE * 10);
        }
    }

    #[test]
    fn a_panic_in_any_thread_ends_the_region_and_is_told() {
        for victim in 0..3 {
            let mut pool = Pool::new(3, &[]).unwrap();
            let e = pool.run(&|team| {
                assert!(team.ix != victim, "thread {victim} fell over");
                team.barrier()?;
                team.barrier()
            });
            let said = e.unwrap_err();
            assert!(said.contains(&format!("thread {victim} fell over")), "{said}");
            assert!(pool.run(&|_| Ok(())).unwrap_err().contains("fell over"));
        }
    }
}
