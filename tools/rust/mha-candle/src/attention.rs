use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use mha::ScoreOptions;

use crate::stock;
use crate::tensors::{self, Refusal};

/// `softmax(scale * q k^T) v` on tensors, with the masks that models have. Without a setting, all queries attend to all keys, and the scale is
/// `1 / sqrt(head_dim)`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mha_candle::Attention;
///
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (2, 8, 5, 64), &Device::Cpu)?; // [batch, heads, rows, head_dim]
/// let kv = Tensor::randn(0f32, 1., (2, 7, 2, 64), &Device::Cpu)?.transpose(1, 2)?; // two heads, by their strides
/// let y = Attention::new().causal().window_left(1023).softcap(50.0).forward(&q, &kv, &kv)?;
/// assert_eq!(y.dims(), [2, 8, 5, 64]);
/// # Ok(()) }
/// ```
///
/// Tensors on the CPU of `f32`, `f16` and `bf16` are read where they lie, by their strides; only one whose innermost dimension is not contiguous, or
/// whose rows overlap, is copied first. The output has the type of the queries. Results are the same bits for any batch, any strides and any number
/// of threads.
///
/// Tensors on another device, of another type or with gradients are computed by candle's own operations, which `log::warn!` says once for each
/// reason; or with [`strict`](Self::strict) they are an error.
#[derive(Debug, Clone, Default)]
pub struct Attention {
    pub(crate) is_causal: bool,
    pub(crate) window_left: Option<usize>,
    pub(crate) window_right: Option<usize>,
    pub(crate) offset: Option<i64>,
    pub(crate) kv_lengths: Option<Vec<i64>>,
    pub(crate) kv_starts: Option<Vec<i64>>,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) alibi_slopes: Option<Vec<f32>>,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) bias: Option<Tensor>,
    pub(crate) mask: Option<Tensor>,
    pub(crate) has_rows_first: bool,
    pub(crate) is_strict: bool,
}

impl Attention {
    /// All queries attend to all keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// A query attends to the keys at its own position and before. The last query stands at the last key, unless [`offset`](Self::offset) is given.
    pub fn causal(mut self) -> Self {
        self.is_causal = true;
        self
    }

    /// A query attends to so many keys before its own position at most. candle's `sliding_window` counts its own too in some models.
    pub fn window_left(mut self, keys: usize) -> Self {
        self.window_left = Some(keys);
        self
    }

    /// A query attends to so many keys behind its own position at most.
    pub fn window_right(mut self, keys: usize) -> Self {
        self.window_right = Some(keys);
        self
    }

    /// The position of the first query, counted from the first key: `index_pos` of candle's models.
    pub fn offset(mut self, position: usize) -> Self {
        self.offset = Some(tensors::int(position));
        self
    }

    /// How many keys of each sequence are valid, `[batch]`; the others are padding, which is not read.
    pub fn kv_lengths(mut self, keys: &[usize]) -> Self {
        self.kv_lengths = Some(keys.iter().copied().map(tensors::int).collect());
        self
    }

