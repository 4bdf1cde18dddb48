use std::sync::Arc;

use candle_core::{Module, Result, Tensor, D};
use candle_nn::VarBuilder;
use mha::{Arithmetic, Layer, LayerConfig, Type, WeightLayout, Weights};

use crate::{tensors, weights};

/// How a [`Linear`] keeps its weights, and what it computes in.
#[derive(Debug, Clone, Default)]
pub struct LinearConfig {
    weight_type: Option<Type>,
    arithmetic: Arithmetic,
}

impl LinearConfig {
    /// Weights as they come, and products of floats.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// How the packed weights are kept, in fewer bits if wanted. As they come if not set.
        weight_type: Type;
        /// What the product is computed in: floats; with weights of `Int8` or `Int4` also integers
        /// of 8 or 16 bits, with weights of `Bf16` also bf16.
        arithmetic: Arithmetic;
    }

    /// Loads and packs `weight`, `[outputs, inputs]`, with the `bias` if there is one. What
    /// adapters or quantisers keep beside them is refused.
    pub fn load(&self, inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Linear> {
        self.build(&weights::linear(&vb, inputs, outputs)?)
    }

    /// Packs weights that are there already. The tensors are not needed afterwards.
    pub fn build(&self, linear: &candle_nn::Linear) -> Result<Linear> {
        let (outputs, inputs) = linear.weight().dims2()?;
        weights::check("the layer", linear, inputs, outputs)?;
        let weight_type = self.weight_type.unwrap_or(tensors::stored_type(linear.weight().dtype()));
        let config = LayerConfig::linear(inputs, outputs)
            .weight_type(weight_type)
            .arithmetic(self.arithmetic);
        let layer = weights::packed([linear], |matrices, biases| {
            let weights = Weights::linear(matrices[0]).layout(WeightLayout::OutIn);
            Layer::new(
                &config,
                &if let Some(bias) = &biases[0] { weights.output_bias(bias) } else { weights },
            )
        })?;
        Ok(Linear { layer: Arc::new(layer) })
    }
}

/// A `candle_nn::Linear` on the library's kernels: `x W^T + b`, the weights packed once, in fewer
/// bits and computed in integers if wanted. Made by [`LinearConfig`]; a clone shares the packed
/// weights. Rows are as for [`SelfAttention`](crate::SelfAttention).
#[derive(Debug, Clone)]
pub struct Linear {
    layer: Arc<Layer<'static>>,
}

impl Linear {
    /// The packed layer, to ask for its shape.
    pub fn layer(&self) -> &Layer<'static> {
        &self.layer
    }
}

impl Module for Linear {
    /// Rows `[.., inputs]`; the output is `[.., outputs]`, of their type.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (inputs, outputs) = (self.layer.shape().query_dim, self.layer.shape().output_dim);
        if x.rank() == 0 || x.dim(D::Minus1)? != inputs {
            candle_core::bail!("x is {:?}; its last dimension must be {inputs}", x.dims());
        }
        tensors::check([("x", Some(x))])?;
        let mut shape = x.dims().to_vec();
        shape[x.rank() - 1] = outputs;
        let rows = x.elem_count() / inputs;
        let x = tensors::readable(&x.reshape((rows, inputs))?)?;
        let (storage, layout) = x.storage_and_layout();
        let [row] = tensors::strides(layout, [0]);
        let elements = tensors::elements(&storage, layout)?;
        tensors::computed(x.dtype(), shape, |y, workspace| {
            self.layer
                .linear(elements, y)
                .strides(rows, row, 0, 0)
                .scheduler(&mha::Rayon)
                .run(workspace)
        })
    }
}
