//! Weights of a model, of which none may be left out.

use candle_core::{Error, Result, Tensor};
use candle_nn::{Linear, VarBuilder};

use crate::tensors;

/// What else models and their adapters keep beside the weight of a projection.
const BESIDE_WEIGHTS: [&str; 9] = [
    "lora_A.weight",
    "lora_B.weight",
    "lora_A.default.weight",
    "lora_magnitude_vector",
    "weight_scale",
    "weight_scale_inv",
    "weight.absmax",
    "scales",
    "g_idx",
];

/// A VarBuilder cannot say which tensors it has, so it is asked for these.
pub(crate) fn refuse<'n>(
    vb: &VarBuilder, names: impl IntoIterator<Item = &'n str>, remedy: &str,
) -> Result<()> {
    let has_everything = vb.contains_tensor("no model has this"); // VarBuilder::zeros
    match names.into_iter().find(|name| !has_everything && vb.contains_tensor(name)) {
        Some(name) if vb.prefix().is_empty() => {
            candle_core::bail!("the weights have {name}, which would not be used: {remedy}")
        }
        Some(name) => candle_core::bail!(
            "the weights have {}.{name}, which would not be used: {remedy}",
            vb.prefix()
        ),
        None => Ok(()),
    }
}

/// `weight`, `[outputs, inputs]`, and `bias` if there is one.
pub(crate) fn linear(vb: &VarBuilder, inputs: usize, outputs: usize) -> Result<Linear> {
    refuse(vb, BESIDE_WEIGHTS, "merge it into the weight, or leave this layer to candle")?;
    let bias = if vb.contains_tensor("bias") { Some(vb.get(outputs, "bias")?) } else { None };
    Ok(Linear::new(vb.get((outputs, inputs), "weight")?, bias))
}

pub(crate) fn check(
    name: &'static str, linear: &Linear, inputs: usize, outputs: usize,
) -> Result<()> {
    let (weight, bias) = (linear.weight(), linear.bias());
    if weight.dims() != [outputs, inputs] || bias.is_some_and(|bias| bias.dims() != [outputs]) {
        let bias = bias.map(Tensor::dims);
        candle_core::bail!(
            "{name} is {:?} with the bias {bias:?}; it must be [{outputs}, {inputs}]",
            weight.dims()
        );
    }
    tensors::check([(name, Some(weight)), (name, bias)])
}

/// Calls `pack` with the matrices and biases of these projections.
pub(crate) fn packed<T, const N: usize>(
    linears: [&Linear; N], pack: impl FnOnce(&[mha::Matrix], &[Option<Vec<f32>>]) -> mha::Result<T>,
) -> Result<T> {
    let weights =
        linears.iter().map(|linear| linear.weight().contiguous()).collect::<Result<Vec<_>>>()?;
    let storages: Vec<_> = weights.iter().map(Tensor::storage_and_layout).collect();
    let matrices = storages
        .iter()
        .map(|(storage, layout)| Ok(tensors::elements(storage, layout)?.into()))
        .collect::<Result<Vec<_>>>()?;
    let biases = linears
        .iter()
        .map(|linear| linear.bias().map(tensors::floats).transpose())
        .collect::<Result<Vec<_>>>()?;
    pack(&matrices, &biases).map_err(Error::wrap)
}
