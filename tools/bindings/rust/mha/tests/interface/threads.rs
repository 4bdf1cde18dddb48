use std::panic::{catch_unwind, AssertUnwindSafe};
use std::thread;

use mha::{CacheConfig, KvCache, Scheduler, Workspace};

use crate::support::{bits, layer, numbers, Alone};

const ROWS: usize = 300;

fn run(scheduler: Option<&dyn Scheduler>) -> Vec<u32> {
    let (layer, x) = (layer(), numbers(ROWS * 32, 1));
    let mut y = vec![f32::NAN; ROWS * 32];
    let call = layer.forward(&x, &mut y).causal();
    let call = if let Some(scheduler) = scheduler { call.scheduler(scheduler) } else { call };
    call.done();
    bits(&y)
}

/// Any scheduler, by what it does with the tasks.
struct By<F>(usize, F);

impl<F: Fn(usize, &(dyn Fn(usize) + Sync)) + Sync> Scheduler for By<F> {
    fn num_threads(&self) -> usize {
        self.0
    }

    fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        assert!((1..=self.0.clamp(1, 1024)).contains(&count));
        self.1(count, task)
    }
}

fn on_threads(count: usize, task: &(dyn Fn(usize) + Sync)) {
    thread::scope(|scope| {
        for index in 0..count {
            scope.spawn(move || task(index));
        }
    });
}

#[test]
fn any_scheduler_gives_the_same_bits() {
    let expected = run(None);
    for threads in [0, 1, 2, 5, 5000] {
        assert_eq!(
            run(Some(&By(threads, |count, task: &(dyn Fn(usize) + Sync)| (0..count)
                .rev()
                .for_each(task)))),
            expected
        );
    }
    assert_eq!(run(Some(&By(4, on_threads))), expected);
}

#[test]
fn a_panic_of_a_scheduler_reaches_the_caller_of_run_when_the_call_is_complete() {
    let (layer, x) = (layer(), numbers(ROWS * 32, 1));
    let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), ROWS)).unwrap();
    let mut y = vec![f32::NAN; ROWS * 32];
    let panicking = By(3, |_, task: &(dyn Fn(usize) + Sync)| {
        task(0);
        panic!("no threads today")
    });
    let call = layer.forward(&x, &mut y).causal().cache(&mut cache).scheduler(&panicking);
    let payload = catch_unwind(AssertUnwindSafe(|| call.alone())).unwrap_err();
    assert_eq!(payload.downcast_ref(), Some(&"no threads today"));
    assert_eq!((bits(&y), cache.length(0).unwrap()), (run(None), ROWS));

    let outside = By(3, |count, task: &(dyn Fn(usize) + Sync)| task(count));
    let payload = catch_unwind(AssertUnwindSafe(|| run(Some(&outside)))).unwrap_err();
    assert_eq!(payload.downcast_ref(), Some(&String::from("a scheduler ran the task 3 of 3")));
}

#[cfg(feature = "rayon")]
#[test]
fn pools_of_rayon_give_the_same_bits() {
    let expected = run(None);
    assert_eq!(run(Some(&mha::Rayon)), expected);
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(run(Some(&pool)), expected);
        assert_eq!(pool.install(|| run(Some(&mha::Rayon))), expected, "from within a pool");
    }
}

#[test]
fn threads_share_a_layer_each_with_its_own_cache_and_workspace() {
    let (layer, x) = (layer(), numbers(ROWS * 32, 1));
    let decode = || {
        let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), ROWS)).unwrap();
        let (mut workspace, mut y) = (Workspace::new(), vec![0.0; ROWS * 32]);
        for (x, y) in x.chunks(32).zip(y.chunks_mut(32)) {
            layer.forward(x, y).causal().cache(&mut cache).run(&mut workspace).unwrap();
        }
        bits(&y)
    };
    let expected = run(None);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(decode)).collect();
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), expected));
    });
}

#[test]
fn what_is_sent_or_shared_between_threads_can_be() {
    fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<mha::Layer<'_>>();
    send_and_sync::<KvCache>();
    send_and_sync::<Workspace>();
    send_and_sync::<mha::Rope<'static>>();
    send_and_sync::<mha::Error>();
}
