use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use mha::{Arithmetic, Layer, LayerConfig, Norm, Type, WeightLayout, Weights};

use crate::{tensors, weights, KvCache, Rope};

/// What a [`SelfAttention`] is to do. Only the width of rows and the number of heads are needed.
#[derive(Debug, Clone)]
pub struct AttentionConfig {
    hidden_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    is_causal: bool,
    window_left: Option<usize>,
    scale: Option<f32>,
    softcap: f32,
    rope: Option<Rope>,
    norm: Option<NormConfig>,
    weight_type: Option<Type>,
    arithmetic: Arithmetic,
}

#[derive(Debug, Clone, Copy)]
struct NormConfig {
    epsilon: f64,
    is_of_all_heads: bool,
}

impl AttentionConfig {
    /// Rows of `hidden_size`, and as many heads of keys as of queries, which are `hidden_size` wide
    /// together.
    pub fn new(hidden_size: usize, num_heads: usize) -> Self {
        Self {
            hidden_size,
            num_heads,
            num_kv_heads: num_heads,
            head_dim: hidden_size.checked_div(num_heads).unwrap_or(0),
            is_causal: false,
            window_left: None,
            scale: None,
            softcap: 0.0,
            rope: None,
            norm: None,
            weight_type: None,
            arithmetic: Arithmetic::F32,
        }
    }

    setters! {
        /// Heads of keys and values (grouped-query attention).
        num_kv_heads: usize;
        /// The width of a head, where it is not `hidden_size / num_heads`.
        head_dim: usize;
    }

    /// A row attends to itself and to those before it: decoders.
    pub fn causal(mut self) -> Self {
        self.is_causal = true;
        self
    }

    setters! {
        /// The number of earlier rows that a row attends to at most.
        window_left: usize;
        /// Factor of the scores; `1 / sqrt(head_dim)` if not set.
        scale: f32;
        /// `softcap * tanh(score / softcap)` in place of each score (Gemma 2).
        softcap: f32;
    }

    /// Rotates queries and keys.
    pub fn rope(mut self, rope: &Rope) -> Self {
        self.rope = Some(rope.clone());
        self
    }

    /// RMS norm of each head's queries and keys before they are rotated (Qwen3).
    pub fn qk_norm(mut self, epsilon: f64) -> Self {
        self.norm = Some(NormConfig { epsilon, is_of_all_heads: false });
        self
    }

    /// RMS norm of the queries of all heads together, and of the keys (OLMo 2).
    pub fn qk_norm_of_all_heads(mut self, epsilon: f64) -> Self {
        self.norm = Some(NormConfig { epsilon, is_of_all_heads: true });
        self
    }

    setters! {
        /// How the packed weights are kept, in fewer bits if wanted. As they come if not set.
        weight_type: Type;
        /// What the projections are computed in: floats, or with weights of `Int8` or `Int4`
        /// integers of 8 or 16 bits.
        arithmetic: Arithmetic;
    }

    /// Loads and packs weights with the names of Llama and most decoders: `q_proj`, `k_proj`,
    /// `v_proj` and `o_proj`, and with a norm `q_norm` and `k_norm`, each projection with the bias
    /// that it has.
    ///
    /// What is not computed is refused: the weights of norms without [`qk_norm`](Self::qk_norm),
    /// gates, sinks, relative positions, adapters. A `VarBuilder` cannot list its tensors, so it is
    /// asked for the names that models and their adapters have.
    pub fn load(&self, vb: VarBuilder) -> Result<SelfAttention> {
        self.load_named(vb, &Names::default())
    }

    /// Likewise with other names.
    pub fn load_named(&self, vb: VarBuilder, names: &Names) -> Result<SelfAttention> {
        let (columns, kv_columns) = self.columns();
        weights::refuse(&vb, NOT_COMPUTED, "this layer is for candle's own attention")?;
        for (name, norm) in [(names.q_norm, self.norm), (names.k_norm, self.norm)] {
            let unused = if norm.is_some() { &["bias"][..] } else { &["weight", "bias"] };
            weights::refuse(
                &vb.pp(name),
                unused.iter().copied(),
                "set qk_norm(), which has weights and no biases",
            )?;
        }
        let norm = |name: &str, columns: usize| {
            self.norm
                .map(|norm| vb.pp(name).get(self.norm_width(norm, columns), "weight"))
                .transpose()
        };
        let linear = |name: &str, inputs: usize, outputs: usize| {
            weights::linear(&vb.pp(name), inputs, outputs)
        };
        self.build(&Parts {
            q: linear(names.q, self.hidden_size, columns)?,
            k: linear(names.k, self.hidden_size, kv_columns)?,
            v: linear(names.v, self.hidden_size, kv_columns)?,
            o: linear(names.o, columns, self.hidden_size)?,
            q_norm: norm(names.q_norm, columns)?,
            k_norm: norm(names.k_norm, kv_columns)?,
        })
    }

