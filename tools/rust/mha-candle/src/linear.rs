use std::fmt;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Module, Result, Shape, Tensor, D};
use candle_nn::VarBuilder;
use mha::{Arithmetic, Layer, LayerConfig, Matrix, StorageType, WeightLayout, Weights};

use crate::tensors;

/// How a [`Linear`] keeps its weights, and what it computes in.
#[derive(Debug, Clone, Default)]
pub struct LinearConfig {
    weight_type: Option<StorageType>,
    arithmetic: Arithmetic,
    is_strict: bool,
    keeps_weights: bool,
}

impl LinearConfig {
    /// Weights as they come, and products of floats.
    pub fn new() -> Self {
        Self::default()
    }

    /// How the packed weights are kept, in fewer bits if wanted: `F32`, `F16`, `Bf16`, `Int8` or `Int4`. As they come if not set.
    pub fn weight_type(mut self, weight_type: StorageType) -> Self {
        self.weight_type = Some(weight_type);
        self
    }

    /// What the product is computed in: floats, or with weights of `Int8` or `Int4` integers of 8 or 16 bits.
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

    /// Loads and packs `weight`, `[outputs, inputs]`, with the `bias` if there is one.
    pub fn load(&self, inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Linear> {
        let bias = if vb.contains_tensor("bias") { Some(vb.get(outputs, "bias")?) } else { None };
        self.build(&candle_nn::Linear::new(vb.get((outputs, inputs), "weight")?, bias))
    }

    /// Packs weights that are there already. The tensors are not needed afterwards.
    pub fn build(&self, linear: &candle_nn::Linear) -> Result<Linear> {
        let (outputs, inputs) = linear.weight().dims2()?;
        if let Some(bias) = linear.bias().filter(|bias| bias.dims() != [outputs]) {
            candle_core::bail!("the bias is {:?}; it must be [{outputs}]", bias.dims());
        }
        let refusal = tensors::refusal([("weight", linear.weight())].into_iter().chain(linear.bias().map(|bias| ("bias", bias))));
        if let Some(refusal) = &refusal {
            refusal.or_warn(self.is_strict)?;
        }
        let packed = if refusal.is_none() { Some(self.pack(linear, inputs, outputs)?) } else { None };
        let stock = Some(linear.clone()).filter(|_| packed.is_none() || self.keeps_weights);
        Ok(Linear { core: Arc::new(Core { config: self.clone(), inputs, outputs, packed, stock }) })
    }

    fn pack(&self, linear: &candle_nn::Linear, inputs: usize, outputs: usize) -> Result<Layer<'static>> {
        let weight = tensors::readable(&linear.weight().unsqueeze(0)?, 1)?;
        let (storage, layout) = weight.storage_and_layout();
        let [_, row] = tensors::row_strides(layout);
        let matrix = Matrix::from(tensors::elements(tensors::cpu(&storage)?, layout)?).stride(row);
        let bias = linear.bias().map(tensors::floats).transpose()?;
        let mut weights = Weights::linear(matrix).layout(WeightLayout::OutIn);
        if let Some(bias) = &bias {
            weights = weights.output_bias(bias);
        }
        let weight_type = self.weight_type.unwrap_or(tensors::storage_type(weight.dtype()));
        let config = LayerConfig::linear(inputs, outputs).weight_type(weight_type).arithmetic(self.arithmetic);
        Layer::new(&config, &weights).map_err(candle_core::Error::wrap)
    }
}

/// A `candle_nn::Linear` on the library's kernels: `x W^T + b`, the weights packed once, in fewer bits and computed in integers if wanted. Made by
/// [`LinearConfig`]; a clone shares the packed weights.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::VarBuilder;
/// use mha_candle::{mha::{Arithmetic, StorageType}, LinearConfig};
///
/// # fn main() -> candle_core::Result<()> {
/// # let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let config = LinearConfig::new().weight_type(StorageType::Int8).arithmetic(Arithmetic::Int16);
/// let up = config.load(512, 2048, vb.pp("mlp.up_proj"))?;
/// let y = up.forward(&Tensor::randn(0f32, 1., (1, 7, 512), &Device::Cpu)?)?; // [1, 7, 2048]
/// # assert_eq!(y.dims(), [1, 7, 2048]);
/// # Ok(()) }
/// ```
///
/// Rows, gradients and devices are as for [`SelfAttention`](crate::SelfAttention).
#[derive(Clone)]
pub struct Linear {
    core: Arc<Core>,
}

struct Core {
    config: LinearConfig,
    inputs: usize,
    outputs: usize,
    packed: Option<Layer<'static>>,
    stock: Option<candle_nn::Linear>,
}

impl Linear {
    /// The packed layer, to ask for its shape; `None` if candle's own operations run.
    pub fn layer(&self) -> Option<&Layer<'static>> {
        self.core.packed.as_ref()
    }
}

impl Module for Linear {
    /// Rows `[.., inputs]`; the output is `[.., outputs]`, of their type.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Core { config, inputs, outputs, packed, stock } = &*self.core;
        if x.rank() == 0 || x.dim(D::Minus1)? != *inputs {
            candle_core::bail!("x is {:?}; its last dimension must be {inputs}", x.dims());
        }
        let refusal = tensors::refusal([("x", x)]);
        if let Some(refusal) = &refusal {
            refusal.or_warn(config.is_strict)?;
        }
        match (packed, stock, refusal) {
            (Some(layer), _, None) => {
                let mut shape = x.dims().to_vec();
                let rows: usize = shape[..shape.len() - 1].iter().product();
                let x = tensors::readable(&x.reshape((1usize, rows, *inputs))?, 1)?;
                let x = if rows > 1 && x.stride()[1] == 0 { x.contiguous()? } else { x }; // which steps over rows
                *shape.last_mut().expect("one dimension or more") = *outputs;
                x.apply_op1_no_bwd(&Product { layer })?.reshape(shape)
            }
            (_, Some(stock), _) => stock.forward(x),
            (_, None, Some(refusal)) => {
                candle_core::bail!("{refusal}. The weights are packed; keep_weights() lets candle's own operations run instead")
            }
            (None, None, None) => candle_core::bail!("the layer has no weights"),
        }
    }
}

impl fmt::Debug for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Core { config, inputs, outputs, packed, .. } = &*self.core;
        let mut linear = f.debug_struct("Linear");
        linear.field("inputs", inputs).field("outputs", outputs).field("config", config).field("is_packed", &packed.is_some()).finish()
    }
}

/// A call of the library, as one of candle's operations, of `[1, rows, inputs]`.
struct Product<'a> {
    layer: &'a Layer<'static>,
}

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        "mha-linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, outputs) = (layout.dims()[1], self.layer.shape().output_dim);
        let shape = Shape::from((1, rows, outputs));
        let mut y = tensors::zeros_like(x, shape.elem_count())?;
        if rows == 0 {
            return Ok((y, shape));
        }
        let [_, row] = tensors::row_strides(layout);
        let call = self.layer.linear(tensors::elements(x, layout)?, tensors::elements_mut(&mut y)?).strides(rows, row, 0, 0);
        tensors::with_workspace(|workspace| match tensors::threads() {
            Some(threads) => call.scheduler(threads).run(workspace),
            None => call.run(workspace),
        })?;
        Ok((y, shape))
    }
}
