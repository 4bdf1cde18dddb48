//! A layer of GPT-2's size: a prompt, and one token over a cache. `cargo bench --features rayon`
//!
//! These are for programs that use the crate; what the library itself is measured by stands in bench/.

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use mha::{CacheConfig, KvCache, Layer, LayerConfig, StorageType, Weights, Workspace};

const WIDTH: usize = 768;
const PAST: usize = 1024;

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 7 % 11) as f32 / 64.0 - 0.078125).collect()
}

fn layer(kind: StorageType) -> Layer<'static> {
    let (w_qkv, w_o) = (numbers(WIDTH * 3 * WIDTH), numbers(WIDTH * WIDTH));
    let config = LayerConfig::new(WIDTH, 12).weight_type(kind);
    Layer::new(&config, &Weights::fused(&w_qkv).output(&w_o)).unwrap()
}

fn prompt(c: &mut Criterion) {
    let (layer, mut workspace) = (layer(StorageType::F32), Workspace::new());
    let mut group = c.benchmark_group("prompt");
    for rows in [16, 128] {
        let (x, mut y) = (numbers(rows * WIDTH), vec![0.0; rows * WIDTH]);
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(format!("{rows} rows"), |b| {
            b.iter(|| layer.forward(&x, &mut y).causal().run(&mut workspace).unwrap());
        });
        #[cfg(feature = "rayon")]
        group.bench_function(format!("{rows} rows, rayon"), |b| {
            b.iter(|| layer.forward(&x, &mut y).causal().scheduler(&mha::Rayon).run(&mut workspace).unwrap());
        });
    }
    group.finish();
}

fn token(c: &mut Criterion) {
    let mut group = c.benchmark_group("token");
    for kind in [StorageType::F32, StorageType::F16] {
        let (layer, mut workspace) = (layer(kind), Workspace::new());
        let config = CacheConfig::for_layer(layer.shape(), PAST + 1).storage(kind);
        let mut cache = KvCache::new(&config).unwrap();
        cache.append(0, &numbers(PAST * WIDTH), &numbers(PAST * WIDTH)).unwrap();
        let (x, mut y) = (numbers(WIDTH), vec![0.0; WIDTH]);
        group.throughput(Throughput::Elements(1));
        group.bench_function(format!("behind {PAST}, {kind:?}"), |b| {
            b.iter(|| {
                layer.forward(&x, &mut y).causal().cache(&mut cache).run(&mut workspace).unwrap();
                cache.truncate(0, PAST).unwrap();
            });
        });
    }
    group.finish();
}

criterion_group!(benches, prompt, token);
criterion_main!(benches);
