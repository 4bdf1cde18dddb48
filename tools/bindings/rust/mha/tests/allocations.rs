//! A call allocates nothing, neither in the library nor in the crate, once its workspace has grown.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use mha::{
    CacheConfig, KvCache, Layer, LayerConfig, RopeConfig, Scheduler, ScoreOptions, Weights,
    Workspace,
};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct OneByOne;

impl Scheduler for OneByOne {
    fn num_threads(&self) -> usize {
        4
    }

    fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(task);
    }
}

#[test]
fn a_call_allocates_nothing_once_its_workspace_has_grown() -> mha::Result<()> {
    let layer = Layer::new(&LayerConfig::new(64, 4), &Weights::fused(&vec![0.25; 64 * 192]))?;
    let rope = RopeConfig::new(16).tables(300)?;
    let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 300))?;
    let (x, mut y, mut lse) = (vec![1.0; 200 * 64], vec![0.0; 200 * 64], vec![0.0; 4 * 200]);
    let score = ScoreOptions::new().softcap(30.0).sinks(&[1.0; 4]).mask(&[1; 300], [1, 1, 1, 300]);
    let mut workspace = Workspace::new();
    let call = layer.forward(&x, &mut y).causal().rope(&rope).score(score).cache(&mut cache);
    workspace.reserve(call.lse(&mut lse).scheduler(&OneByOne).workspace_bytes()?)?;

    let before = ALLOCATIONS.get();
    assert!(before > 0);
    for rows in [200, 1, 50] {
        let call = layer
            .forward(&x[..rows * 64], &mut y[..rows * 64])
            .causal()
            .rope(&rope)
            .score(score)
            .cache(&mut cache);
        call.lse(&mut lse[..4 * rows]).scheduler(&OneByOne).run(&mut workspace)?;
    }
    assert_eq!(ALLOCATIONS.get(), before);
    Ok(())
}
