use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{embedding, linear_no_bias, rms_norm, Embedding, Linear, RmsNorm, VarBuilder};
use candle_transformers::models::llama::Config;
use mha_candle::mha::RopeConfig;
use mha_candle::{AttentionConfig, KvCache, Rope, SelfAttention};

use super::{GatedMlp, RandomWeights};

/// One for each block.
pub type Cache = Vec<KvCache>; // mha

pub struct Llama {
    embed: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

struct Block {
    input_norm: RmsNorm,
    attention: SelfAttention, // mha
    output_norm: RmsNorm,
    mlp: GatedMlp,
}

impl Llama {
    pub fn load(vb: VarBuilder, config: &Config) -> Result<Self> {
        // mha
        if config.rope_scaling.is_some() {
            candle_core::bail!(
                "this model takes no rope_scaling; make its table by RopeConfig::llama3"
            );
        }
        let angles = RopeConfig::new(config.hidden_size / config.num_attention_heads)
            .base(f64::from(config.rope_theta));
        let rope = Rope::new(&angles, config.max_position_embeddings)?;
        let attention = AttentionConfig::new(config.hidden_size, config.num_attention_heads)
            .num_kv_heads(config.num_key_value_heads);
        let attention = attention.causal().rope(&rope);

        let block = |vb: VarBuilder| {
            Ok(Block {
                input_norm: rms_norm(
                    config.hidden_size,
                    config.rms_norm_eps,
                    vb.pp("input_layernorm"),
                )?,
                attention: attention.load(vb.pp("self_attn"))?, // mha
                output_norm: rms_norm(
                    config.hidden_size,
                    config.rms_norm_eps,
                    vb.pp("post_attention_layernorm"),
                )?,
                mlp: GatedMlp::load(vb.pp("mlp"), config.hidden_size, config.intermediate_size)?,
            })
        };
        Ok(Self {
            embed: embedding(config.vocab_size, config.hidden_size, vb.pp("model.embed_tokens"))?,
            blocks: (0..config.num_hidden_layers)
                .map(|i| block(vb.pp(format!("model.layers.{i}"))))
                .collect::<Result<_>>()?,
            norm: rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp("model.norm"))?,
            head: linear_no_bias(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?,
        })
    }

    pub fn cache(&self) -> Cache {
        vec![KvCache::new(); self.blocks.len()] // mha
    }

    /// The logits of the last of the tokens `[batch, rows]`, which begin at this position.
    pub fn forward(&self, tokens: &Tensor, position: usize, cache: &mut Cache) -> Result<Tensor> {
        let mut x = self.embed.forward(tokens)?;
        for (block, cache) in self.blocks.iter().zip(cache) {
            x = (block.attention.forward_cached(
                &block.input_norm.forward(&x)?,
                position,
                cache,
            )? + x)?; // mha
            x = (block.mlp.forward(&block.output_norm.forward(&x)?)? + x)?;
        }
        let last = x.narrow(1, x.dim(1)? - 1, 1)?.squeeze(1)?.contiguous()?;
        self.head.forward(&self.norm.forward(&last)?)?.to_dtype(DType::F32)
    }
}

pub fn random_weights(config: &Config, dtype: DType) -> RandomWeights {
    let mut weights = RandomWeights::new(dtype);
    let (width, head_dim) = (config.hidden_size, config.hidden_size / config.num_attention_heads);
    weights.add("model.embed_tokens.weight", &[config.vocab_size, width], 0.0, 1.0);
    weights.norm("model.norm", width);
    weights.linear("lm_head", width, config.vocab_size, false);
    for i in 0..config.num_hidden_layers {
        let layer = format!("model.layers.{i}");
        weights.norm(&format!("{layer}.input_layernorm"), width);
        weights.norm(&format!("{layer}.post_attention_layernorm"), width);
        weights.linear(&format!("{layer}.self_attn.q_proj"), width, width, false);
        weights.linear(
            &format!("{layer}.self_attn.k_proj"),
            width,
            config.num_key_value_heads * head_dim,
            false,
        );
        weights.linear(
            &format!("{layer}.self_attn.v_proj"),
            width,
            config.num_key_value_heads * head_dim,
            false,
        );
        weights.linear(&format!("{layer}.self_attn.o_proj"), width, width, false);
        weights.linear(&format!("{layer}.mlp.gate_proj"), width, config.intermediate_size, false);
        weights.linear(&format!("{layer}.mlp.up_proj"), width, config.intermediate_size, false);
        weights.linear(&format!("{layer}.mlp.down_proj"), config.intermediate_size, width, false);
    }
    weights
}
