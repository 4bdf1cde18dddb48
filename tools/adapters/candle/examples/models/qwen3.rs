use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{embedding, linear_no_bias, rms_norm, Embedding, Linear, RmsNorm, VarBuilder};
use candle_transformers::models::qwen3::Config;
use mha_candle::mha::RopeConfig;
use mha_candle::{AttentionConfig, KvCache, Rope, SelfAttention};

use super::{GatedMlp, RandomWeights};

pub struct Qwen3 {
    embed: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    head: Linear,
}

struct DecoderLayer {
    attention: SelfAttention, // mha
    cache: KvCache,           // mha
    mlp: GatedMlp,
    input_norm: RmsNorm,
    output_norm: RmsNorm,
}

impl Qwen3 {
    pub fn load(vb: VarBuilder, config: &Config) -> Result<Self> {
        // mha
        if config.use_sliding_window {
            candle_core::bail!(
                "this model takes no sliding window; set it by AttentionConfig::window_left"
            );
        }
        let rope = Rope::new(
            &RopeConfig::new(config.head_dim).base(config.rope_theta),
            config.max_position_embeddings,
        )?;
        let attention = AttentionConfig::new(config.hidden_size, config.num_attention_heads)
            .num_kv_heads(config.num_key_value_heads)
            .head_dim(config.head_dim)
            .causal()
            .rope(&rope)
            .qk_norm(config.rms_norm_eps);

        let layer = |vb: VarBuilder| {
            Ok(DecoderLayer {
                attention: attention.load(vb.pp("self_attn"))?, // mha
                cache: KvCache::new(),                          // mha
                mlp: GatedMlp::load(vb.pp("mlp"), config.hidden_size, config.intermediate_size)?,
                input_norm: rms_norm(
                    config.hidden_size,
                    config.rms_norm_eps,
                    vb.pp("input_layernorm"),
                )?,
                output_norm: rms_norm(
                    config.hidden_size,
                    config.rms_norm_eps,
                    vb.pp("post_attention_layernorm"),
                )?,
            })
        };
        Ok(Self {
            embed: embedding(config.vocab_size, config.hidden_size, vb.pp("model.embed_tokens"))?,
            layers: (0..config.num_hidden_layers)
                .map(|i| layer(vb.pp(format!("model.layers.{i}"))))
                .collect::<Result<_>>()?,
            norm: rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp("model.norm"))?,
            head: linear_no_bias(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?,
        })
    }

    /// The logits of the last of the tokens, `[batch, 1, vocabulary]`. An offset of 0 begins a new
    /// text.
    pub fn forward(&mut self, tokens: &Tensor, offset: usize) -> Result<Tensor> {
        let mut x = self.embed.forward(tokens)?;
        for layer in &mut self.layers {
            x = (layer.attention.forward_cached(
                &layer.input_norm.forward(&x)?,
                offset,
                &mut layer.cache,
            )? + x)?; // mha
            x = (layer.mlp.forward(&layer.output_norm.forward(&x)?)? + x)?;
        }
        let last = x.narrow(1, x.dim(1)? - 1, 1)?.contiguous()?;
        self.head.forward(&self.norm.forward(&last)?)
    }
}

pub fn random_weights(config: &Config, dtype: DType) -> RandomWeights {
    let mut weights = RandomWeights::new(dtype);
    let (width, columns) = (config.hidden_size, config.num_attention_heads * config.head_dim);
    weights.add("model.embed_tokens.weight", &[config.vocab_size, width], 0.0, 1.0);
    weights.norm("model.norm", width);
    weights.linear("lm_head", width, config.vocab_size, false);
    for i in 0..config.num_hidden_layers {
        let layer = format!("model.layers.{i}");
        weights.norm(&format!("{layer}.input_layernorm"), width);
        weights.norm(&format!("{layer}.post_attention_layernorm"), width);
        weights.norm(&format!("{layer}.self_attn.q_norm"), config.head_dim);
        weights.norm(&format!("{layer}.self_attn.k_norm"), config.head_dim);
        weights.linear(&format!("{layer}.self_attn.q_proj"), width, columns, config.attention_bias);
        weights.linear(
            &format!("{layer}.self_attn.k_proj"),
            width,
            config.num_key_value_heads * config.head_dim,
            config.attention_bias,
        );
        weights.linear(
            &format!("{layer}.self_attn.v_proj"),
            width,
            config.num_key_value_heads * config.head_dim,
            config.attention_bias,
        );
        weights.linear(&format!("{layer}.self_attn.o_proj"), columns, width, config.attention_bias);
        weights.linear(&format!("{layer}.mlp.gate_proj"), width, config.intermediate_size, false);
        weights.linear(&format!("{layer}.mlp.up_proj"), width, config.intermediate_size, false);
        weights.linear(&format!("{layer}.mlp.down_proj"), config.intermediate_size, width, false);
    }
    weights
}
