use candle_core::{Result, Tensor};
use mha::Strides;

use crate::tensors;

/// `softmax(scale * q k^T) v` on tensors, with the masks that models have. Without a setting, all
/// queries attend to all keys, and the scale is `1 / sqrt(head_dim)`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mha_candle::Attention;
///
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (2, 8, 5, 64), &Device::Cpu)?; // [batch, heads, rows, head_dim]
/// // Two heads, by their strides.
/// let kv = Tensor::randn(0f32, 1., (2, 7, 2, 64), &Device::Cpu)?.transpose(1, 2)?;
/// let y = Attention::new().causal().window_left(1023).softcap(50.0).forward(&q, &kv, &kv)?;
/// assert_eq!(y.dims(), [2, 8, 5, 64]);
/// # Ok(()) }
/// ```
///
/// What `transpose` and `narrow` make is read where it lies; only a tensor whose innermost
/// dimension is not contiguous, or whose rows overlap, is copied first. The output has the type of
/// the queries.
#[derive(Debug, Clone, Default)]
pub struct Attention {
    is_causal: bool,
    window_left: Option<usize>,
    window_right: Option<usize>,
    offset: Option<i64>,
    scale: Option<f32>,
    softcap: f32,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    bias: Option<Tensor>,
    mask: Option<Tensor>,
    has_rows_first: bool,
}

impl Attention {
    /// All queries attend to all keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// A query attends to the keys at its own position and before. The last query stands at the
    /// last key, unless [`offset`](Self::offset) is given.
    pub fn causal(mut self) -> Self {
        self.is_causal = true;
        self
    }

    setters! {
        /// A query attends to at most this many keys before its own position. candle's
        /// `sliding_window` counts its own too in some models.
        window_left: usize;
        /// A query attends to at most this many keys after its own position.
        window_right: usize;
    }

    /// The position of the first query, counted from the first key: `index_pos` of candle's models.
    pub fn offset(mut self, position: usize) -> Self {
        self.offset = Some(tensors::int(position));
        self
    }

    setters! {
        /// Factor of the scores; `1 / sqrt(head_dim)` if not set.
        scale: f32;
        /// `softcap * tanh(score / softcap)` in place of each score (Gemma 2).
        softcap: f32;
    }

    /// `[heads]`: lowers scores by so much for each position between query and key (ALiBi;
    /// [`mha::alibi_slopes`]).
    pub fn alibi_slopes(mut self, slopes: &[f32]) -> Self {
        self.alibi_slopes = Some(slopes.to_vec());
        self
    }

    /// `[heads]`: the score of a key without a value (gpt-oss).
    pub fn sinks(mut self, sinks: &[f32]) -> Self {
        self.sinks = Some(sinks.to_vec());
        self
    }

    /// A tensor of floats that is added to the scores, as candle's models add their masks; it
    /// broadcasts to `[batch, heads, rows, keys]`. A key of -infinity takes no part.
    pub fn bias(mut self, bias: &Tensor) -> Self {
        self.bias = Some(bias.clone());
        self
    }

    /// A tensor of `u8` that is 0 where a key takes no part; it broadcasts as a bias does.
    pub fn mask(mut self, mask: &Tensor) -> Self {
        self.mask = Some(mask.clone());
        self
    }

    /// The reverse of [`mask`](Self::mask), as `candle_transformers::utils::build_causal_mask`
    /// makes it: not 0 where a key takes no part.
    pub fn masked_out(self, mask: &Tensor) -> Result<Self> {
        Ok(self.mask(&mask.eq(0u8)?))
    }

    /// Tensors, the output among them, are `[batch, rows, heads, head_dim]`, as of flash attention;
    /// if not set, `[batch, heads, rows, head_dim]`.
    pub fn rows_first(mut self) -> Self {
        self.has_rows_first = true;
        self
    }