    /// Packs weights that are there already. The tensors are not needed afterwards.
    pub fn build(&self, parts: &Parts) -> Result<SelfAttention> {
        let (columns, kv_columns) = self.columns();
        weights::check("q", &parts.q, self.hidden_size, columns)?;
        weights::check("k", &parts.k, self.hidden_size, kv_columns)?;
        weights::check("v", &parts.v, self.hidden_size, kv_columns)?;
        weights::check("o", &parts.o, columns, self.hidden_size)?;
        let weights = [("q_norm", &parts.q_norm, columns), ("k_norm", &parts.k_norm, kv_columns)]
            .map(|(name, weight, columns)| {
                tensors::check([(name, weight.as_ref())])?;
                match (self.norm, weight) {
                    (None, Some(_)) => candle_core::bail!(
                        "there is a {name}, but no epsilon for it: set qk_norm()"
                    ),
                    (Some(_), None) => {
                        candle_core::bail!("there is no {name}, which qk_norm() needs")
                    }
                    (Some(norm), Some(weight))
                        if weight.dims() != [self.norm_width(norm, columns)] =>
                    {
                        candle_core::bail!(
                            "{name} is {:?}; it must be [{}]",
                            weight.dims(),
                            self.norm_width(norm, columns)
                        )
                    }
                    (_, weight) => weight.as_ref().map(tensors::floats).transpose(),
                }
            });
        let [q_norm, k_norm] = weights;
        let weight_type =
            self.weight_type.unwrap_or(tensors::stored_type(parts.q.weight().dtype()));
        let config = LayerConfig::new(self.hidden_size, self.num_heads)
            .num_kv_heads(self.num_kv_heads)
            .head_dim(self.head_dim)
            .scale(self.scale.unwrap_or_default())
            .weight_type(weight_type)
            .arithmetic(self.arithmetic);
        let layer = weights::packed([&parts.q, &parts.k, &parts.v, &parts.o], |w, biases| {
            let mut weights =
                Weights::new(w[0], w[1], w[2]).output(w[3]).layout(WeightLayout::OutIn);
            for (bias, set) in biases.iter().zip([
                Weights::query_bias,
                Weights::key_bias,
                Weights::value_bias,
                Weights::output_bias,
            ]) {
                if let Some(bias) = bias {
                    weights = set(weights, bias);
                }
            }
            Layer::new(&config, &weights)
        })?;
        Ok(SelfAttention {
            core: Arc::new(Core { config: self.clone(), layer, q_norm: q_norm?, k_norm: k_norm? }),
        })
    }

    fn columns(&self) -> (usize, usize) {
        (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
    }

    fn norm_width(&self, norm: NormConfig, columns: usize) -> usize {
        if norm.is_of_all_heads {
            columns
        } else {
            self.head_dim
        }
    }
}

/// What attentions of models have beside projections and norms.
const NOT_COMPUTED: [&str; 17] = [
    "sinks",
    "g_proj.weight",
    "gate.weight",
    "gate_proj.weight",
    "bias_k",
    "bias_v",
    "q_layernorm.weight",
    "k_layernorm.weight",
    "query_layernorm.weight",
    "key_layernorm.weight",
    "v_norm.weight",
    "inner_attn_ln.weight",
    "sub_norm.weight",
    "attn_sub_norm.weight",
    "relative_attention_bias.weight",
    "self.distance_embedding.weight",
    "relative_k_proj.weight",
];

/// What the weights of a [`SelfAttention`] are called in a [`VarBuilder`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Names<'a> {
    pub q: &'a str,
    pub k: &'a str,
    pub v: &'a str,
    pub o: &'a str,
    pub q_norm: &'a str,
    pub k_norm: &'a str,
}

impl Default for Names<'_> {
    /// `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`.
    fn default() -> Self {
        Self {
            q: "q_proj",
            k: "k_proj",
            v: "v_proj",
            o: "o_proj",
            q_norm: "q_norm",
            k_norm: "k_norm",
        }
    }
}

impl Names<'_> {
    /// Those of BERT, below `attention`: `self.query`, `self.key`, `self.value` and `output.dense`.
    pub fn bert() -> Self {
        Self {
            q: "self.query",
            k: "self.key",
            v: "self.value",
            o: "output.dense",
            ..Self::default()
        }
    }
}

/// The weights of a [`SelfAttention`], for [`AttentionConfig::build`]. A fused projection is given
/// as three views: `Linear::new(w.narrow(0, first, rows)?, None)`.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Parts {
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub o: Linear,
    /// The weights of the norms of queries and keys, for [`AttentionConfig::qk_norm`].
    pub q_norm: Option<Tensor>,
    pub k_norm: Option<Tensor>,
}

/// Self-attention as a layer of a model: projections, norms, rotation, attention over a cache, and
/// the projection of the output, in one call of the library. Made by [`AttentionConfig`]; a clone
/// shares the packed weights. Rows are of `f32`, `f16` or `bf16` whatever the weights are, and so
/// is the output.
#[derive(Debug, Clone)]
pub struct SelfAttention {
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core {
    config: AttentionConfig,
    layer: Layer<'static>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
}

impl SelfAttention {
    /// Rows `[batch, rows, hidden_size]` after those in a cache. `offset` is their first position,
    /// as candle's models pass it (`index_pos`): what the cache has from there on is forgotten, so
    /// that 0 begins anew.
    pub fn forward_cached(&self, x: &Tensor, offset: usize, cache: &mut KvCache) -> Result<Tensor> {
        Call { offset: Some(offset), ..self.call(x).cache(cache) }.run()
    }

