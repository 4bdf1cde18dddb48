use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, DType, Error, Layout, Module, Result, Shape, Tensor, D};
use candle_nn::{Linear, VarBuilder};
use mha::{Arithmetic, Layer, LayerConfig, Matrix, Norm, ScoreOptions, StorageType, WeightLayout, Weights};

use crate::tensors;
use crate::{Attention, KvCache, Rope};

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
    softcap: Option<f32>,
    rope: Option<Rope>,
    norm: Option<NormConfig>,
    weight_type: Option<StorageType>,
    arithmetic: Arithmetic,
    is_strict: bool,
    keeps_weights: bool,
}

#[derive(Debug, Clone, Copy)]
struct NormConfig {
    epsilon: f64,
    is_of_all_heads: bool,
}

impl AttentionConfig {
    /// Rows of `hidden_size`, and as many heads of keys as of queries, which are `hidden_size` wide together.
    pub fn new(hidden_size: usize, num_heads: usize) -> Self {
        Self {
            hidden_size,
            num_heads,
            num_kv_heads: num_heads,
            head_dim: hidden_size.checked_div(num_heads).unwrap_or(0),
            is_causal: false,
            window_left: None,
            scale: None,
            softcap: None,
            rope: None,
            norm: None,
            weight_type: None,
            arithmetic: Arithmetic::F32,
            is_strict: false,
            keeps_weights: false,
        }
    }

    /// Heads of keys and values (grouped-query attention).
    pub fn kv_heads(mut self, heads: usize) -> Self {
        self.num_kv_heads = heads;
        self
    }

    /// The width of a head, where it is not `hidden_size / num_heads`.
    pub fn head_dim(mut self, width: usize) -> Self {
        self.head_dim = width;
        self
    }

    /// A row attends to itself and to those before it: decoders.
    pub fn causal(mut self) -> Self {
        self.is_causal = true;
        self
    }

    /// A row attends to so many rows before it at most.
    pub fn window_left(mut self, rows: usize) -> Self {
        self.window_left = Some(rows);
        self
    }

    /// Factor of the scores; `1 / sqrt(head_dim)` if not set.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// `softcap * tanh(score / softcap)` in place of each score (Gemma 2).
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = Some(softcap);
        self
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

    /// How the packed weights are kept, in fewer bits if wanted: `F32`, `F16`, `Bf16`, `Int8` or `Int4`. As they come if not set.
    pub fn weight_type(mut self, weight_type: StorageType) -> Self {
        self.weight_type = Some(weight_type);
        self
    }

    /// What the projections are computed in: floats, or with weights of `Int8` or `Int4` integers of 8 or 16 bits.
    pub fn arithmetic(mut self, arithmetic: Arithmetic) -> Self {
        self.arithmetic = arithmetic;
        self
    }

    /// What the library does not serve is an error, and never left to candle's own operations.
    pub fn strict(mut self) -> Self {
        self.is_strict = true;
        self
    }

    /// Keeps the tensors of the weights beside the packed ones, so that inputs which need gradients can run by candle's own operations.
    pub fn keep_weights(mut self) -> Self {
        self.keeps_weights = true;
        self
    }

    /// Loads and packs weights with the names of Llama and most decoders: `q_proj`, `k_proj`, `v_proj` and `o_proj`, and with a norm `q_norm` and
    /// `k_norm`, each with the bias that it has.
    pub fn load(&self, vb: VarBuilder) -> Result<SelfAttention> {
        self.load_named(vb, &Names::default())
    }

    /// Likewise with other names.
    pub fn load_named(&self, vb: VarBuilder, names: &Names) -> Result<SelfAttention> {
        let linear = |name: &str, inputs: usize, outputs: usize| {
            let vb = vb.pp(name);
            let bias = if vb.contains_tensor("bias") { Some(vb.get(outputs, "bias")?) } else { None };
            Ok::<_, Error>(Linear::new(vb.get((outputs, inputs), "weight")?, bias))
        };
        let (columns, kv_columns) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let norm = |name: &str, columns: usize| match self.norm {
            Some(NormConfig { is_of_all_heads: true, .. }) => vb.pp(name).get(columns, "weight").map(Some),
            Some(_) => vb.pp(name).get(self.head_dim, "weight").map(Some),
            None => Ok(None),
        };
        let o = names.o.as_deref().map(|name| linear(name, columns, self.hidden_size)).transpose()?;
        self.build(Parts {
            q: linear(&names.q, self.hidden_size, columns)?,
            k: linear(&names.k, self.hidden_size, kv_columns)?,
            v: linear(&names.v, self.hidden_size, kv_columns)?,
            o,
            q_norm: norm(&names.q_norm, columns)?,
            k_norm: norm(&names.k_norm, kv_columns)?,
        })
    }

