use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::{
    bert as candles_bert, llama as candles_llama, qwen3 as candles_qwen3,
};

use crate::shapes::{bert, llama, qwen3, random};
use crate::support::assert_near;

const VOCABULARY: usize = 97;

fn llama_config(kv_heads: usize) -> candles_llama::Config {
    candles_llama::Config {
        hidden_size: 64,
        intermediate_size: 96,
        vocab_size: VOCABULARY,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: kv_heads,
        max_position_embeddings: 128,
        ..candles_llama::Config::config_7b_v2(false)
    }
}

fn qwen3_config() -> candles_qwen3::Config {
    candles_qwen3::Config {
        vocab_size: VOCABULARY,
        hidden_size: 48,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        head_dim: 16,
        attention_bias: true,
        num_key_value_heads: 2,
        max_position_embeddings: 128,
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: false,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: candle_nn::Activation::Silu,
    }
}

fn tokens(seed: u64, batch: usize, rows: usize) -> Tensor {
    let ids: Vec<u32> = random(seed, batch * rows)
        .map(|number| ((number + 1.0) / 2.0 * VOCABULARY as f32) as u32 % VOCABULARY as u32)
        .collect();
    Tensor::from_vec(ids, (batch, rows), &Device::Cpu).unwrap()
}

/// The likeliest token of each sequence, `[batch, 1]`.
fn likeliest(logits: &Tensor) -> Result<Tensor> {
    let logits = if logits.rank() == 3 { logits.squeeze(1)? } else { logits.clone() };
    logits.argmax_keepdim(1)
}

#[test]
fn llama_gives_the_logits_and_tokens_of_candles() -> Result<()> {
    for kv_heads in [4, 2, 1] {
        let config = llama_config(kv_heads);
        let weights = llama::random_weights(&config, DType::F32);
        let candles = candles_llama::Llama::load(weights.var_builder(), &config)?;
        let ours = llama::Llama::load(weights.var_builder(), &config)?;
        for (batch, rows) in [(1, 9), (3, 20)] {
            let mut candles_cache =
                candles_llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
            let (mut cache, mut position, mut next) = (ours.cache(), 0, tokens(1, batch, rows));
            for _ in 0..33 {
                let logits = ours.forward(&next, position, &mut cache)?;
                let expected = candles.forward(&next, position, &mut candles_cache)?;
                assert_near(&logits, &expected, 3e-5);
                position += next.dim(1)?;
                next = likeliest(&logits)?;
                assert_eq!(next.to_vec2::<u32>()?, likeliest(&expected)?.to_vec2::<u32>()?);
            }
        }
    }
    Ok(())
}

#[test]
fn llama_of_halves_is_as_near_to_the_exact_one_as_candles() -> Result<()> {
    let config = llama_config(2);
    let exact =
        llama::Llama::load(llama::random_weights(&config, DType::F32).var_builder(), &config)?;
    let prompt = tokens(1, 2, 20);
    let expected = exact.forward(&prompt, 0, &mut exact.cache())?;
    for (dtype, tolerance) in [(DType::F16, 5e-3), (DType::BF16, 5e-2)] {
        let weights = llama::random_weights(&config, dtype);
        let ours = llama::Llama::load(weights.var_builder(), &config)?;
        assert_near(&ours.forward(&prompt, 0, &mut ours.cache())?, &expected, tolerance);
        let candles = candles_llama::Llama::load(weights.var_builder(), &config)?;
        let mut cache = candles_llama::Cache::new(true, dtype, &config, &Device::Cpu)?;
        assert_near(&candles.forward(&prompt, 0, &mut cache)?, &expected, tolerance);
    }
    Ok(())
}

#[test]
fn qwen3_gives_the_logits_and_tokens_of_candles() -> Result<()> {
    let config = qwen3_config();
    let weights = qwen3::random_weights(&config, DType::F32);
    let mut candles = candles_qwen3::ModelForCausalLM::new(&config, weights.var_builder())?;
    let mut ours = qwen3::Qwen3::load(weights.var_builder(), &config)?;
    for (batch, rows) in [(1, 11), (4, 6)] {
        candles.clear_kv_cache();
        let (mut offset, mut next) = (0, tokens(2, batch, rows));
        for _ in 0..33 {
            let (logits, expected) =
                (ours.forward(&next, offset)?, candles.forward(&next, offset)?);
            assert_near(&logits, &expected, 3e-5);
            offset += next.dim(1)?;
            next = likeliest(&logits)?;
            assert_eq!(next.to_vec2::<u32>()?, likeliest(&expected)?.to_vec2::<u32>()?);
        }
    }
    Ok(())
}

#[test]
fn bert_gives_the_rows_of_candles() -> Result<()> {
    let config = candles_bert::Config {
        vocab_size: VOCABULARY,
        hidden_size: 48,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        intermediate_size: 96,
        max_position_embeddings: 64,
        ..candles_bert::Config::default()
    };
    let weights = bert::random_weights(&config);
    let candles = candles_bert::BertModel::load(weights.var_builder(), &config)?;
    let ours = bert::Bert::load(weights.var_builder(), &config)?;
    let (ids, lengths) = (tokens(3, 4, 17), [17, 3, 9, 1]);
    let types = ids.zeros_like()?;
    let mask: Vec<u32> = lengths
        .iter()
        .flat_map(|length| (0..17).map(move |row| u32::from(row < *length)))
        .collect();
    let expected =
        candles.forward(&ids, &types, Some(&Tensor::from_vec(mask, (4, 17), &Device::Cpu)?))?;
    let y = ours.forward(&ids, &types, &lengths)?;
    for (i, length) in lengths.into_iter().enumerate() {
        let rows = |tensor: &Tensor| tensor.narrow(0, i, 1)?.narrow(1, 0, length);
        assert_near(&rows(&y)?, &rows(&expected)?, 1e-5);
    }
    Ok(())
}
