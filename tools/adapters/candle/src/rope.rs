use std::sync::Arc;

use candle_core::{Error, Result, Tensor};
use mha::{RopeConfig, RopeStyle};

use crate::tensors;

/// Tables of rotary position embeddings, which the layers of a model share: a clone is the same
/// tables.
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
    /// The tables that a model of candle's computes, `[positions, dims / 2]`, where `dims` elements
    /// of a head are rotated, in halves (`candle_nn::rotary_emb::rope`).
    pub fn from_tensors(cos: &Tensor, sin: &Tensor) -> Result<Self> {
        if cos.rank() != 2 || cos.dims() != sin.dims() || cos.elem_count() == 0 {
            candle_core::bail!(
                "cos is {:?} and sin {:?}; both are [positions, dims / 2]",
                cos.dims(),
                sin.dims()
            );
        }
        let tables = Tables {
            dims: 2 * cos.dim(1)?,
            cos: tensors::floats(cos)?,
            sin: tensors::floats(sin)?,
        };
        Ok(Self { tables: Arc::new(tables), style: RopeStyle::Half })
    }

    /// Tables for a number of positions, with Llama's angles or any of their scalings.
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
}
