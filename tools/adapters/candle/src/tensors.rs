//! Tensors as the library takes them: which it serves, their elements and strides.

use std::cell::RefCell;

use candle_core::{
    CpuStorage, DType, Device, DeviceLocation, Error, Layout, Result, Shape, Storage, StorageRef,
    Tensor,
};
use half::slice::HalfFloatSliceExt;
use mha::{Elements, ElementsMut, ScoreOptions, Type, Workspace};

/// That the library computes with each of these tensors.
pub(crate) fn check<'a>(
    tensors: impl IntoIterator<Item = (&'static str, Option<&'a Tensor>)>,
) -> Result<()> {
    let given =
        tensors.into_iter().filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)));
    let refusal = given.into_iter().find_map(|(name, tensor)| {
        refusal(name, tensor.device().location(), tensor.dtype(), tensor.track_op())
    });
    refusal.map_or(Ok(()), |sentence| Err(Error::Msg(sentence)))
}

fn refusal(
    name: &str, location: DeviceLocation, dtype: DType, has_gradient: bool,
) -> Option<String> {
    if location != DeviceLocation::Cpu {
        return Some(format!(
            "{name} is on {location:?}, but mha computes on the CPU: move it there by to_device"
        ));
    }
    if name == "mask" && dtype != DType::U8 {
        return Some(format!(
            "mask is of {dtype:?}; make it u8, 0 where a key takes no part, or \
            pass numbers to add as the bias"
        ));
    }
    if name != "mask" && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Some(format!(
            "{name} is of {dtype:?}, but mha takes f32, f16 and bf16: convert it by to_dtype"
        ));
    }
    has_gradient.then(|| {
        format!(
            "{name} needs a gradient, which mha does not compute: detach() \
        it, or load weights that are no Var"
        )
    })
}

/// The tensor, or a copy of it unless its rows, as wide as the last dimension, are contiguous or
/// farther apart.
pub(crate) fn readable(tensor: &Tensor) -> Result<Tensor> {
    let (dims, strides) = (tensor.dims(), tensor.stride());
    let last = dims.len() - 1;
    let are_apart = (0..last).all(|axis| dims[axis] == 1 || strides[axis] >= dims[last]);
    if are_apart && (dims[last] == 1 || strides[last] == 1) {
        Ok(tensor.clone())
    } else {
        tensor.contiguous()
    }
}

/// The strides of these dimensions of a tensor that is [`readable`].
pub(crate) fn strides<const N: usize>(layout: &Layout, axes: [usize; N]) -> [usize; N] {
    let width = layout.dims()[layout.dims().len() - 1];
    axes.map(|axis| layout.stride()[axis].max(width)) // that of a dimension of 1 may be anything
}

/// All elements of a contiguous tensor; else those from its first one on.
pub(crate) fn elements<'a>(storage: &'a Storage, layout: &Layout) -> Result<Elements<'a>> {
    match storage {
        Storage::Cpu(CpuStorage::F32(data)) => Ok(Elements::F32(part(data, layout))),
        Storage::Cpu(CpuStorage::F16(data)) => {
            Ok(Elements::F16(part(data, layout).reinterpret_cast()))
        }
        Storage::Cpu(CpuStorage::BF16(data)) => {
            Ok(Elements::Bf16(part(data, layout).reinterpret_cast()))
        }
        _ => candle_core::bail!("mha takes f32, f16 and bf16 on the CPU"),
    }
}

/// Likewise of a mask.
fn bytes<'a>(storage: &'a Storage, layout: &Layout) -> Result<&'a [u8]> {
    match storage {
        Storage::Cpu(CpuStorage::U8(data)) => Ok(part(data, layout)),
        _ => candle_core::bail!("mha takes masks of u8 on the CPU"),
    }
}

fn part<'a, T>(data: &'a [T], layout: &Layout) -> &'a [T] {
    let (first, end) = layout.contiguous_offsets().unwrap_or((layout.start_offset(), data.len()));
    &data[first..end]
}

