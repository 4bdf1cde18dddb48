use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mha_sys as sys;

/// The threads of a call, which takes them by [`scheduler`](crate::Forward::scheduler). The library
/// starts no threads itself. The bits of results do not depend on the number of threads.
///
/// # Examples
///
/// ```
/// use mha::{Layer, LayerConfig, Scheduler, Weights, Workspace};
///
/// /// New threads each time; a pool would keep them.
/// struct NewThreads(usize);
///
/// impl Scheduler for NewThreads {
///     fn num_threads(&self) -> usize {
///         self.0
///     }
///
///     fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
///         std::thread::scope(|scope| {
///             for index in 0..count {
///                 scope.spawn(move || task(index));
///             }
///         });
///     }
/// }
///
/// let layer = Layer::new(&LayerConfig::new(64, 4), &Weights::fused(&vec![0.25; 64 * 192]))?;
/// let mut y = vec![0.0; 100 * 64];
/// let x = vec![1.0; 100 * 64];
/// layer.forward(&x, &mut y).scheduler(&NewThreads(2)).run(&mut Workspace::new())?;
/// # Ok::<(), mha::Error>(())
/// ```
///
/// With the feature `rayon`,
/// [`rayon::ThreadPool`](https://docs.rs/rayon/1/rayon/struct.ThreadPool.html) is a scheduler, and
/// so is `mha::Rayon`, the pool that the calling thread is in or else rayon's global one.
pub trait Scheduler: Sync {
    /// Returns the most tasks to run at once, 1 .. 1024; other numbers count as the nearest of
    /// these. The workspace grows with it.
    fn num_threads(&self) -> usize;

    /// Runs `task(index)` once for each index in `0..count`, on any threads and in any order, and
    /// returns when all tasks have returned. `count` is at most [`num_threads`](Self::num_threads).
    /// Tasks never wait for each other, and never call a scheduler.
    ///
    /// An implementation that does something else does no harm: a task that it left out runs
    /// afterwards on the calling thread, a second run of a task does nothing, and a panic continues
    /// in the caller of [`run`](crate::Forward::run) when the call is complete.
    fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync));
}

const MOST_THREADS: usize = 1024;

/// A scheduler during one call.
pub(crate) struct Run<'a> {
    scheduler: &'a dyn Scheduler,
    // the library calls parallel_for on the thread that made the call
    panic: RefCell<Option<Box<dyn Any + Send>>>,
}

impl<'a> Run<'a> {
    pub fn new(scheduler: &'a dyn Scheduler) -> Self {
        Self { scheduler, panic: RefCell::new(None) }
    }

    /// What the library takes; self must stay where it is as long as that is used.
    pub fn raw(&self) -> sys::mha_scheduler {
        sys::mha_scheduler {
            context: std::ptr::from_ref(self).cast_mut().cast(),
            num_threads: self.scheduler.num_threads().clamp(1, MOST_THREADS) as u32,
            reserved: 0,
            parallel_for: Some(parallel_for),
        }
    }

    /// Goes on with a panic of the scheduler, if there was one.
    pub fn resume_panic(&self) {
        if let Some(payload) = self.panic.take() {
            resume_unwind(payload);
        }
    }
}

type RawTask = Option<unsafe extern "C" fn(*mut c_void, u32)>;

struct Tasks {
    task: unsafe extern "C" fn(*mut c_void, u32),
    context: *mut c_void,
    count: usize,
    started: [AtomicU64; MOST_THREADS / 64], // a bit for each index
    finished: AtomicU32,
}

// SAFETY: the library's tasks may run on any thread, with this context.
unsafe impl Sync for Tasks {}

impl Tasks {
    fn run(&self, index: usize) {
        assert!(index < self.count, "a scheduler ran the task {index} of {}", self.count);
        let bit = 1 << (index % 64);
        if self.started[index / 64].fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return;
        }
        // SAFETY: each index runs once, and all of them before parallel_for returns. Tasks do not
        // unwind.
        unsafe { (self.task)(self.context, index as u32) };
        self.finished.fetch_add(1, Ordering::Release);
    }
}

