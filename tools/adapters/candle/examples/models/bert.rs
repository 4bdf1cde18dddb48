use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{embedding, layer_norm, linear, Embedding, LayerNorm, Linear, VarBuilder};
use candle_transformers::models::bert::Config;
use mha_candle::{AttentionConfig, Names, SelfAttention};

use super::RandomWeights;

pub struct Bert {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<EncoderLayer>,
}

struct EncoderLayer {
    attention: SelfAttention, // mha; with what candle calls BertSelfOutput::dense
    attention_norm: LayerNorm,
    inner: Linear,
    outer: Linear,
    output_norm: LayerNorm,
}

impl Bert {
    pub fn load(vb: VarBuilder, config: &Config) -> Result<Self> {
        let (width, inner, epsilon) =
            (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let attention = AttentionConfig::new(width, config.num_attention_heads); // mha
        let layer = |vb: VarBuilder| {
            Ok(EncoderLayer {
                attention: attention.load_named(vb.pp("attention"), &Names::bert())?, // mha
                attention_norm: layer_norm(width, epsilon, vb.pp("attention.output.LayerNorm"))?,
                inner: linear(width, inner, vb.pp("intermediate.dense"))?,
                outer: linear(inner, width, vb.pp("output.dense"))?,
                output_norm: layer_norm(width, epsilon, vb.pp("output.LayerNorm"))?,
            })
        };
        let embeddings = vb.pp("embeddings");
        Ok(Self {
            words: embedding(config.vocab_size, width, embeddings.pp("word_embeddings"))?,
            positions: embedding(
                config.max_position_embeddings,
                width,
                embeddings.pp("position_embeddings"),
            )?,
            types: embedding(
                config.type_vocab_size,
                width,
                embeddings.pp("token_type_embeddings"),
            )?,
            norm: layer_norm(width, epsilon, embeddings.pp("LayerNorm"))?,
            layers: (0..config.num_hidden_layers)
                .map(|i| layer(vb.pp(format!("encoder.layer.{i}"))))
                .collect::<Result<_>>()?,
        })
    }

    /// The hidden rows of texts `[batch, rows]`, with the number of tokens of each. The rows of
    /// padding are not those of candle's model.
    pub fn forward(&self, tokens: &Tensor, types: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let positions = Tensor::arange(0, tokens.dim(1)? as u32, &Device::Cpu)?;
        let x = (self.words.forward(tokens)? + self.types.forward(types)?)?;
        let mut x = self.norm.forward(&x.broadcast_add(&self.positions.forward(&positions)?)?)?;
        for layer in &self.layers {
            // mha: lengths in place of a mask
            let context = layer.attention.call(&x).lengths(lengths).run()?;
            x = layer.attention_norm.forward(&(context + x)?)?;
            x = layer
                .output_norm
                .forward(&(layer.outer.forward(&layer.inner.forward(&x)?.gelu_erf()?)? + x)?)?;
        }
        Ok(x)
    }
}

pub fn random_weights(config: &Config) -> RandomWeights {
    let mut weights = RandomWeights::new(DType::F32);
    let width = config.hidden_size;
    let norm = |weights: &mut RandomWeights, name: &str| {
        weights.norm(name, width);
        weights.add(&format!("{name}.bias"), &[width], 0.0, 0.1);
    };
    weights.add("embeddings.word_embeddings.weight", &[config.vocab_size, width], 0.0, 1.0);
    weights.add(
        "embeddings.position_embeddings.weight",
        &[config.max_position_embeddings, width],
        0.0,
        1.0,
    );
    weights.add(
        "embeddings.token_type_embeddings.weight",
        &[config.type_vocab_size, width],
        0.0,
        1.0,
    );
    norm(&mut weights, "embeddings.LayerNorm");
    for i in 0..config.num_hidden_layers {
        let layer = format!("encoder.layer.{i}");
        for name in ["self.query", "self.key", "self.value", "output.dense"] {
            weights.linear(&format!("{layer}.attention.{name}"), width, width, true);
        }
        norm(&mut weights, &format!("{layer}.attention.output.LayerNorm"));
        weights.linear(
            &format!("{layer}.intermediate.dense"),
            width,
            config.intermediate_size,
            true,
        );
        weights.linear(&format!("{layer}.output.dense"), config.intermediate_size, width, true);
        norm(&mut weights, &format!("{layer}.output.LayerNorm"));
    }
    weights
}
