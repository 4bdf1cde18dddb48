use std::sync::Arc;

use candle_core::{DType, Error, Result, Tensor, D};
use mha::{RopeConfig, RopeStyle};

/// Tables of rotary position embeddings, which the layers of a model share: a clone is the same tables.
#[derive(Debug, Clone)]
pub struct Rope {
    tables: Arc<Tables>,
    style: RopeStyle,
}

#[derive(Debug)]
struct Tables {
    dims: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// The tables that a model of candle's computes, `[positions, dims / 2]`, where `dims` elements of a head are rotated, in halves
    /// (`candle_nn::rotary_emb::rope`).
    pub fn from_tensors(cos: &Tensor, sin: &Tensor) -> Result<Self> {
        if cos.rank() != 2 || cos.dims() != sin.dims() || cos.elem_count() == 0 {
            candle_core::bail!("cos is {:?} and sin {:?}; both are [positions, dims / 2]", cos.dims(), sin.dims());
        }
        let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let tables = Tables { dims: 2 * cos.dim(1)?, cos: numbers(cos)?, sin: numbers(sin)? };
        Ok(Self { tables: Arc::new(tables), style: RopeStyle::Half })
    }

    /// Tables for so many positions, of Llama's angles or any of their scalings, exact to half a unit in the last place and a little.
    pub fn new(config: &RopeConfig, positions: usize) -> Result<Self> {
        let tables = config.tables(positions).map_err(Error::wrap)?;
        let dims = 2 * tables.cos().len() / positions.max(1);
        let tables = Tables { dims, cos: tables.cos().to_vec(), sin: tables.sin().to_vec() };
        Ok(Self { tables: Arc::new(tables), style: RopeStyle::Half })
    }

    /// Elements 2 i and 2 i + 1 are a pair (`candle_nn::rotary_emb::rope_i`).
    pub fn interleaved(mut self) -> Self {
        self.style = RopeStyle::Interleaved;
        self
    }

    pub(crate) fn of_call(&self) -> mha::Rope<'_> {
        mha::Rope::new(self.tables.dims, &self.tables.cos, &self.tables.sin).style(self.style)
    }

    /// By candle's own operations: `x` is `[batch, heads, rows, head_dim]`, the first row at position `offset`.
    pub(crate) fn apply(&self, x: &Tensor, offset: usize) -> Result<Tensor> {
        let Tables { dims, cos, sin } = &*self.tables;
        let (rows, width) = (x.dim(2)?, x.dim(3)?);
        let (positions, half) = (cos.len() / (dims / 2), dims / 2);
        if offset + rows > positions || *dims > width {
            candle_core::bail!(
                "the rotation is of {dims} elements and {positions} positions, but heads are {width} wide and positions reach {}",
                offset + rows
            );
        }
        let table = |numbers: &[f32]| {
            let of_rows = &numbers[offset * half..(offset + rows) * half];
            Tensor::from_slice(of_rows, (rows, half), x.device())?.to_dtype(x.dtype())
        };
        let (cos, sin, turned) = (table(cos)?, table(sin)?, x.narrow(D::Minus1, 0, *dims)?.contiguous()?);
        let turned = match self.style {
            RopeStyle::Interleaved => candle_nn::rotary_emb::rope_i_slow(&turned, &cos, &sin)?,
            _ => candle_nn::rotary_emb::rope_slow(&turned, &cos, &sin)?,
        };
        if *dims == width {
            return Ok(turned);
        }
        Tensor::cat(&[&turned, &x.narrow(D::Minus1, *dims, width - dims)?], D::Minus1)
    }
}
