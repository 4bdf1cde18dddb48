use std::mem::size_of;

use mha_sys as sys;

use crate::arrays::slice_ptr;
use crate::error::{needs, only_one};
use crate::options::Dimensions;
use crate::spans::{flag, int};
use crate::Result;

/// A norm of queries, and of keys before they are scored or stored, and a norm of the context. A
/// call takes it by [`norm`](crate::Forward::norm). [`Outputs`](crate::Outputs) has queries and
/// keys as they are before it.
///
/// # Examples
///
/// ```
/// # use mha::{Layer, LayerConfig, Norm, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// # let (x, mut y) = ([1.0; 12], [0.0; 12]);
/// let qwen3 = Norm::rms(1e-6).q_weight(&[1.5, 0.5]).k_weight(&[0.25, 1.0]);
/// layer.forward(&x, &mut y).causal().norm(qwen3).run(&mut Workspace::new())?;
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Norm<'a> {
    is_layer: bool,
    is_of_all_heads: bool,
    is_after_rope: bool,
    is_of_values: bool,
    epsilon: f32,
    is_per_head: bool,
    q_weight: Option<&'a [f32]>,
    k_weight: Option<&'a [f32]>,
    q_bias: Option<&'a [f32]>,
    k_bias: Option<&'a [f32]>,
    context: Option<ContextNorm<'a>>,
    only_context: Option<ContextNorm<'a>>,
}

impl<'a> Norm<'a> {
    /// Makes an RMS norm of each head: `x / sqrt(mean of x^2 + epsilon) * weight`. `epsilon` is
    /// positive and finite; a call checks it.
    pub fn rms(epsilon: f32) -> Self {
        Self { epsilon, ..Self::default() }
    }

    /// Makes a layer norm of each head: `(x - mean) / sqrt(mean of (x - mean)^2 + epsilon) * weight
    /// + bias` (Cohere, StableLM). `epsilon` is positive and finite; a call checks it.
    pub fn layer(epsilon: f32) -> Self {
        Self { epsilon, is_layer: true, ..Self::default() }
    }

    /// Makes a norm of the context alone (BitNet, Kosmos-2). Settings of queries and keys are
    /// refused beside it.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{ContextNorm, Norm};
    ///
    /// let weight = [1.0; 32];
    /// let bitnet = Norm::of_context(ContextNorm::rms(1e-5).all_heads().weight(&weight));
    /// # let _ = bitnet;
    /// ```
    pub fn of_context(context: ContextNorm<'a>) -> Self {
        Self { only_context: Some(context), ..Self::default() }
    }

