use std::mem::size_of;

use mha_sys as sys;

use crate::options::{slice_ptr, Dimensions};
use crate::spans::{check_exact, int};
use crate::Result;

/// A norm of queries, and of keys before they are scored or stored, each head by itself, and of the
/// context. [`Outputs`](crate::Outputs) has them as they are before.
///
/// ```
/// # use mha::{Layer, LayerConfig, Norm, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// # let (x, mut y) = ([1.0; 12], [0.0; 12]);
/// let qwen3 = Norm::rms(1e-6).q_weight(&[1.5, 0.5]).k_weight(&[0.25, 1.0]);
/// layer.forward(&x, &mut y).causal().norm(qwen3).run(&mut Workspace::new())?;
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    context: Option<ContextNorm<'a>>,
    flags: u32,
    epsilon: f32,
    is_per_head: bool,
    q_weight: Option<&'a [f32]>,
    k_weight: Option<&'a [f32]>,
    q_bias: Option<&'a [f32]>,
    k_bias: Option<&'a [f32]>,
}

impl<'a> Norm<'a> {
    /// RMS norm: `x / sqrt(mean of x^2 + epsilon) * weight`.
    pub fn rms(epsilon: f32) -> Self {
        Self {
            context: None,
            flags: 0,
            epsilon,
            is_per_head: false,
            q_weight: None,
            k_weight: None,
            q_bias: None,
            k_bias: None,
        }
    }

    /// Of the context alone (BitNet, Kosmos-2).
    pub fn of_context(context: ContextNorm<'a>) -> Self {
        Self::rms(0.0).context(context)
    }

    /// Layer norm: `(x - mean) / sqrt(mean of (x - mean)^2 + epsilon) * weight + bias` (Cohere,
    /// StableLM).
    pub fn layer(epsilon: f32) -> Self {
        Self { flags: sys::MHA_NORM_LAYER, ..Self::rms(epsilon) }
    }

    /// One norm over the columns of all heads together (OLMo 2). Weights and biases are then
    /// `[heads, head_dim]`.
    pub fn all_heads(mut self) -> Self {
        self.flags |= sys::MHA_NORM_ALL_HEADS;
        self.per_head()
    }

    /// After the rotation, not before it (Hunyuan, Llama 4).
    pub fn after_rope(mut self) -> Self {
        self.flags |= sys::MHA_NORM_AFTER_ROPE;
        self
    }

    /// Of values too: RMS norm of each head without weights (Gemma 4).
    pub fn values(mut self) -> Self {
        self.flags |= sys::MHA_NORM_VALUES;
        self
    }

    /// Weights and biases are `[heads, head_dim]`, not `[head_dim]` for all heads.
    pub fn per_head(mut self) -> Self {
        self.is_per_head = true;
        self
    }

    setters! {
        /// Of the context too.
        context: ContextNorm<'a>;
        /// The weights of queries, `[head_dim]`; 1 if not set. Gemma and others store w for a
        /// weight of 1 + w: the sum is to be given.
        q_weight: &'a [f32];
        /// The weights of keys, `[head_dim]`; 1 if not set.
        k_weight: &'a [f32];
        /// The biases of queries in a layer norm, `[head_dim]`; none if not set.
        q_bias: &'a [f32];
        /// The biases of keys in a layer norm, `[head_dim]`; none if not set.
        k_bias: &'a [f32];
    }

    /// That the slices have the heads of the call.
    pub(crate) fn check(&self, of: &Dimensions) -> Result<()> {
        let queries = [("norm.q_weight", self.q_weight), ("norm.q_bias", self.q_bias)];
        let keys = [("norm.k_weight", self.k_weight), ("norm.k_bias", self.k_bias)];
        for (arrays, heads) in
            [(queries, ("num_heads", of.num_heads)), (keys, ("num_kv_heads", of.num_kv_heads))]
        {
            for (name, array) in arrays {
                let shape = [heads, ("head_dim", of.head_dim)];
                if let Some(array) = array {
                    check_exact(
                        name,
                        array.len(),
                        if self.is_per_head { &shape } else { &shape[1..] },
                    )?;
                }
            }
        }
        self.context.map_or(Ok(()), |context| context.check(of))
    }

    /// What the library takes.
    pub(crate) fn raw(&self, of: &Dimensions) -> sys::mha_norm {
        let context = self.context.as_ref();
        sys::mha_norm {
            struct_size: size_of::<sys::mha_norm>(),
            flags: self.flags,
            epsilon: self.epsilon,
            q_weight: slice_ptr(self.q_weight),
            k_weight: slice_ptr(self.k_weight),
            q_bias: slice_ptr(self.q_bias),
            k_bias: slice_ptr(self.k_bias),
            head_stride: if self.is_per_head { int(of.head_dim) } else { 0 },
            context_flags: context.map_or(0, |context| context.flags),
            context_epsilon: context.map_or(0.0, |context| context.epsilon),
            context_weight: slice_ptr(context.and_then(|context| context.weight)),
            context_bias: slice_ptr(context.and_then(|context| context.bias)),
            context_head_stride: context.map_or(0, |context| {
                if context.is_per_head {
                    int(of.head_dim_v)
                } else {
                    0
                }
            }),
        }
    }
}

/// A norm of the context before W_O, in a layer that has one: rows of zeros, as of a query without
/// keys, are normalised too.
///
/// ```
/// # use mha::{ContextNorm, Norm};
/// # let (weight, bias) = ([1.0; 32], [0.5; 32]);
/// let bitnet = Norm::of_context(ContextNorm::rms(1e-5).all_heads().weight(&weight));
/// let kosmos2 =
///     Norm::of_context(ContextNorm::layer(1e-5).all_heads().weight(&weight).bias(&bias));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ContextNorm<'a> {
    flags: u32,
    epsilon: f32,
    is_per_head: bool,
    weight: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

impl<'a> ContextNorm<'a> {
    /// RMS norm, as [`Norm::rms`].
    pub fn rms(epsilon: f32) -> Self {
        Self { flags: 0, epsilon, is_per_head: false, weight: None, bias: None }
    }

    /// Layer norm, as [`Norm::layer`].
    pub fn layer(epsilon: f32) -> Self {
        Self { flags: sys::MHA_NORM_LAYER, ..Self::rms(epsilon) }
    }

    /// One norm over the columns of all heads together. Weights and biases are then `[num_heads,
    /// head_dim_v]`.
    pub fn all_heads(mut self) -> Self {
        self.flags |= sys::MHA_NORM_ALL_HEADS;
        self.per_head()
    }

    /// After the layer's gate, not before it.
    pub fn after_gate(mut self) -> Self {
        self.flags |= sys::MHA_NORM_AFTER_GATE;
        self
    }

    /// Weights and biases are `[num_heads, head_dim_v]`, not `[head_dim_v]` for all heads.
    pub fn per_head(mut self) -> Self {
        self.is_per_head = true;
        self
    }

    setters! {
        /// The weights, `[head_dim_v]`; 1 if not set.
        weight: &'a [f32];
        /// The biases of a layer norm, `[head_dim_v]`; none if not set.
        bias: &'a [f32];
    }

    fn check(&self, of: &Dimensions) -> Result<()> {
        let shape = [("num_heads", of.num_heads), ("head_dim_v", of.head_dim_v)];
        for (name, array) in
            [("norm.context_weight", self.weight), ("norm.context_bias", self.bias)]
        {
            if let Some(array) = array {
                check_exact(
                    name,
                    array.len(),
                    if self.is_per_head { &shape } else { &shape[1..] },
                )?;
            }
        }
        Ok(())
    }
}
