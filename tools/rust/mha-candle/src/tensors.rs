//! Tensors as the library takes them: which it serves, their elements, strides and types.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::{CpuStorage, DType, DeviceLocation, Error, Layout, Result, Shape, Storage, StorageRef, Tensor};
use half::slice::HalfFloatSliceExt;
#[cfg(feature = "nn")]
use mha::StorageType;
use mha::{Elements, ElementsMut, Strides, Workspace};

/// Why tensors are left to candle's own operations.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Refusal {
    name: &'static str,
    why: Why,
}

#[derive(Debug, Clone, PartialEq)]
enum Why {
    Device(DeviceLocation),
    Type(DType),
    Gradient,
}

impl Refusal {
    pub fn of(name: &'static str, location: DeviceLocation, dtype: DType, has_gradient: bool) -> Option<Self> {
        let is_served = matches!(dtype, DType::F32 | DType::F16 | DType::BF16) || (name == "mask" && dtype == DType::U8);
        let why = match location {
            DeviceLocation::Cpu if !is_served => Why::Type(dtype),
            DeviceLocation::Cpu if has_gradient => Why::Gradient,
            DeviceLocation::Cpu => return None,
            other => Why::Device(other),
        };
        Some(Self { name, why })
    }

    /// An error if the caller is strict, else a warning, once for each reason.
    pub fn or_warn(&self, is_strict: bool) -> Result<()> {
        static SAID: AtomicU32 = AtomicU32::new(0);
        if is_strict {
            return Err(Error::Msg(self.to_string()));
        }
        let reason = match self.why {
            Why::Device(_) => 1,
            Why::Type(_) => 2,
            Why::Gradient => 4,
        };
        if SAID.fetch_or(reason, Ordering::Relaxed) & reason == 0 {
            log::warn!("{self}. Until then candle's own operations run, and this is not said again.");
        }
        Ok(())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name;
        match &self.why {
            Why::Device(location) => write!(f, "{name} is on {location:?}, but mha computes on the CPU: move it there by to_device"),
            Why::Type(dtype) if name == "mask" => {
                write!(f, "mask is of {dtype:?}; make it u8, 0 where a key takes no part, or pass numbers to add as the bias")
            }
            Why::Type(dtype) => write!(f, "{name} is of {dtype:?}, but mha takes f32, f16 and bf16: convert it by to_dtype"),
            Why::Gradient => write!(f, "{name} needs a gradient, which mha does not compute: detach() it, or load weights that are no Var"),
        }
    }
}

pub(crate) fn refusal<'a>(tensors: impl IntoIterator<Item = (&'static str, &'a Tensor)>) -> Option<Refusal> {
    tensors.into_iter().find_map(|(name, tensor)| Refusal::of(name, tensor.device().location(), tensor.dtype(), tensor.track_op()))
}

/// The tensor, or a copy of it if the library cannot take it by its strides: `rows` is the number of its dimension of rows.
pub(crate) fn readable(tensor: &Tensor, rows: usize) -> Result<Tensor> {
    let (dims, strides) = (tensor.dims(), tensor.stride());
    let last = dims.len() - 1;
    let width = dims[last];
    let overlaps = |axis: usize| dims[axis] > 1 && strides[axis] != 0 && strides[axis] < width;
    if (width > 1 && strides[last] != 1) || (rows..last).chain(1..rows).any(overlaps) {
        tensor.contiguous()
    } else {
        Ok(tensor.clone())
    }
}

/// The stride of one dimension of a tensor whose rows are `width` wide.
fn stride(layout: &Layout, axis: usize, width: usize) -> usize {
    match (layout.dims()[axis], layout.stride()[axis]) {
        (1, stride) => stride.max(width), // never stepped over: it may be anything
        (_, 0) => mha::BROADCAST,
        (_, stride) => stride,
    }
}

pub(crate) fn strides(layout: &Layout, rows: usize, head: usize) -> Strides {
    let width = layout.dims()[layout.dims().len() - 1];
    Strides { batch: stride(layout, 0, width), row: stride(layout, rows, width), head: stride(layout, head, width) }
}

/// Of `[batch, rows, width]`.
#[cfg(feature = "nn")]
pub(crate) fn row_strides(layout: &Layout) -> [usize; 2] {
    let width = layout.dims()[2];
    [stride(layout, 0, width), stride(layout, 1, width)]
}

/// How weights are kept that are to stay as they come.
#[cfg(feature = "nn")]
pub(crate) fn storage_type(dtype: DType) -> StorageType {
    match dtype {
        DType::F16 => StorageType::F16,
        DType::BF16 => StorageType::Bf16,
        _ => StorageType::F32,
    }
}

#[cfg(feature = "nn")]
pub(crate) fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.to_vec1()
}

/// A mask or bias as `[batch, heads, rows, keys]`, with strides of 0 where all have the same.
pub(crate) fn broadcast_pairs(tensor: &Tensor, pairs: [usize; 4]) -> Result<Tensor> {
    let tensor = match tensor.dtype() {
        DType::BF16 => tensor.to_dtype(DType::F32)?,
        _ => tensor.clone(),
    };
    let Ok(wide) = tensor.broadcast_as(Shape::from(pairs.to_vec())) else {
        candle_core::bail!("a mask or bias is {:?}; it must broadcast to [batch, heads, rows, keys], {pairs:?}", tensor.dims());
    };
    let (is_wide, row) = (pairs[3] > 1, wide.stride()[2]);
    if (is_wide && wide.stride()[3] != 1) || (pairs[2] > 1 && row != 0 && row < pairs[3]) {
        return wide.contiguous();
    }
    Ok(wide)
}