    setters! {
        /// Makes it one norm over the columns of all heads together (OLMo 2). Weights and biases
        /// are then `[num_heads, head_dim]`, and `[num_kv_heads, head_dim]` of the keys.
        all_heads() => is_of_all_heads = true;
        /// Normalises after the rotation (Hunyuan, Llama 4). By default, it comes before.
        after_rope() => is_after_rope = true;
        /// Also normalises values: an RMS norm of each head without weights (Gemma 4).
        values() => is_of_values = true;
        /// Gives each head its own weights and biases, `[num_heads, head_dim]`, and `[num_kv_heads,
        /// head_dim]` of the keys. By default, heads share those of `[head_dim]`.
        per_head() => is_per_head = true;
        /// Also normalises the context before W_O. By default, it is not normalised.
        context(norm: ContextNorm<'a>) => context = Some(norm);
        /// Sets the weights of queries, `[head_dim]`; by default 1. Models that store w for a
        /// weight of 1 + w (Gemma) must pass the sum.
        q_weight(weight: &'a [f32]) => q_weight = Some(weight);
        /// Sets the weights of keys, `[head_dim]`; by default 1.
        k_weight(weight: &'a [f32]) => k_weight = Some(weight);
        /// Sets the biases of queries in a layer norm, `[head_dim]`; by default 0.
        q_bias(bias: &'a [f32]) => q_bias = Some(bias);
        /// Sets the biases of keys in a layer norm, `[head_dim]`; by default 0.
        k_bias(bias: &'a [f32]) => k_bias = Some(bias);
    }

    /// Whether it normalises the context after a gate.
    pub(crate) fn needs_gate(&self) -> bool {
        self.context.or(self.only_context).is_some_and(|context| context.is_after_gate)
    }

    /// Checks that the slices have the heads of the call.
    pub(crate) fn check(&self, of: &Dimensions) -> Result<()> {
        only_one(("of_context", self.only_context.is_some()), ("context", self.context.is_some()))?;
        let arrays = [self.q_weight, self.k_weight, self.q_bias, self.k_bias];
        needs(
            ("norm.per_head", self.is_per_head),
            ("a weight or a bias", arrays.iter().any(Option::is_some)),
        )?;
        let [heads, kv_heads, width] = extents!(of => num_heads, num_kv_heads, head_dim);
        let shared = usize::from(!(self.is_per_head || self.is_of_all_heads)); // without heads
        check_given! {
            "norm.q_weight": self.q_weight => [heads, width][shared..];
            "norm.k_weight": self.k_weight => [kv_heads, width][shared..];
            "norm.q_bias": self.q_bias => [heads, width][shared..];
            "norm.k_bias": self.k_bias => [kv_heads, width][shared..];
        }
        self.context.or(self.only_context).map_or(Ok(()), |context| context.check(of))
    }

    /// What the library takes.
    pub(crate) fn raw(&self, of: &Dimensions) -> sys::mha_norm {
        let stride = |is_per_head: bool, width: usize| if is_per_head { int(width) } else { 0 };
        let context = self.context.or(self.only_context).unwrap_or_default();
        sys::mha_norm {
            struct_size: size_of::<sys::mha_norm>(),
            flags: flag(self.is_layer, sys::MHA_NORM_LAYER)
                | flag(self.is_of_all_heads, sys::MHA_NORM_ALL_HEADS)
                | flag(self.is_after_rope, sys::MHA_NORM_AFTER_ROPE)
                | flag(self.is_of_values, sys::MHA_NORM_VALUES),
            epsilon: self.epsilon,
            q_weight: slice_ptr(self.q_weight),
            k_weight: slice_ptr(self.k_weight),
            q_bias: slice_ptr(self.q_bias),
            k_bias: slice_ptr(self.k_bias),
            head_stride: stride(self.is_per_head || self.is_of_all_heads, of.head_dim),
            context_flags: flag(context.is_layer, sys::MHA_NORM_LAYER)
                | flag(context.is_of_all_heads, sys::MHA_NORM_ALL_HEADS)
                | flag(context.is_after_gate, sys::MHA_NORM_AFTER_GATE),
            context_epsilon: context.epsilon,
            context_weight: slice_ptr(context.weight),
            context_bias: slice_ptr(context.bias),
            context_head_stride: stride(
                context.is_per_head || context.is_of_all_heads,
                of.head_dim_v,
            ),
        }
    }
}

/// A norm of the context before W_O, in a layer that has one. Rows of zeros, such as those of a
/// query without keys, are normalised too.
///
/// # Examples
///
/// ```
/// # use mha::{ContextNorm, Norm};
/// # let (weight, bias) = ([1.0; 32], [0.5; 32]);
/// let bitnet = Norm::of_context(ContextNorm::rms(1e-5).all_heads().weight(&weight));
/// let kosmos2 =
///     Norm::of_context(ContextNorm::layer(1e-5).all_heads().weight(&weight).bias(&bias));
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct ContextNorm<'a> {
    is_layer: bool,
    is_of_all_heads: bool,
    is_after_gate: bool,
    epsilon: f32,
    is_per_head: bool,
    weight: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

impl<'a> ContextNorm<'a> {
    /// Makes an RMS norm, as [`Norm::rms`] does. `epsilon` is positive and finite.
    pub fn rms(epsilon: f32) -> Self {
        Self { epsilon, ..Self::default() }
    }

    /// Makes a layer norm, as [`Norm::layer`] does. `epsilon` is positive and finite.
    pub fn layer(epsilon: f32) -> Self {
        Self { epsilon, is_layer: true, ..Self::default() }
    }

    setters! {
        /// Makes it one norm over the columns of all heads together. Weights and biases are then
        /// `[num_heads, head_dim_v]`.
        all_heads() => is_of_all_heads = true;
        /// Normalises after the layer's gate, which the layer must have. By default, it comes
        /// before.
        after_gate() => is_after_gate = true;
        /// Gives each head its own weights and biases, `[num_heads, head_dim_v]`. By default, heads
        /// share those of `[head_dim_v]`.
        per_head() => is_per_head = true;
        /// Sets the weights, `[head_dim_v]`; by default 1.
        weight(weight: &'a [f32]) => weight = Some(weight);
        /// Sets the biases of a layer norm, `[head_dim_v]`; by default 0.
        bias(bias: &'a [f32]) => bias = Some(bias);
    }

    fn check(&self, of: &Dimensions) -> Result<()> {
        needs(
            ("norm.context.per_head", self.is_per_head),
            ("a weight or a bias", self.weight.or(self.bias).is_some()),
        )?;
        let [heads, width] = extents!(of => num_heads, head_dim_v);
        let shared = usize::from(!(self.is_per_head || self.is_of_all_heads));
        check_given! {
            "norm.context_weight": self.weight => [heads, width][shared..];
            "norm.context_bias": self.bias => [heads, width][shared..];
        }
        Ok(())
    }
}
