//! How fast candle is by itself and with mha, on this machine: attention alone, and whole models with random weights. Both run in turn, and medians
//! are printed with the time of candle's divided by that of mha's.
//!
//!     RAYON_NUM_THREADS=1 cargo run --example speed
//!     cargo run --example speed -- attention llama    # some of attention, llama, qwen3 and minilm
//!     cargo run --example speed -- --quick            # once, and small: only to see that it runs

mod models;

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::attention::AttnMask;
use candle_transformers::models::{bert as candles_bert, llama as candles_llama, qwen3 as candles_qwen3};
use mha_candle::Attention;
use models::{bert, llama, qwen3, random};

fn main() -> Result<()> {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    let given = names.len();
    names.retain(|name| name != "--quick");
    let is_quick = names.len() < given;
    let known = ["attention", "llama", "qwen3", "minilm"];
    if let Some(other) = names.iter().find(|name| !known.contains(&name.as_str())) {
        eprintln!("speed: '{other}' is none of --quick, {}", known.join(", "));
        std::process::exit(2);
    }
    let is_wanted = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    let threads = rayon::current_num_threads();
    println!("{threads} threads, {}; milliseconds, medians", mha_candle::mha::InstructionSet::available().last().unwrap_or_default());
    println!("{:76} {:>9} {:>9} {:>6}", "", "candle", "mha", "ratio");
    let parts = [attention_alone, whole_llama, whole_qwen3, whole_minilm];
    known.into_iter().zip(parts).filter(|(name, _)| is_wanted(name)).try_for_each(|(_, run)| run(is_quick))
}

/// Runs both in turn, and prints a line. Each returns what it computed, which must agree.
fn compare(name: &str, rounds: usize, mut candles: impl FnMut() -> Result<Tensor>, mut ours: impl FnMut() -> Result<Tensor>) -> Result<()> {
    let (expected, y) = (candles()?, ours()?); // and both are warm
    let apart = (expected - y)?.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
    assert!(apart < 1e-3, "{name}: results are {apart} apart");
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        let start = Instant::now();
        candles()?;
        let middle = Instant::now();
        ours()?;
        times[0].push((middle - start).as_secs_f64() * 1e3);
        times[1].push(middle.elapsed().as_secs_f64() * 1e3);
    }
    let [theirs, ours] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!("{name:76} {theirs:9.3} {ours:9.3} {:6.2}", theirs / ours);
    Ok(())
}

fn tensor(seed: u64, shape: (usize, usize, usize, usize)) -> Result<Tensor> {
    Tensor::from_vec(random(seed, shape.0 * shape.1 * shape.2 * shape.3).collect(), shape, &Device::Cpu)
}

/// `[batch, heads, rows, width]`, as views of the projections' rows: of candle's two ways, the better one.
fn attention_alone(is_quick: bool) -> Result<()> {
    let shapes: &[[usize; 6]] = &[
        // batch, heads, kv_heads, rows, keys, width
        [1, 12, 12, 512, 512, 64],
        [1, 16, 8, 256, 256, 128],
        [8, 12, 12, 128, 128, 32],
        [1, 12, 4, 1, 1024, 64],
        [8, 12, 4, 1, 1024, 64],
    ];
    for &[batch, heads, kv_heads, rows, keys, width] in if is_quick { &shapes[3..4] } else { shapes } {
        let view = |seed, rows, heads| tensor(seed, (batch, rows, heads, width))?.transpose(1, 2);
        let (q, k, v) = (view(1, rows, heads)?, view(2, keys, kv_heads)?, view(3, keys, kv_heads)?);
        let scale = 1.0 / (width as f32).sqrt();
        let name = format!("attention, {batch} x {heads}/{kv_heads} heads of {width}, {rows} x {keys}");
        let mask = candle_transformers::utils::build_additive_causal_mask(rows, keys - rows, None, &Device::Cpu, DType::F32)?;
        let plain = || {
            let repeated = |tensor: &Tensor| candle_transformers::utils::repeat_kv(tensor.contiguous()?, heads / kv_heads)?.contiguous();
            let scores = (q.contiguous()?.matmul(&repeated(&k)?.t()?)? * f64::from(scale))?;
            candle_nn::ops::softmax_last_dim(&scores.broadcast_add(&mask)?)?.matmul(&repeated(&v)?)
        };
        let flash = || {
            let rows_first = |tensor: &Tensor| tensor.transpose(1, 2)?.contiguous();
            let (q, k, v) = (rows_first(&q)?, rows_first(&k)?, rows_first(&v)?);
            candle_nn::attention::flash_attn::<f32>(&q, &k, &v, scale, AttnMask::causal_with_offset(keys - rows), None, None)
        };
        let rounds = if is_quick { 1 } else { 31 };
        let ours = || Attention::new().causal().forward(&q, &k, &v);
        compare(&format!("{name}, products and softmax"), rounds, plain, ours)?;
        compare(&format!("{name}, flash_attn"), rounds, flash, ours)?;
    }
    Ok(())
}

fn tokens(batch: usize, rows: usize) -> Result<Tensor> {
    Tensor::from_vec(random(5, batch * rows).map(|number| ((number + 1.0) * 500.0) as u32).collect::<Vec<_>>(), (batch, rows), &Device::Cpu)
}