    /// A call with more to say than [`forward`](Module::forward) and
    /// [`forward_cached`](Self::forward_cached).
    pub fn call<'a>(&'a self, x: &'a Tensor) -> Call<'a> {
        Call {
            core: &self.core,
            x,
            cache: None,
            offset: None,
            lengths: None,
            bias: None,
            mask: None,
        }
    }

    /// The packed layer, to ask for its shape.
    pub fn layer(&self) -> &Layer<'static> {
        &self.core.layer
    }
}

impl Module for SelfAttention {
    /// Rows `[batch, rows, hidden_size]`, without a cache.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.call(x).run()
    }
}

/// A call of a [`SelfAttention`]: say what it is to do, then [`run`](Self::run) it.
#[must_use = "nothing happens before .run()"]
pub struct Call<'a> {
    core: &'a Core,
    x: &'a Tensor,
    cache: Option<&'a mut KvCache>,
    offset: Option<usize>,
    lengths: Option<&'a [usize]>,
    bias: Option<&'a Tensor>,
    mask: Option<&'a Tensor>,
}

impl<'a> Call<'a> {
    setters! {
        /// Appends the rows to a cache, each sequence after what it has, and attends to all of it.
        cache: &'a mut KvCache;
        /// `[batch]`: the valid rows of each sequence. The others are padding: no work is done for
        /// them, and their outputs are 0.
        lengths: &'a [usize];
    }

    /// A tensor of floats that is added to the scores, as candle's models add their masks; it
    /// broadcasts to `[batch, heads, rows, keys]`, with a cache all its keys.
    pub fn bias(mut self, bias: impl Into<Option<&'a Tensor>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// A tensor of `u8` that is 0 where a key takes no part; it broadcasts as a bias does.
    pub fn mask(mut self, mask: impl Into<Option<&'a Tensor>>) -> Self {
        self.mask = mask.into();
        self
    }

    /// Computes the output, `[batch, rows, hidden_size]`.
    pub fn run(self) -> Result<Tensor> {
        let Self { core: Core { config, layer, q_norm, k_norm }, x, .. } = self;
        if x.rank() != 3 || x.dim(2)? != config.hidden_size {
            candle_core::bail!(
                "x is {:?}; it must be [batch, rows, {}]",
                x.dims(),
                config.hidden_size
            );
        }
        tensors::check([("x", Some(x)), ("bias", self.bias), ("mask", self.mask)])?;
        let (batch, rows, _) = x.dims3()?;
        let lengths: Option<Vec<i64>> =
            self.lengths.map(|lengths| lengths.iter().copied().map(tensors::int).collect());
        let (mut cache, mut keys) = (None, rows);
        if let Some(given) = self.cache {
            self.offset.map_or(Ok(()), |offset| given.begin_at(offset))?;
            keys = given.length()
                + self.lengths.map_or(rows, |lengths| lengths.iter().copied().max().unwrap_or(0));
            cache = Some(given.with_room(layer, batch, rows)?);
        }
        let extents = [batch, config.num_heads, rows, keys];
        let (bias, mask) =
            (tensors::pairs(self.bias, extents)?, tensors::pairs(self.mask, extents)?);
        let (bias, mask) = (
            bias.as_ref().map(Tensor::storage_and_layout),
            mask.as_ref().map(Tensor::storage_and_layout),
        );
        let score = tensors::score(config.softcap, &bias, &mask)?;
        let x = tensors::readable(x)?;
        let (storage, layout) = x.storage_and_layout();
        let [batch_stride, row_stride] = tensors::strides(layout, [0, 1]);
        let elements = tensors::elements(&storage, layout)?;
        let rope = config.rope.as_ref().map(Rope::of_call);

        tensors::computed(x.dtype(), (batch, rows, config.hidden_size), |y, workspace| {
            let mut call = layer
                .forward(elements, y)
                .batch(batch)
                .n_q(rows)
                .query_strides(batch_stride, row_stride)
                .score(score);
            if config.is_causal {
                call = call.causal();
            }
            if let Some(rows) = config.window_left {
                call = call.window_left(rows);
            }
            if config.scale == Some(0.0) {
                call = call.equal_scores();
            }
            if let Some(rope) = &rope {
                call = call.rope(rope);
            }
            if let (Some(config), Some(q_norm), Some(k_norm)) = (config.norm, q_norm, k_norm) {
                let norm = Norm::rms(config.epsilon as f32);
                let norm = if config.is_of_all_heads { norm.all_heads() } else { norm };
                call = call.norm(norm.q_weight(q_norm).k_weight(k_norm));
            }
            if let Some(lengths) = &lengths {
                call = call.q_lengths(lengths);
            }
            if let Some(cache) = cache {
                call = call.cache(cache);
            }
            call.scheduler(&mha::Rayon).run(workspace)
        })
    }
}