    /// The first valid key of each sequence, `[batch]`: padding on the left. Positions count from there.
    pub fn kv_starts(mut self, keys: &[usize]) -> Self {
        self.kv_starts = Some(keys.iter().copied().map(tensors::int).collect());
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

    /// `[heads]`: lowers scores by so much for each position between query and key (ALiBi; [`mha::alibi_slopes`]).
    pub fn alibi_slopes(mut self, slopes: &[f32]) -> Self {
        self.alibi_slopes = Some(slopes.to_vec());
        self
    }

    /// `[heads]`: the score of a key without a value (gpt-oss).
    pub fn sinks(mut self, sinks: &[f32]) -> Self {
        self.sinks = Some(sinks.to_vec());
        self
    }

    /// A tensor of floats that is added to the scores, as candle's models add their masks; it broadcasts to `[batch, heads, rows, keys]`. A key of
    /// -infinity takes no part.
    pub fn bias(mut self, bias: &Tensor) -> Self {
        self.bias = Some(bias.clone());
        self
    }

    /// A tensor of `u8` that is 0 where a key takes no part; it broadcasts likewise.
    pub fn mask(mut self, mask: &Tensor) -> Self {
        self.mask = Some(mask.clone());
        self
    }

    /// The reverse of [`mask`](Self::mask), as `candle_transformers::utils::build_causal_mask` makes it: not 0 where a key takes no part.
    pub fn masked_out(self, mask: &Tensor) -> Result<Self> {
        Ok(self.mask(&mask.eq(0u8)?))
    }

    /// Tensors, the output among them, are `[batch, rows, heads, head_dim]`, as of flash attention; if not set, `[batch, heads, rows, head_dim]`.
    pub fn rows_first(mut self) -> Self {
        self.has_rows_first = true;
        self
    }

    /// What the library does not serve is an error, and never left to candle's own operations.
    pub fn strict(mut self) -> Self {
        self.is_strict = true;
        self
    }

    /// Attends. `q` is `[batch, heads, rows, head_dim]`, `k` `[batch, kv_heads, keys, head_dim]` and `v` `[batch, kv_heads, keys, head_dim_v]`, where
    /// `kv_heads` divides `heads`; the result is `[batch, heads, rows, head_dim_v]`. It lies in memory as `[batch, rows, heads, head_dim_v]`: to
    /// transpose and reshape it to `[batch, rows, heads * head_dim_v]` copies nothing.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let of = Dimensions::new(self, q, k, v)?;
        let optional = [("bias", self.bias.as_ref()), ("mask", self.mask.as_ref())];
        let given = optional.iter().filter_map(|(name, tensor)| tensor.map(|tensor| (*name, tensor)));
        if let Some(refusal) = tensors::refusal([("q", q), ("k", k), ("v", v)].into_iter().chain(given)) {
            refusal.or_warn(self.is_strict)?;
            return stock::attention(self, &of, q, k, v);
        }
        let call = Call { of: &of, attention: self, bias: pairs(&self.bias, &of)?, mask: pairs(&self.mask, &of)? };
        let (q, k, v) = (tensors::readable(q, of.rows)?, tensors::readable(k, of.rows)?, tensors::readable(v, of.rows)?);
        let y = q.apply_op3_no_bwd(&k, &v, &call)?; // rows first
        if self.has_rows_first {
            Ok(y)
        } else {
            y.transpose(1, 2)
        }
    }

    /// Why [`forward`](Self::forward) would leave these tensors to candle's own operations, or refuse them if it is strict; `None` if it would not.
    pub fn refusal(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Option<String> {
        tensors::refusal([("q", q), ("k", k), ("v", v)]).map(|refusal: Refusal| refusal.to_string())
    }
}

/// `candle_nn::ops::sdpa`, with its parameters, on the CPU: `q` is `[batch, heads, rows, head_dim]`, and a `softcapping` of 1 is none.
pub fn sdpa(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, do_causal: bool, scale: f32, softcapping: f32) -> Result<Tensor> {
    let softcap = Some(softcapping).filter(|softcap| *softcap != 1.0);
    Attention { bias: mask.cloned(), is_causal: do_causal, scale: Some(scale), softcap, ..Attention::new() }.forward(q, k, v)
}

/// `candle_flash_attn::flash_attn`, with its parameters, on the CPU: `q` and the result are `[batch, rows, heads, head_dim]`.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    Attention { is_causal: causal, scale: Some(softmax_scale), has_rows_first: true, ..Attention::new() }.forward(q, k, v)
}

/// The dimensions of a call, and which of the tensors' dimensions are its heads and rows.
pub(crate) struct Dimensions {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub n_q: usize,
    pub n_kv: usize,
    pub head_dim: usize,
    pub head_dim_v: usize,
    pub rows: usize,
    pub head: usize,
}