    /// Packs weights that are there already. The tensors are not needed afterwards.
    pub fn build(&self, parts: Parts) -> Result<SelfAttention> {
        self.check(&parts)?;
        let refusal = tensors::refusal(parts.tensors());
        if let Some(refusal) = &refusal {
            refusal.or_warn(self.is_strict)?;
        }
        let numbers = |tensor: &Option<Tensor>| tensor.as_ref().map(tensors::floats).transpose();
        let packed = match refusal {
            None => Some(Packed { layer: self.pack(&parts)?, q_norm: numbers(&parts.q_norm)?, k_norm: numbers(&parts.k_norm)? }),
            Some(_) => None,
        };
        let parts = Some(parts).filter(|_| packed.is_none() || self.keeps_weights);
        Ok(SelfAttention { core: Arc::new(Core { config: self.clone(), packed, parts }) })
    }

    fn check(&self, parts: &Parts) -> Result<()> {
        let (columns, kv_columns) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let shape = |name: &str, linear: &Linear, inputs: usize, outputs: usize| {
            if linear.weight().dims() != [outputs, inputs] || linear.bias().is_some_and(|bias| bias.dims() != [outputs]) {
                let bias = linear.bias().map(Tensor::dims);
                candle_core::bail!("{name} is {:?} with the bias {bias:?}; it must be [{outputs}, {inputs}]", linear.weight().dims());
            }
            Ok(())
        };
        shape("q", &parts.q, self.hidden_size, columns)?;
        shape("k", &parts.k, self.hidden_size, kv_columns)?;
        shape("v", &parts.v, self.hidden_size, kv_columns)?;
        if let Some(o) = &parts.o {
            shape("o", o, columns, o.weight().dim(0)?)?;
        }
        let is_of_all_heads = self.norm.is_some_and(|norm| norm.is_of_all_heads);
        for (name, tensor, columns) in [("q_norm", &parts.q_norm, columns), ("k_norm", &parts.k_norm, kv_columns)] {
            let width = if is_of_all_heads { columns } else { self.head_dim };
            match (self.norm, tensor) {
                (None, Some(_)) => candle_core::bail!("there is a {name}, but no epsilon for it: set qk_norm()"),
                (Some(_), None) => candle_core::bail!("there is no {name}, which qk_norm() needs: add it by Parts::norms()"),
                (Some(_), Some(weight)) if weight.dims() != [width] => {
                    candle_core::bail!("{name} is {:?}; it must be [{width}]", weight.dims())
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn pack(&self, parts: &Parts) -> Result<Layer<'static>> {
        let matrices: Vec<&Tensor> = [&parts.q, &parts.k, &parts.v].into_iter().chain(&parts.o).map(Linear::weight).collect();
        let first = matrices[0].dtype();
        let dtype = if matrices.iter().all(|matrix| matrix.dtype() == first) { first } else { DType::F32 };
        let matrices = matrices
            .into_iter()
            .map(|matrix| tensors::readable(&matrix.to_dtype(dtype)?.unsqueeze(0)?, 1))
            .collect::<Result<Vec<Tensor>>>()?;
        let storages: Vec<_> = matrices.iter().map(Tensor::storage_and_layout).collect();
        let matrices = storages
            .iter()
            .map(|(storage, layout)| {
                let [_, row] = tensors::row_strides(layout);
                Ok(Matrix::from(tensors::elements(tensors::cpu(storage)?, layout)?).stride(row))
            })
            .collect::<Result<Vec<Matrix>>>()?;
        let bias = |linear: Option<&Linear>| linear.and_then(Linear::bias).map(tensors::floats).transpose();
        let (b_q, b_k, b_v) = (bias(Some(&parts.q))?, bias(Some(&parts.k))?, bias(Some(&parts.v))?);
        let b_o = bias(parts.o.as_ref())?;
        let mut weights = Weights::new(matrices[0], matrices[1], matrices[2]).layout(WeightLayout::OutIn);
        if let Some(b_q) = &b_q {
            weights = weights.query_bias(b_q);
        }
        if let Some(b_k) = &b_k {
            weights = weights.key_bias(b_k);
        }
        if let Some(b_v) = &b_v {
            weights = weights.value_bias(b_v);
        }
        if let Some(w_o) = matrices.get(3) {
            weights = weights.output(*w_o);
        }
        if let Some(b_o) = &b_o {
            weights = weights.output_bias(b_o);
        }
        let weight_type = self.weight_type.unwrap_or(tensors::storage_type(dtype));
        let mut config = LayerConfig::new(self.hidden_size, self.num_heads)
            .num_kv_heads(self.num_kv_heads)
            .head_dim(self.head_dim)
            .scale(tensors::factor(self.scale))
            .weight_type(weight_type)
            .arithmetic(self.arithmetic);
        if let Some(o) = &parts.o {
            config = config.output_dim(o.weight().dim(0)?);
        }
        Layer::new(&config, &weights).map_err(Error::wrap)
    }
}

/// What the weights of a [`SelfAttention`] are called in a [`VarBuilder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    q: String,
    k: String,
    v: String,
    o: Option<String>,
    q_norm: String,
    k_norm: String,
}

impl Default for Names {
    /// `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`.
    fn default() -> Self {
        Self::new("q_proj", "k_proj", "v_proj").output("o_proj")
    }
}

impl Names {
    /// The names of the projections. Without one of the [`output`](Self::output), the heads side by side are the output.
    pub fn new(q: &str, k: &str, v: &str) -> Self {
        let (q_norm, k_norm) = ("q_norm".into(), "k_norm".into());
        Self { q: q.into(), k: k.into(), v: v.into(), o: None, q_norm, k_norm }
    }

    /// Those of BERT, below `attention`: `self.query`, `self.key`, `self.value` and `output.dense`.
    pub fn bert() -> Self {
        Self::new("self.query", "self.key", "self.value").output("output.dense")
    }

    /// The name of the projection of the output.
    pub fn output(mut self, o: &str) -> Self {
        self.o = Some(o.into());
        self
    }

    /// The names of the norms of queries and keys.
    pub fn norms(mut self, q_norm: &str, k_norm: &str) -> Self {
        (self.q_norm, self.k_norm) = (q_norm.into(), k_norm.into());
        self
    }
}

/// The weights of a [`SelfAttention`], for [`AttentionConfig::build`].
#[derive(Debug, Clone)]
pub struct Parts {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Option<Linear>,
    q_norm: Option<Tensor>,
    k_norm: Option<Tensor>,
}

impl Parts {
    /// The projections of queries, keys and values. A fused one is given as three views: `Linear::new(w.narrow(0, first, rows)?, None)`.
    pub fn new(q: &Linear, k: &Linear, v: &Linear) -> Self {
        Self { q: q.clone(), k: k.clone(), v: v.clone(), o: None, q_norm: None, k_norm: None }
    }

    /// The projection of the output. Without it, the heads side by side are the output.
    pub fn output(mut self, o: &Linear) -> Self {
        self.o = Some(o.clone());
        self
    }

    /// The weights of the norms of queries and keys, for [`AttentionConfig::qk_norm`].
    pub fn norms(mut self, q_norm: &Tensor, k_norm: &Tensor) -> Self {
        (self.q_norm, self.k_norm) = (Some(q_norm.clone()), Some(k_norm.clone()));
        self
    }

    fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let linear = [("q", Some(&self.q)), ("k", Some(&self.k)), ("v", Some(&self.v)), ("o", self.o.as_ref())];
        let tensors = linear.into_iter().flat_map(|(name, linear)| {
            linear.into_iter().flat_map(move |linear| [Some(linear.weight()), linear.bias()].map(|tensor| (name, tensor)))
        });
        let norms = [("q_norm", self.q_norm.as_ref()), ("k_norm", self.k_norm.as_ref())];
        tensors.chain(norms).filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }
}

/// Self-attention as a layer of a model: projections, norms, rotation, attention over a cache, and the projection of the output, in one call of the
/// library. Made by [`AttentionConfig`]; a clone shares the packed weights.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::VarBuilder;
/// use mha_candle::{mha::RopeConfig, AttentionConfig, KvCache, Rope};
///
/// # fn main() -> candle_core::Result<()> {
/// # let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let rope = Rope::new(&RopeConfig::new(64).base(500000.0), 4096)?;
/// let attention = AttentionConfig::new(512, 8).kv_heads(2).causal().rope(&rope).load(vb.pp("self_attn"))?;
///
/// let mut cache = KvCache::new();
/// let prompt = Tensor::randn(0f32, 1., (1, 7, 512), &Device::Cpu)?;
/// let y = attention.forward_cached(&prompt, 0, &mut cache)?; // [1, 7, 512]
/// let token = Tensor::randn(0f32, 1., (1, 1, 512), &Device::Cpu)?;
/// let y = attention.forward_cached(&token, 7, &mut cache)?; // [1, 1, 512]
/// # assert_eq!((y.dims(), cache.length()), (&[1, 1, 512][..], 8));
/// # Ok(()) }
/// ```
///
/// Rows are of `f32`, `f16` or `bf16` whatever the weights are, and so is the output. Weights that need gradients, are on another device or of
/// another type run by candle's own operations, which `log::warn!` says once; or with [`strict`](AttentionConfig::strict) they are an error.
#[derive(Clone)]
pub struct SelfAttention {
    core: Arc<Core>,
}

struct Core {
    config: AttentionConfig,
    packed: Option<Packed>,
    parts: Option<Parts>,
}

struct Packed {
    layer: Layer<'static>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
}

impl SelfAttention {
    /// Rows `[batch, rows, hidden_size]` behind those in a cache. `offset` is their first position, as candle's models pass it (`index_pos`): what the
    /// cache has from there on is forgotten, so that 0 begins anew.
    pub fn forward_cached(&self, x: &Tensor, offset: usize, cache: &mut KvCache) -> Result<Tensor> {
        self.call(x).cache(cache).offset(offset).run()
    }