fn whole_llama(is_quick: bool) -> Result<()> {
    let config = candles_llama::Config {
        hidden_size: 768,
        intermediate_size: 2048,
        vocab_size: 4096,
        num_hidden_layers: if is_quick { 1 } else { 12 },
        num_attention_heads: 12,
        num_key_value_heads: 4,
        max_position_embeddings: 2048,
        ..candles_llama::Config::config_7b_v2(false)
    };
    let weights = llama::random_weights(&config, DType::F32);
    let candles = candles_llama::Llama::load(weights.var_builder(), &config)?;
    let ours = llama::Llama::load(weights.var_builder(), &config)?;
    let new_cache = || candles_llama::Cache::new(true, DType::F32, &config, &Device::Cpu);
    for (batch, rows) in if is_quick { vec![(1, 16)] } else { vec![(1, 64), (1, 512), (8, 64)] } {
        let prompt = tokens(batch, rows)?;
        let (mut candles_cache, mut cache) = (new_cache()?, ours.cache());
        compare(
            &format!("Llama-shaped 12 x 768, prompt of {batch} x {rows}"),
            if is_quick { 1 } else { 5 },
            || {
                candles_cache = new_cache()?;
                candles.forward(&prompt, 0, &mut candles_cache)
            },
            || ours.forward(&prompt, 0, &mut cache),
        )?;
        let token = tokens(batch, 1)?;
        let (mut candles_position, mut position) = (rows, rows);
        compare(
            &format!("Llama-shaped 12 x 768, a token for {batch} behind {rows}"),
            if is_quick { 1 } else { 25 },
            || {
                candles_position += 1;
                candles.forward(&token, candles_position - 1, &mut candles_cache)
            },
            || {
                position += 1;
                ours.forward(&token, position - 1, &mut cache)
            },
        )?;
    }
    Ok(())
}

fn whole_qwen3(is_quick: bool) -> Result<()> {
    let config = candles_qwen3::Config {
        vocab_size: 4096,
        hidden_size: 1024,
        intermediate_size: 3072,
        num_hidden_layers: if is_quick { 1 } else { 8 },
        num_attention_heads: 16,
        head_dim: 128,
        attention_bias: false,
        num_key_value_heads: 8,
        max_position_embeddings: 2048,
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: false,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: candle_nn::Activation::Silu,
    };
    let weights = qwen3::random_weights(&config, DType::F32);
    let mut candles = candles_qwen3::ModelForCausalLM::new(&config, weights.var_builder())?;
    let mut ours = qwen3::Qwen3::load(weights.var_builder(), &config)?;
    for rows in if is_quick { vec![16] } else { vec![64, 512] } {
        let prompt = tokens(1, rows)?;
        compare(
            &format!("Qwen3-shaped 8 x 1024, prompt of {rows}"),
            if is_quick { 1 } else { 5 },
            || {
                candles.clear_kv_cache();
                candles.forward(&prompt, 0)
            },
            || ours.forward(&prompt, 0),
        )?;
        let token = tokens(1, 1)?;
        let (mut candles_offset, mut offset) = (rows, rows);
        compare(
            &format!("Qwen3-shaped 8 x 1024, a token behind {rows}"),
            if is_quick { 1 } else { 25 },
            || {
                candles_offset += 1;
                candles.forward(&token, candles_offset - 1)
            },
            || {
                offset += 1;
                ours.forward(&token, offset - 1)
            },
        )?;
    }
    Ok(())
}

fn whole_minilm(is_quick: bool) -> Result<()> {
    let config = candles_bert::Config {
        vocab_size: 4096,
        hidden_size: 384,
        num_hidden_layers: if is_quick { 1 } else { 6 },
        num_attention_heads: 12,
        intermediate_size: 1536,
        ..candles_bert::Config::default()
    };
    let weights = bert::random_weights(&config);
    let candles = candles_bert::BertModel::load(weights.var_builder(), &config)?;
    let ours = bert::Bert::load(weights.var_builder(), &config)?;
    for (batch, rows) in if is_quick { vec![(1, 16)] } else { vec![(1, 32), (8, 128), (1, 512)] } {
        let ids = tokens(batch, rows)?;
        let types = ids.zeros_like()?;
        compare(
            &format!("MiniLM-shaped 6 x 384, {batch} x {rows}"),
            if is_quick { 1 } else { 11 },
            || candles.forward(&ids, &types, None),
            || ours.forward(&ids, &types, &vec![rows; batch]),
        )?;
    }
    let (ids, half) = (tokens(8, 128)?, tokens(8, 128)?.zeros_like()?);
    let lengths: Vec<usize> = (1..=8).map(|i| 16 * i).collect();
    let mask: Vec<u32> = lengths.iter().flat_map(|length| (0..128).map(move |row| u32::from(row < *length))).collect();
    let mask = Tensor::from_vec(mask, (8, 128), &Device::Cpu)?;
    let first = |y: Tensor| y.narrow(1, 0, 16)?.narrow(D::Minus1, 0, 384); // valid in all texts
    compare(
        "MiniLM-shaped 6 x 384, 8 texts of 16 to 128",
        if is_quick { 1 } else { 11 },
        || first(candles.forward(&ids, &half, Some(&mask))?),
        || first(ours.forward(&ids, &half, &lengths)?),
    )
}