/// From one sequence, head and row of pairs to the next; 0 where all have the same.
pub(crate) fn pair_strides(layout: &Layout) -> [usize; 3] {
    [0, 1, 2].map(|axis| if layout.dims()[axis] == 1 { 0 } else { layout.stride()[axis] })
}

pub(crate) fn storage(tensor: &Option<Tensor>) -> Option<(StorageRef<'_>, &Layout)> {
    tensor.as_ref().map(Tensor::storage_and_layout)
}

pub(crate) fn cpu<'a>(storage: &'a StorageRef<'_>) -> Result<&'a CpuStorage> {
    match &**storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => candle_core::bail!("mha takes tensors on the CPU"),
    }
}

/// From the first element on.
pub(crate) fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Elements<'a>> {
    let first = layout.start_offset();
    match storage {
        CpuStorage::F32(data) => Ok(Elements::F32(&data[first..])),
        CpuStorage::F16(data) => Ok(Elements::F16(data[first..].reinterpret_cast())),
        CpuStorage::BF16(data) => Ok(Elements::Bf16(data[first..].reinterpret_cast())),
        _ => candle_core::bail!("mha takes f32, f16 and bf16"),
    }
}

pub(crate) fn bytes<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u8]> {
    match storage {
        CpuStorage::U8(data) => Ok(&data[layout.start_offset()..]),
        _ => candle_core::bail!("a mask is of u8"),
    }
}

pub(crate) fn elements_mut(storage: &mut CpuStorage) -> Result<ElementsMut<'_>> {
    match storage {
        CpuStorage::F32(data) => Ok(ElementsMut::F32(data)),
        CpuStorage::F16(data) => Ok(ElementsMut::F16(data.reinterpret_cast_mut())),
        CpuStorage::BF16(data) => Ok(ElementsMut::Bf16(data.reinterpret_cast_mut())),
        _ => candle_core::bail!("mha writes f32, f16 and bf16"),
    }
}

/// Room for an output of the type of an input.
pub(crate) fn zeros_like(storage: &CpuStorage, count: usize) -> Result<CpuStorage> {
    match storage {
        CpuStorage::F32(_) => Ok(CpuStorage::F32(vec![0.0; count])),
        CpuStorage::F16(_) => Ok(CpuStorage::F16(vec![half::f16::ZERO; count])),
        CpuStorage::BF16(_) => Ok(CpuStorage::BF16(vec![half::bf16::ZERO; count])),
        _ => candle_core::bail!("mha writes f32, f16 and bf16"),
    }
}

pub(crate) fn int(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A scale as the library takes it, for which 0 is none given.
pub(crate) fn factor(scale: Option<f32>) -> f32 {
    match scale {
        Some(0.0) => 1e-45, // all scores are equal
        Some(scale) => scale,
        None => 0.0,
    }
}

/// The pool of rayon that the calling thread is in, as candle's products use it; none if it has one thread.
pub(crate) fn threads() -> Option<&'static dyn mha::Scheduler> {
    Some(&mha::Rayon as &dyn mha::Scheduler).filter(|threads| threads.num_threads() > 1)
}

/// Runs a call in memory that the thread keeps for its next one.
pub(crate) fn with_workspace(run: impl FnOnce(&mut Workspace) -> mha::Result<()>) -> Result<()> {
    thread_local!(static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace::new()));
    // Taken out, since a thread that waits for its pool may meanwhile run another call.
    let mut workspace = WORKSPACE.take();
    let result = run(&mut workspace);
    WORKSPACE.set(workspace);
    result.map_err(Error::wrap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_is_said_in_a_sentence() {
        let cpu = DeviceLocation::Cpu;
        let said = |location, dtype, has_gradient| Refusal::of("q", location, dtype, has_gradient).map(|refusal| refusal.to_string());
        assert_eq!(said(cpu, DType::F32, false), None);
        assert_eq!(said(cpu, DType::BF16, false), None);
        let on_gpu = said(DeviceLocation::Cuda { gpu_id: 1 }, DType::F32, false).unwrap();
        assert_eq!(on_gpu, "q is on Cuda { gpu_id: 1 }, but mha computes on the CPU: move it there by to_device");
        let double = said(cpu, DType::F64, true).unwrap();
        assert_eq!(double, "q is of F64, but mha takes f32, f16 and bf16: convert it by to_dtype");
        let variable = said(cpu, DType::F32, true).unwrap();
        assert_eq!(variable, "q needs a gradient, which mha does not compute: detach() it, or load weights that are no Var");
        assert!(Refusal::of("mask", cpu, DType::U32, false).unwrap().to_string().starts_with("mask is of U32; make it u8"));
        assert_eq!(Refusal::of("mask", cpu, DType::U8, false), None);
    }

    #[test]
    fn a_refusal_is_an_error_for_the_strict_alone() {
        let refusal = Refusal::of("k", DeviceLocation::Metal { gpu_id: 0 }, DType::F32, false).unwrap();
        assert!(refusal.or_warn(false).is_ok());
        assert!(refusal.or_warn(true).unwrap_err().to_string().contains("k is on Metal"));
    }
}