    /// Attends. `q` is `[batch, heads, rows, head_dim]`, `k` `[batch, num_kv_heads, keys,
    /// head_dim]` and `v` `[batch, num_kv_heads, keys, head_dim_v]`, where `num_kv_heads` divides
    /// `heads`; the result is `[batch, heads, rows, head_dim_v]`. It lies in memory as `[batch,
    /// rows, heads, head_dim_v]`: to transpose and reshape it to `[batch, rows, heads *
    /// head_dim_v]` copies nothing.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        tensors::check([
            ("q", Some(q)),
            ("k", Some(k)),
            ("v", Some(v)),
            ("bias", self.bias.as_ref()),
            ("mask", self.mask.as_ref()),
        ])?;
        let (order, name) = if self.has_rows_first {
            ([0, 1, 2, 3], "[batch, rows, heads, head_dim]")
        } else {
            ([0, 2, 1, 3], "[batch, heads, rows, head_dim]")
        };
        if [q, k, v].iter().any(|tensor| tensor.rank() != 4) {
            candle_core::bail!(
                "q is {:?}, k {:?} and v {:?}; attention takes {name}",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        let of = |tensor: &Tensor| order.map(|axis| tensor.dims()[axis]);
        let ([batch, n_q, heads, width], [_, n_kv, num_kv_heads, _], [.., width_v]) =
            (of(q), of(k), of(v));
        if of(k) != [batch, n_kv, num_kv_heads, width]
            || of(v) != [batch, n_kv, num_kv_heads, width_v]
        {
            candle_core::bail!(
                "q is {:?}, k {:?} and v {:?}, all {name}; k has the batch and head_dim of q, and \
                    v the batch, heads and rows of k",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        let extents = [batch, heads, n_q, n_kv];
        let (bias, mask) = (
            tensors::pairs(self.bias.as_ref(), extents)?,
            tensors::pairs(self.mask.as_ref(), extents)?,
        );
        let (bias, mask) = (
            bias.as_ref().map(Tensor::storage_and_layout),
            mask.as_ref().map(Tensor::storage_and_layout),
        );
        let mut score = tensors::score(self.softcap, &bias, &mask)?;
        if let Some(slopes) = &self.alibi_slopes {
            score = score.alibi_slopes(slopes);
        }
        if let Some(sinks) = &self.sinks {
            score = score.sinks(sinks);
        }
        let (q, k, v) = (tensors::readable(q)?, tensors::readable(k)?, tensors::readable(v)?);
        let [(q_storage, q_layout), (k_storage, k_layout), (v_storage, v_layout)] =
            [&q, &k, &v].map(Tensor::storage_and_layout);
        let strides = |layout| {
            let [batch, row, head] = tensors::strides(layout, [0, order[1], order[2]]);
            Strides { batch, row, head }
        };
        let (q_elements, k_elements) =
            (tensors::elements(&q_storage, q_layout)?, tensors::elements(&k_storage, k_layout)?);
        let v_elements = tensors::elements(&v_storage, v_layout)?;
        let positions = self.offset.map(|offset| vec![offset; batch]);

        let attention = mha::Attention::new(heads, width)
            .num_kv_heads(num_kv_heads)
            .head_dim_v(width_v)
            .scale(self.scale.unwrap_or_default());
        let y = tensors::computed(q.dtype(), (batch, n_q, heads, width_v), |y, workspace| {
            let mut call = attention
                .call(q_elements, y)
                .batch(batch)
                .n_q(n_q)
                .n_kv(n_kv)
                .key_value(k_elements, v_elements);
            call = call
                .q_strides(strides(q_layout))
                .k_strides(strides(k_layout))
                .v_strides(strides(v_layout))
                .score(score);
            if self.is_causal {
                call = call.causal();
            }
            if self.scale == Some(0.0) {
                call = call.equal_scores();
            }
            if let Some(keys) = self.window_left {
                call = call.window_left(keys);
            }
            if let Some(keys) = self.window_right {
                call = call.window_right(keys);
            }
            if let Some(positions) = &positions {
                call = call.q_first_positions(positions);
            }
            call.scheduler(&mha::Rayon).run(workspace)
        })?;
        if self.has_rows_first {
            Ok(y)
        } else {
            y.transpose(1, 2)
        }
    }
}

/// `candle_nn::ops::sdpa`, with its parameters, on the CPU: `q` is `[batch, heads, rows,
/// head_dim]`, and a `softcapping` of 1 is none.
pub fn sdpa(
    q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, do_causal: bool, scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let softcap = if softcapping == 1.0 { 0.0 } else { softcapping };
    Attention {
        bias: mask.cloned(),
        is_causal: do_causal,
        scale: Some(scale),
        softcap,
        ..Attention::new()
    }
    .forward(q, k, v)
}

/// `candle_flash_attn::flash_attn`, with its parameters, on the CPU: `q` and the result are
/// `[batch, rows, heads, head_dim]`.
pub fn flash_attn(
    q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool,
) -> Result<Tensor> {
    Attention {
        is_causal: causal,
        scale: Some(softmax_scale),
        has_rows_first: true,
        ..Attention::new()
    }
    .forward(q, k, v)
}