impl Dimensions {
    pub fn new(attention: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        let (rows, head) = if attention.has_rows_first { (1, 2) } else { (2, 1) };
        let order = if attention.has_rows_first { "[batch, rows, heads, head_dim]" } else { "[batch, heads, rows, head_dim]" };
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            if tensor.rank() != 4 {
                candle_core::bail!("{name} is {:?}; attention takes {order}", tensor.dims());
            }
        }
        let of = Self {
            batch: q.dim(0)?,
            heads: q.dim(head)?,
            kv_heads: k.dim(head)?,
            n_q: q.dim(rows)?,
            n_kv: k.dim(rows)?,
            head_dim: q.dim(3)?,
            head_dim_v: v.dim(3)?,
            rows,
            head,
        };
        if k.dim(0)? != of.batch
            || v.dim(0)? != of.batch
            || k.dim(3)? != of.head_dim
            || v.dim(head)? != of.kv_heads
            || v.dim(rows)? != of.n_kv
        {
            candle_core::bail!(
                "q is {:?}, k {:?} and v {:?}, all {order}; k has the batch and head_dim of q, and v the batch, heads and rows of k",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        if of.kv_heads == 0 || !of.heads.is_multiple_of(of.kv_heads) {
            candle_core::bail!("q has {} heads and k {}; as many queries' heads go with each head of keys", of.heads, of.kv_heads);
        }
        for (name, numbers, needed) in [
            ("kv_lengths", attention.kv_lengths.as_ref().map(Vec::len), ("sequences", of.batch)),
            ("kv_starts", attention.kv_starts.as_ref().map(Vec::len), ("sequences", of.batch)),
            ("alibi_slopes", attention.alibi_slopes.as_ref().map(Vec::len), ("heads", of.heads)),
            ("sinks", attention.sinks.as_ref().map(Vec::len), ("heads", of.heads)),
        ] {
            if numbers.is_some_and(|count| count != needed.1) {
                candle_core::bail!("{name} are {}, but there are {} {}", numbers.unwrap_or(0), needed.1, needed.0);
            }
        }
        Ok(of)
    }

    /// `[batch, heads, rows, keys]`
    pub fn pairs(&self) -> [usize; 4] {
        [self.batch, self.heads, self.n_q, self.n_kv]
    }
}

/// A mask or bias, as wide as the pairs of queries and keys.
fn pairs(tensor: &Option<Tensor>, of: &Dimensions) -> Result<Option<Tensor>> {
    tensor.as_ref().map(|tensor| tensors::broadcast_pairs(tensor, of.pairs())).transpose()
}

/// A call of the library, as one of candle's operations.
struct Call<'a> {
    of: &'a Dimensions,
    attention: &'a Attention,
    bias: Option<Tensor>,
    mask: Option<Tensor>,
}

impl CustomOp3 for Call<'_> {
    fn name(&self) -> &'static str {
        "mha-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let Self { of, attention, .. } = self;
        let shape = Shape::from((of.batch, of.n_q, of.heads, of.head_dim_v));
        let mut y = tensors::zeros_like(q, shape.elem_count())?;
        if shape.elem_count() == 0 {
            return Ok((y, shape));
        }
        let (bias, mask) = (tensors::storage(&self.bias), tensors::storage(&self.mask));
        let mut score = ScoreOptions::new().softcap(attention.softcap.unwrap_or(0.0));
        if let Some(slopes) = &attention.alibi_slopes {
            score = score.alibi_slopes(slopes);
        }
        if let Some(sinks) = &attention.sinks {
            score = score.sinks(sinks);
        }
        if let Some((storage, layout)) = &bias {
            let ([batch, head, row], extents) = (tensors::pair_strides(layout), of.pairs());
            score = score.bias(tensors::elements(tensors::cpu(storage)?, layout)?, extents).bias_strides(batch, head, row);
        }
        if let Some((storage, layout)) = &mask {
            let ([batch, head, row], extents) = (tensors::pair_strides(layout), of.pairs());
            score = score.mask(tensors::bytes(tensors::cpu(storage)?, layout)?, extents).mask_strides(batch, head, row);
        }
        let strides = |layout: &Layout| tensors::strides(layout, of.rows, of.head);
        let starts = attention.offset.map(|offset| vec![offset; of.batch]);

        let heads = mha::Attention::new(of.heads, of.head_dim).num_kv_heads(of.kv_heads).head_dim_v(of.head_dim_v);
        let mut call = heads
            .scale(tensors::factor(attention.scale))
            .call(tensors::elements(q, q_layout)?, tensors::elements_mut(&mut y)?)
            .batch(of.batch)
            .n_q(of.n_q)
            .n_kv(of.n_kv)
            .key_value(tensors::elements(k, k_layout)?, tensors::elements(v, v_layout)?)
            .q_strides(strides(q_layout))
            .k_strides(strides(k_layout))
            .v_strides(strides(v_layout))
            .score(score);
        if attention.is_causal {
            call = call.causal();
        }
        if let Some(keys) = attention.window_left {
            call = call.window_left(keys);
        }
        if let Some(keys) = attention.window_right {
            call = call.window_right(keys);
        }
        if let Some(starts) = &starts {
            call = call.q_start(starts);
        }
        if let Some(lengths) = &attention.kv_lengths {
            call = call.kv_lengths(lengths);
        }
        if let Some(starts) = &attention.kv_starts {
            call = call.kv_start(starts);
        }
        tensors::with_workspace(|workspace| match tensors::threads() {
            Some(threads) => call.scheduler(threads).run(workspace),
            None => call.run(workspace),
        })?;
        Ok((y, shape))
    }
}