unsafe extern "C" fn parallel_for(
    context: *mut c_void, count: u32, task: RawTask, task_context: *mut c_void,
) {
    // SAFETY: the context is that of Run::raw.
    let run = unsafe { &*context.cast::<Run>() };
    let Some(task) = task else { return };
    let tasks = Tasks {
        task,
        context: task_context,
        count: count as usize,
        started: [const { AtomicU64::new(0) }; MOST_THREADS / 64],
        finished: AtomicU32::new(0),
    };
    let run_one = |index| tasks.run(index);
    if let Err(payload) =
        catch_unwind(AssertUnwindSafe(|| run.scheduler.parallel_for(tasks.count, &run_one)))
    {
        run.panic.borrow_mut().get_or_insert(payload);
    }
    // What the scheduler left out, if anything.
    (0..tasks.count).for_each(run_one);
    while tasks.finished.load(Ordering::Acquire) < count {
        std::thread::yield_now();
    }
}

/// The pool of rayon that the calling thread is in, or else rayon's global one. Needs the feature
/// `rayon`.
///
/// ```
/// # use mha::{Layer, LayerConfig, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(64, 4), &Weights::fused(&vec![0.25; 64 * 192]))?;
/// # let (x, mut y) = (vec![1.0; 100 * 64], vec![0.0; 100 * 64]);
/// layer.forward(&x, &mut y).scheduler(&mha::Rayon).run(&mut Workspace::new())?;
/// # Ok::<(), mha::Error>(())
/// ```
#[cfg(feature = "rayon")]
#[derive(Debug, Clone, Copy, Default)]
pub struct Rayon;

#[cfg(feature = "rayon")]
impl Scheduler for Rayon {
    fn num_threads(&self) -> usize {
        rayon::current_num_threads()
    }

    fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        // In place: a thread outside the pool takes its task at once instead of waiting for the
        // pool to wake up.
        rayon::in_place_scope(|scope| {
            for index in 1..count {
                scope.spawn(move |_| task(index));
            }
            task(0);
        });
    }
}

/// This pool, whichever thread makes the call.
#[cfg(feature = "rayon")]
impl Scheduler for rayon::ThreadPool {
    fn num_threads(&self) -> usize {
        self.current_num_threads()
    }

    fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.in_place_scope(|scope| {
            for index in 1..count {
                scope.spawn(move |_| task(index));
            }
            task(0);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Each<F>(F);

    impl<F: Fn(usize, &(dyn Fn(usize) + Sync)) + Sync> Scheduler for Each<F> {
        fn num_threads(&self) -> usize {
            100
        }

        fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
            self.0(count, task)
        }
    }

    /// How often the library's tasks run.
    fn runs(scheduler: &dyn Scheduler) -> Vec<u32> {
        unsafe extern "C" fn count(runs: *mut c_void, index: u32) {
            // SAFETY: the array below.
            let runs = unsafe { &*runs.cast::<[AtomicU32; 100]>() };
            runs[index as usize].fetch_add(1, Ordering::Relaxed);
        }
        let runs = [const { AtomicU32::new(0) }; 100];
        let run = Run::new(scheduler);
        let raw = run.raw();
        // SAFETY: as the library calls it.
        unsafe {
            parallel_for(
                raw.context,
                raw.num_threads,
                Some(count),
                std::ptr::from_ref(&runs).cast_mut().cast(),
            )
        };
        runs.map(AtomicU32::into_inner).to_vec()
    }

    #[test]
    fn each_task_runs_once_whatever_the_scheduler_does() {
        let once = vec![1; 100];
        assert_eq!(
            runs(&Each(|count, task: &(dyn Fn(usize) + Sync)| (0..count).for_each(task))),
            once
        );
        assert_eq!(runs(&Each(|_, _: &(dyn Fn(usize) + Sync)| {})), once);
        assert_eq!(
            runs(&Each(|_, task: &(dyn Fn(usize) + Sync)| [70, 7, 70, 7]
                .into_iter()
                .for_each(task))),
            once
        );
        assert_eq!(runs(&Each(|count, task: &(dyn Fn(usize) + Sync)| task(count))), once);
    }
}