    /// A call with more to say than [`forward`](Module::forward) and [`forward_cached`](Self::forward_cached).
    pub fn call<'a>(&'a self, x: &'a Tensor) -> Call<'a> {
        Call { core: &self.core, x, cache: None, offset: None, lengths: None, starts: None, bias: None, mask: None }
    }

    /// The packed layer, to ask for its shape; `None` if candle's own operations run.
    pub fn layer(&self) -> Option<&Layer<'static>> {
        self.core.packed.as_ref().map(|packed| &packed.layer)
    }
}

impl Module for SelfAttention {
    /// Rows `[batch, rows, hidden_size]`, without a cache.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.call(x).run()
    }
}

impl fmt::Debug for SelfAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_packed = self.core.packed.is_some();
        f.debug_struct("SelfAttention").field("config", &self.core.config).field("is_packed", &is_packed).finish()
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
    starts: Option<&'a [usize]>,
    bias: Option<&'a Tensor>,
    mask: Option<&'a Tensor>,
}

impl<'a> Call<'a> {
    /// Appends the rows to a cache, each sequence behind what it has, and attends to all of it.
    pub fn cache(mut self, cache: &'a mut KvCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// The position in the cache at which the rows begin; what it has from there on is forgotten.
    pub fn offset(mut self, position: usize) -> Self {
        self.offset = Some(position);
        self
    }

    /// `[batch]`: the valid rows of each sequence. The others are padding: no work is done for them, and their outputs are 0.
    pub fn lengths(mut self, rows: &'a [usize]) -> Self {
        self.lengths = Some(rows);
        self
    }

    /// `[batch]`: the first valid row of each sequence: padding on the left.
    pub fn starts(mut self, rows: &'a [usize]) -> Self {
        self.starts = Some(rows);
        self
    }

    /// A tensor of floats that is added to the scores, as candle's models add their masks; it broadcasts to `[batch, heads, rows, keys]`, with a cache
    /// all its keys.
    pub fn bias(mut self, bias: impl Into<Option<&'a Tensor>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// A tensor of `u8` that is 0 where a key takes no part; it broadcasts likewise.
    pub fn mask(mut self, mask: impl Into<Option<&'a Tensor>>) -> Self {
        self.mask = mask.into();
        self
    }

    /// Computes the output, `[batch, rows, hidden_size]`.
    pub fn run(mut self) -> Result<Tensor> {
        let (config, x) = (&self.core.config, self.x);
        if x.rank() != 3 || x.dim(2)? != config.hidden_size {
            candle_core::bail!("x is {:?}; it must be [batch, rows, {}]", x.dims(), config.hidden_size);
        }
        let batch = x.dim(0)?;
        for (name, numbers) in [("lengths", self.lengths), ("starts", self.starts)] {
            if numbers.is_some_and(|numbers| numbers.len() != batch) {
                candle_core::bail!("{name} are {}, but there are {batch} sequences", numbers.map_or(0, <[usize]>::len));
            }
        }
        if self.offset.is_some_and(|offset| offset != 0) && self.cache.is_none() {
            candle_core::bail!("there is an offset, but no cache() that holds the rows before it");
        }
        let given = [("x", Some(x)), ("bias", self.bias), ("mask", self.mask)];
        let refusal = tensors::refusal(given.into_iter().filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor))));
        if let Some(refusal) = &refusal {
            refusal.or_warn(config.is_strict)?;
        }
        if let Some(cache) = &mut self.cache {
            cache.begin_at(self.offset)?;
        }
        match (&self.core.packed, &self.core.parts, refusal) {
            (Some(packed), _, None) => self.run_packed(packed),
            (_, Some(parts), _) => self.run_stock(parts),
            (_, None, Some(refusal)) => {
                candle_core::bail!("{refusal}. The weights are packed; keep_weights() lets candle's own operations run instead")
            }
            (None, None, None) => candle_core::bail!("the layer has no weights"),
        }
    }

    fn run_packed(self, packed: &Packed) -> Result<Tensor> {
        let (batch, rows, _) = self.x.dims3()?;
        let x = tensors::readable(self.x, 1)?;
        let cache = self.cache.map(|cache| cache.packed(&packed.layer, batch, rows)).transpose()?;
        let held = cache.as_ref().map_or(0, |cache| (0..batch).filter_map(|sequence| cache.length(sequence).ok()).max().unwrap_or(0));
        let added = self.lengths.map_or(rows, |lengths| lengths.iter().copied().max().unwrap_or(0));
        let pairs = [batch, packed.layer.shape().num_heads, rows, if cache.is_some() { held + added } else { rows }];
        let wide = |tensor: Option<&Tensor>| tensor.map(|tensor| tensors::broadcast_pairs(tensor, pairs)).transpose();
        let ints = |numbers: &[usize]| numbers.iter().copied().map(tensors::int).collect::<Vec<i64>>();
        x.apply_op1_no_bwd(&PackedCall {
            packed,
            config: &self.core.config,
            cache: Cell::new(cache),
            lengths: self.lengths.map(ints),
            starts: self.starts.map(ints),
            bias: wide(self.bias)?,
            mask: wide(self.mask)?,
            pairs,
        })
    }

    fn run_stock(self, parts: &Parts) -> Result<Tensor> {
        let (config, x) = (&self.core.config, self.x);
        let (batch, rows, _) = x.dims3()?;
        if self.lengths.is_some() || (self.starts.is_some() && (self.cache.is_some() || config.rope.is_some())) {
            candle_core::bail!("candle's own operations, which these tensors need, take no lengths or starts here: pass a mask");
        }
        let held = self.cache.as_ref().map_or(0, |cache| cache.length());
        let heads = |x: Tensor, heads: usize| x.reshape((batch, rows, heads, config.head_dim));
        let norm = |x: Tensor, weight: &Option<Tensor>| match (config.norm, weight) {
            (Some(norm), Some(weight)) if norm.is_of_all_heads => {
                let dims = x.dims().to_vec();
                rms_norm(&x.flatten_from(2)?, weight, norm.epsilon)?.reshape(dims)
            }
            (Some(norm), Some(weight)) => rms_norm(&x, weight, norm.epsilon),
            _ => Ok(x),
        };
        let rotate = |x: Tensor| match &config.rope {
            Some(rope) => rope.apply(&x.transpose(1, 2)?.contiguous()?, held),
            None => x.transpose(1, 2),
        };
        let q = rotate(norm(heads(parts.q.forward(x)?, config.num_heads)?, &parts.q_norm)?)?;
        let k = rotate(norm(heads(parts.k.forward(x)?, config.num_kv_heads)?, &parts.k_norm)?)?;
        let v = heads(parts.v.forward(x)?, config.num_kv_heads)?.transpose(1, 2)?;
        let (k, v) = match self.cache {
            Some(cache) => cache.append(&k, &v)?,
            None => (k, v),
        };
        let mut attention = Attention::new();
        attention.is_causal = config.is_causal;
        attention.window_left = config.window_left;
        attention.scale = config.scale;
        attention.softcap = config.softcap;
        attention.bias = self.bias.cloned();
        attention.mask = self.mask.cloned();
        attention.kv_starts = self.starts.map(|starts| starts.iter().copied().map(tensors::int).collect());
        let y = crate::stock::attention(&attention, &crate::attention::Dimensions::new(&attention, &q, &k, &v)?, &q, &k, &v)?;
        let y = y.transpose(1, 2)?.reshape((batch, rows, config.num_heads * config.head_dim))?;
        match &parts.o {
            Some(o) => o.forward(&y),
            None => Ok(y),
        }
    }
}

fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    let (dtype, width) = (x.dtype(), x.dim(D::Minus1)?);
    let exact = if dtype == DType::F64 { dtype } else { DType::F32 };
    let x = x.to_dtype(exact)?;
    let mean = (x.sqr()?.sum_keepdim(D::Minus1)? / width as f64)?;
    x.broadcast_div(&(mean + epsilon)?.sqrt()?)?.to_dtype(dtype)?.broadcast_mul(weight)
}

/// A call of the library, as one of candle's operations.
struct PackedCall<'a> {
    packed: &'a Packed,
    config: &'a AttentionConfig,
    cache: Cell<Option<&'a mut mha::KvCache<'static>>>,
    lengths: Option<Vec<i64>>,
    starts: Option<Vec<i64>>,
    bias: Option<Tensor>,
    mask: Option<Tensor>,
    pairs: [usize; 4],
}

impl CustomOp1 for PackedCall<'_> {
    fn name(&self) -> &'static str {
        "mha-self-attention"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Self { packed, config, .. } = self;
        let [batch, _, rows, _] = self.pairs;
        let shape = Shape::from((batch, rows, packed.layer.shape().output_dim));
        let mut y = tensors::zeros_like(x, shape.elem_count())?;
        if shape.elem_count() == 0 {
            return Ok((y, shape));
        }
        let (bias, mask) = (tensors::storage(&self.bias), tensors::storage(&self.mask));
        let mut score = ScoreOptions::new().softcap(config.softcap.unwrap_or(0.0));
        if let Some((storage, layout)) = &bias {
            let [batch, head, row] = tensors::pair_strides(layout);
            score = score.bias(tensors::elements(tensors::cpu(storage)?, layout)?, self.pairs).bias_strides(batch, head, row);
        }
        if let Some((storage, layout)) = &mask {
            let [batch, head, row] = tensors::pair_strides(layout);
            score = score.mask(tensors::bytes(tensors::cpu(storage)?, layout)?, self.pairs).mask_strides(batch, head, row);
        }
        let [batch_stride, row_stride] = tensors::row_strides(layout);
        let mut call = packed.layer.forward(tensors::elements(x, layout)?, tensors::elements_mut(&mut y)?);
        call = call.batch(batch).n_q(rows).query_strides(batch_stride, row_stride).score(score);
        if config.is_causal {
            call = call.causal();
        }
        if let Some(rows) = config.window_left {
            call = call.window_left(rows);
        }
        if let Some(rope) = &config.rope {
            call = call.rope(rope.of_call());
        }
        if let (Some(config), Some(q_norm), Some(k_norm)) = (config.norm, &packed.q_norm, &packed.k_norm) {
            let norm = Norm::rms(config.epsilon as f32);
            let norm = if config.is_of_all_heads { norm.all_heads() } else { norm };
            call = call.norm(norm.q_weight(q_norm).k_weight(k_norm));
        }
        if let Some(lengths) = &self.lengths {
            call = call.q_lengths(lengths);
        }
        if let Some(starts) = &self.starts {
            call = call.kv_start(starts);
        }
        if let Some(cache) = self.cache.take() {
            call = call.cache(cache);
        }
        tensors::with_workspace(|workspace| match tensors::threads() {
            Some(threads) => call.scheduler(threads).run(workspace),
            None => call.run(workspace),
        })?;
        Ok((y, shape))
    }
}