/// A mask or bias as `[batch, heads, rows, keys]`, of which the first three are 1 where all have
/// the same.
pub(crate) fn pairs(tensor: Option<&Tensor>, pairs: [usize; 4]) -> Result<Option<Tensor>> {
    let Some(tensor) = tensor else { return Ok(None) };
    let dims = tensor.dims();
    if dims.len() > 4
        || dims.iter().rev().zip(pairs.iter().rev()).any(|(dim, pairs)| *dim != 1 && dim != pairs)
    {
        candle_core::bail!(
            "a mask or bias is {dims:?}; it must broadcast to [batch, heads, rows, \
            keys], {pairs:?}"
        );
    }
    let tensor =
        if tensor.dtype() == DType::BF16 { tensor.to_dtype(DType::F32)? } else { tensor.clone() };
    let mut shape = [1; 4];
    shape[4 - dims.len()..].copy_from_slice(dims);
    let tensor = tensor.reshape(&shape)?;
    shape[3] = pairs[3];
    tensor.broadcast_as(&shape)?.contiguous().map(Some)
}

type Stored<'a> = Option<(StorageRef<'a>, &'a Layout)>;

/// With a bias and a mask that [`pairs`] has made.
pub(crate) fn score<'a>(
    softcap: f32, bias: &'a Stored<'_>, mask: &'a Stored<'_>,
) -> Result<ScoreOptions<'a>> {
    let extents = |layout: &Layout| [0, 1, 2, 3].map(|axis| layout.dims()[axis]);
    let mut score = ScoreOptions::new().softcap(softcap);
    if let Some((storage, layout)) = bias {
        score = score.bias(elements(storage, layout)?, extents(layout));
    }
    if let Some((storage, layout)) = mask {
        score = score.mask(bytes(storage, layout)?, extents(layout));
    }
    Ok(score)
}

/// How weights are kept that are to stay as they come.
pub(crate) fn stored_type(dtype: DType) -> Type {
    match dtype {
        DType::F16 => Type::F16,
        DType::BF16 => Type::Bf16,
        _ => Type::F32,
    }
}

pub(crate) fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

pub(crate) fn int(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A tensor that a call writes, in memory that the thread keeps for its next call.
pub(crate) fn computed(
    dtype: DType, shape: impl Into<Shape>,
    run: impl FnOnce(ElementsMut<'_>, &mut Workspace) -> mha::Result<()>,
) -> Result<Tensor> {
    thread_local!(static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace::new()));
    let shape = shape.into();
    let count = shape.elem_count();
    // Taken out, since a thread that waits for its pool may meanwhile run another call.
    let mut workspace = WORKSPACE.take();
    let (result, y) = match dtype {
        DType::F16 => {
            let mut y = vec![half::f16::ZERO; count];
            let result = run(ElementsMut::F16(y.reinterpret_cast_mut()), &mut workspace);
            (result, Tensor::from_vec(y, shape, &Device::Cpu))
        }
        DType::BF16 => {
            let mut y = vec![half::bf16::ZERO; count];
            let result = run(ElementsMut::Bf16(y.reinterpret_cast_mut()), &mut workspace);
            (result, Tensor::from_vec(y, shape, &Device::Cpu))
        }
        _ => {
            let mut y = vec![0f32; count];
            let result = run(ElementsMut::F32(&mut y), &mut workspace);
            (result, Tensor::from_vec(y, shape, &Device::Cpu))
        }
    };
    WORKSPACE.set(workspace);
    result.map_err(Error::wrap)?;
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_is_said_in_a_sentence() {
        let cpu = DeviceLocation::Cpu;
        assert_eq!(refusal("q", cpu, DType::F32, false), None);
        assert_eq!(refusal("q", cpu, DType::BF16, false), None);
        let on_gpu = refusal("q", DeviceLocation::Cuda { gpu_id: 1 }, DType::F32, false).unwrap();
        assert_eq!(
            on_gpu,
            "q is on Cuda { gpu_id: 1 }, but mha computes on the CPU: move it there by to_device"
        );
        let double = refusal("q", cpu, DType::F64, true).unwrap();
        assert_eq!(double, "q is of F64, but mha takes f32, f16 and bf16: convert it by to_dtype");
        let variable = refusal("q", cpu, DType::F32, true).unwrap();
        assert_eq!(
            variable,
            "q needs a gradient, which mha does not compute: detach() it, or load \
            weights that are no Var"
        );
        assert!(refusal("mask", cpu, DType::F32, false)
            .unwrap()
            .starts_with("mask is of F32; make it u8"));
        assert_eq!(refusal("mask", cpu, DType::U8, false), None);
    }
}
