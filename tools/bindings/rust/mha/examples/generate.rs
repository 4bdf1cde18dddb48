//! A small decoder in the manner of Llama, and several threads that generate text with it at once.
//! They share the model, which is only read; each has its own caches and workspace. The model's
//! weights are made up: so is its text.
//!
//!     cargo run --release --example generate

use std::thread;

use mha::{
    CacheConfig, KvCache, Layer, LayerConfig, Rope, RopeConfig, Type, WeightLayout, Weights,
    Workspace,
};

const VOCABULARY: usize = 256; // bytes
const WIDTH: usize = 64;
const HIDDEN: usize = 160;
const BLOCKS: usize = 3;
const POSITIONS: usize = 96;

/// What all threads share.
struct Model {
    embedding: Vec<f32>, // [VOCABULARY, WIDTH]
    blocks: Vec<Block>,
    rope: Rope<'static>,
}

struct Block {
    attention: Layer<'static>,
    up: Vec<f32>,   // [HIDDEN, WIDTH]
    down: Vec<f32>, // [WIDTH, HIDDEN]
}

/// The state of each thread.
struct Session<'m> {
    model: &'m Model,
    caches: Vec<KvCache>, // one for each block
    workspace: Workspace,
}

impl Model {
    fn new() -> mha::Result<Self> {
        let mut numbers = Numbers(1);
        let config = LayerConfig::new(WIDTH, 4).num_kv_heads(2).weight_type(Type::Bf16);
        let block = |numbers: &mut Numbers| {
            let (w_q, w_k) = (numbers.matrix(WIDTH, WIDTH), numbers.matrix(WIDTH / 2, WIDTH));
            let (w_v, w_o) = (numbers.matrix(WIDTH / 2, WIDTH), numbers.matrix(WIDTH, WIDTH));
            let weights = Weights::new(&w_q, &w_k, &w_v).output(&w_o).layout(WeightLayout::OutIn);
            let attention = Layer::new(&config, &weights)?;
            Ok(Block {
                attention,
                up: numbers.matrix(HIDDEN, WIDTH),
                down: numbers.matrix(WIDTH, HIDDEN),
            })
        };
        let embedding = numbers.matrix(VOCABULARY, WIDTH);
        let blocks =
            (0..BLOCKS).map(|_| block(&mut numbers)).collect::<mha::Result<Vec<Block>>>()?;
        let rope = RopeConfig::new(blocks[0].attention.shape().head_dim)
            .base(500000.0)
            .tables(POSITIONS)?;
        Ok(Self { embedding, blocks, rope })
    }
}

impl<'m> Session<'m> {
    fn new(model: &'m Model) -> mha::Result<Self> {
        let cache = |block: &Block| {
            KvCache::new(
                &CacheConfig::for_layer(block.attention.shape(), POSITIONS).k_type(Type::F16),
            )
        };
        let caches = model.blocks.iter().map(cache).collect::<mha::Result<_>>()?;
        Ok(Self { model, caches, workspace: Workspace::new() })
    }

    /// Takes in tokens, and says which one comes next.
    fn next(&mut self, tokens: &[u8]) -> mha::Result<u8> {
        let embedding = |token: &u8| &self.model.embedding[usize::from(*token) * WIDTH..][..WIDTH];
        let mut x: Vec<f32> = tokens.iter().flat_map(embedding).copied().collect();
        let mut y = vec![0.0; x.len()];
        for (block, cache) in self.model.blocks.iter().zip(&mut self.caches) {
            let normalised = normalise(&x);
            block
                .attention
                .forward(&normalised, &mut y)
                .causal()
                .rope(&self.model.rope)
                .cache(cache)
                .run(&mut self.workspace)?;
            add(&mut x, &y);
            let mut hidden = product(&normalise(&x), &block.up, WIDTH);
            hidden.iter_mut().for_each(|value| *value /= 1.0 + (-*value).exp()); // SiLU
            add(&mut x, &product(&hidden, &block.down, HIDDEN));
        }
        let last = normalise(&x[x.len() - WIDTH..]);
        let logits = product(&last, &self.model.embedding, WIDTH);
        let best = (b' '..=b'~')
            .max_by(|a, b| logits[usize::from(*a)].total_cmp(&logits[usize::from(*b)]));
        Ok(best.unwrap_or(b' '))
    }

    fn generate(&mut self, prompt: &[u8], count: usize) -> mha::Result<Vec<u8>> {
        let mut text = prompt.to_vec();
        let mut next = self.next(prompt)?; // the prompt at once
        for _ in 1..count {
            text.push(next);
            next = self.next(&[next])?; // then token by token
        }
        text.push(next);
        Ok(text)
    }
}

fn main() -> mha::Result<()> {
    let model = Model::new()?;
    let prompts = ["the cat sleeps", "once upon a time", "attention", "mha"];
    let texts: Vec<Vec<u8>> = thread::scope(|scope| {
        let model = &model;
        let threads = prompts.map(|prompt| {
            scope.spawn(move || Session::new(model)?.generate(prompt.as_bytes(), 24))
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<mha::Result<_>>()
    })?;
    for (prompt, text) in prompts.iter().zip(&texts) {
        println!("{prompt} -> {}", text[prompt.len()..].escape_ascii());
    }

    // The same bits whichever way the rows were cut into calls: all but the last token at once say
    // the last one.
    for text in &texts {
        let (last, before) = text.split_last().unwrap();
        assert_eq!(Session::new(&model)?.next(before)?, *last);
    }
    println!("{} texts, the same from their beginnings at once", texts.len());
    Ok(())
}

/// Root mean square of each row 1.
fn normalise(x: &[f32]) -> Vec<f32> {
    let factor = |row: &[f32]| {
        (row.iter().map(|value| value * value).sum::<f32>() / WIDTH as f32 + 1e-6).sqrt().recip()
    };
    x.chunks(WIDTH).flat_map(|row| row.iter().map(move |value| value * factor(row))).collect()
}

/// Rows of x times the transposed matrix [out, depth].
fn product(x: &[f32], matrix: &[f32], depth: usize) -> Vec<f32> {
    let dot = |row: &[f32], weights: &[f32]| row.iter().zip(weights).map(|(x, w)| x * w).sum();
    x.chunks(depth)
        .flat_map(|row| matrix.chunks(depth).map(move |weights| dot(row, weights)))
        .collect()
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Made-up weights.
struct Numbers(u32);

impl Numbers {
    fn matrix(&mut self, outputs: usize, inputs: usize) -> Vec<f32> {
        let size = (3.0 / inputs as f32).sqrt();
        (0..outputs * inputs).map(|_| self.next() * size).collect()
    }

    /// From -1 to 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1664525).wrapping_add(1013904223);
        (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}
