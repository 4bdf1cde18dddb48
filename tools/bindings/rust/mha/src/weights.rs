use std::mem::{size_of, zeroed};
use std::ptr::null;

use mha_sys as sys;

use crate::arrays::slice_ptr;
use crate::error::only_one;
use crate::layer::LayerConfig;
use crate::spans::{check_exact, check_lengths, int, or, Extent};
use crate::types::Elements;
use crate::{Error, ErrorKind, Result, Strides, Type};

/// The layout of weight matrices in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum WeightLayout {
    /// `[in, out]`, y = x W: GPT-2's Conv1D.
    #[default]
    InOut,
    /// `[out, in]`, y = x W^T: PyTorch's `nn.Linear` and `in_proj_weight`.
    OutIn,
}

/// A weight matrix: its numbers, the scales of quantised ones, and the stride of its rows. Slices,
/// arrays and vectors of `f32`, and [`Elements`], convert into it.
///
/// # Examples
///
/// ```
/// use mha::{Arithmetic, Layer, LayerConfig, Matrix, Type, Weights, Workspace};
///
/// // Codes of a quantiser, with a scale for each of the 12 output columns.
/// let (codes, scales) = ([64; 4 * 12], [0.01; 12]);
/// let weights = Weights::fused(Matrix::int8(&codes, &scales));
/// let layer = Layer::new(&LayerConfig::new(4, 2).weight_type(Type::Int8), &weights)?;
/// assert_eq!(layer.shape().weight_type, Type::Int8);
///
/// // A row of Q6_K of GGUF: codes of 6 bits in groups of 16, whose scales have a common factor.
/// let (codes, scales) = ([-32; 256], [100.0; 16]);
/// let w = Weights::linear(Matrix::int8(&codes, &scales).block_scales(&[0.01171875]));
/// let mut config = LayerConfig::linear(256, 1).weight_type(Type::Int6).group_size(16);
/// config = config.scale_type(Type::Int8).arithmetic(Arithmetic::Int8);
/// let mut y = [0.0];
/// Layer::new(&config, &w)?.linear(&[1.0; 256], &mut y).run(&mut Workspace::new())?;
/// assert_eq!(y, [-9600.0]);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    data: Elements<'a>,
    scales: Option<&'a [f32]>,
    offsets: Option<&'a [f32]>,
    block_scales: Option<&'a [f32]>,
    block_offsets: Option<&'a [f32]>,
    stride: usize,
}

impl<'a> Matrix<'a> {
    /// Borrows floats.
    pub fn f32(data: &'a [f32]) -> Self {
        Elements::F32(data).into()
    }

    /// Borrows IEEE binary16 numbers, by their bits.
    pub fn f16(data: &'a [u16]) -> Self {
        Elements::F16(data).into()
    }

    /// Borrows bfloat16 numbers, by their bits.
    pub fn bf16(data: &'a [u16]) -> Self {
        Elements::Bf16(data).into()
    }

    /// Borrows codes of a quantiser and their scales, one for each output column, `[out]`, or for
    /// each group, `[out, groups]`; both are packed without change. Needs [`Type::Int8`] in
    /// [`LayerConfig::weight_type`], or for codes -16 .. 15 in groups [`Type::Int5`] and for -32 ..
    /// 31 [`Type::Int6`]; with offsets, these are 0 .. 31 and 0 .. 63.
    pub fn int8(codes: &'a [i8], scales: &'a [f32]) -> Self {
        Self { scales: Some(scales), ..Elements::Int8(codes).into() }
    }

    /// Borrows codes of a quantiser and the scales of their groups, `[out, groups]`; both are
    /// packed without change. A row has `ceil(in / 2)` bytes. A byte holds two codes + 8, or with
    /// offsets two codes 0 .. 15, that of the earlier input in the low half. Needs
    /// [`WeightLayout::OutIn`], and [`Type::Int4`] in [`LayerConfig::weight_type`].
    pub fn int4(codes: &'a [u8], scales: &'a [f32]) -> Self {
        Self { scales: Some(scales), ..Elements::Int4(codes).into() }
    }

    setters! {
        /// Sets the elements from one row to the next; of int4 an even number. 0, the default, is
        /// contiguous.
        stride(elements: usize) => stride = elements;
        /// Sets the offsets of groups, `[out, groups]`: a weight is then code * scale + offset. By
        /// default, there are none.
        offsets(offsets: &'a [f32]) => offsets = Some(offsets);
        /// Sets the factors of the scales, each for 256 inputs, `[out, ceil(in / 256)]`, with
        /// [`Type::Int8`] in [`LayerConfig::scale_type`]. By default, there are none.
        ///
        /// # Errors
        ///
        /// Packing fails if f16 does not hold a factor exactly, or a scale is no integer from -128
        /// to 127.
        block_scales(factors: &'a [f32]) => block_scales = Some(factors);
        /// Sets the factors of the offsets, as [`block_scales`](Self::block_scales) those of the
        /// scales.
        block_offsets(factors: &'a [f32]) => block_offsets = Some(factors);
    }
}

impl<'a, T: Into<Elements<'a>>> From<T> for Matrix<'a> {
    fn from(data: T) -> Self {
        let data = data.into();
        let [scales, offsets, block_scales, block_offsets] = [None; 4];
        Self { data, scales, offsets, block_scales, block_offsets, stride: 0 }
    }
}

/// The weights of a layer, borrowed while it is packed.
///
/// W_Q, W_K and W_V come as three matrices or as one fused matrix, or W_Q alone; W_O and biases are
/// optional. The columns of W_Q, W_K and W_V and the rows of W_O are those of head 0, then of head
/// 1, and so on. Shapes are those of [`WeightLayout::InOut`]; [`WeightLayout::OutIn`] transposes
/// every matrix.
///
/// # Examples
///
/// ```
/// use mha::{Layer, LayerConfig, WeightLayout, Weights};
///
/// let w = vec![0.5; 8 * 8];
/// let weights = Weights::new(&w, &w, &w).output(&w).layout(WeightLayout::OutIn);
/// let layer = Layer::new(&LayerConfig::new(8, 2), &weights)?;
/// assert_eq!(layer.shape().head_dim, 4);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Weights<'a> {
    projections: Projections<'a>,
    layout: WeightLayout,
    linear: Option<Matrix<'a>>, // in place of w_o
    w_o: Option<Matrix<'a>>,
    b_q: Option<&'a [f32]>,
    b_k: Option<&'a [f32]>,
    b_v: Option<&'a [f32]>,
    b_qkv: Option<&'a [f32]>,
    b_o: Option<&'a [f32]>,
    w_g: Option<Matrix<'a>>,
    b_g: Option<&'a [f32]>,
    has_gate_in_q: bool,
}

#[derive(Debug, Clone, Default)]
enum Projections<'a> {
    Three([Matrix<'a>; 3]),
    Fused(Matrix<'a>),
    Query(Matrix<'a>),
    #[default]
    None,
}

impl<'a> Weights<'a> {
    /// Borrows three matrices: W_Q `[query_dim, num_heads * head_dim]`, W_K `[key_dim, num_kv_heads
    /// * head_dim]` and W_V `[value_dim, num_kv_heads * head_dim_v]`.
    pub fn new(
        w_q: impl Into<Matrix<'a>>, w_k: impl Into<Matrix<'a>>, w_v: impl Into<Matrix<'a>>,
    ) -> Self {
        Self::of(Projections::Three([w_q.into(), w_k.into(), w_v.into()]))
    }

    /// Borrows one matrix with the columns of W_Q, then of W_K, then of W_V. Rows of query, key and
    /// value have the same width.
    pub fn fused(w_qkv: impl Into<Matrix<'a>>) -> Self {
        Self::of(Projections::Fused(w_qkv.into()))
    }

    /// Borrows W_Q alone, `[query_dim, num_heads * head_dim]`, for calls that attend to a cache as
    /// it is ([`cache_read`](crate::Forward::cache_read)). The layer's shape has `key_dim` and
    /// `value_dim` 0.
    pub fn query_only(w_q: impl Into<Matrix<'a>>) -> Self {
        Self::of(Projections::Query(w_q.into()))
    }

    /// Borrows the matrix of a linear layer, `[inputs, outputs]`, with [`LayerConfig::linear`].
    pub fn linear(w: impl Into<Matrix<'a>>) -> Self {
        Self { linear: Some(w.into()), ..Self::default() }
    }

    fn of(projections: Projections<'a>) -> Self {
        Self { projections, ..Self::default() }
    }

    setters! {
        /// Sets the layout of all matrices, by default [`WeightLayout::InOut`].
        layout(layout: WeightLayout) => layout = layout;
        /// Sets W_O, `[num_heads * head_dim_v, output_dim]`. Without it, the output is the context:
        /// the results of all heads side by side.
        output(w_o: impl Into<Matrix<'a>>) => w_o = Some(w_o.into());
        /// Sets the bias of the queries, `[num_heads * head_dim]`; by default 0.
        query_bias(b_q: &'a [f32]) => b_q = Some(b_q);
        /// Sets the bias of the keys, `[num_kv_heads * head_dim]`; by default 0.
        key_bias(b_k: &'a [f32]) => b_k = Some(b_k);
        /// Sets the bias of the values, `[num_kv_heads * head_dim_v]`; by default 0.
        value_bias(b_v: &'a [f32]) => b_v = Some(b_v);
        /// Sets the biases of queries, keys and values, one after the other, in place of the three.
        /// The matrices need not be fused.
        fused_bias(b_qkv: &'a [f32]) => b_qkv = Some(b_qkv);
        /// Sets the bias of the output, `[output_dim]`, of a layer with W_O or of a linear one; by
        /// default 0.
        output_bias(b_o: &'a [f32]) => b_o = Some(b_o);
        /// Sets W_G, `[query_dim, num_heads * gate_dim]`, of a layer with a
        /// [`Gate`](crate::Gate).
        gate(w_g: impl Into<Matrix<'a>>) => w_g = Some(w_g.into());
        /// Sets the bias of the gate, `[num_heads * gate_dim]`, with W_G; by default 0.
        gate_bias(b_g: &'a [f32]) => b_g = Some(b_g);
        /// Finds the gate in W_Q, in place of W_G: each head's gate columns follow the head's own,
        /// and so do its biases (Qwen3-Next).
        gate_in_query() => has_gate_in_q = true;
    }

    /// W_O, or the matrix of a linear layer.
    fn output_matrix(&self) -> Option<&Matrix<'a>> {
        self.linear.as_ref().or(self.w_o.as_ref())
    }

    /// The type that all matrices have.
    fn kind(&self) -> Result<Type> {
        let of_inputs: &[Matrix] = match &self.projections {
            Projections::Three(matrices) => matrices,
            Projections::Fused(one) | Projections::Query(one) => std::slice::from_ref(one),
            Projections::None => &[],
        };
        let mut kinds = of_inputs.iter().chain(self.output_matrix()).chain(&self.w_g);
        let first = kinds.next().map_or(Type::F32, |matrix| matrix.data.kind());
        let Some(other) = kinds.map(|matrix| matrix.data.kind()).find(|kind| *kind != first) else {
            return Ok(first);
        };
        let message = format!(
            "the weight matrices are {first:?} and {other:?}; all of a layer must be of one type"
        );
        Err(Error::new(ErrorKind::InvalidValue, message))
    }

    /// Calls `body` with what the library takes, whose slices are not checked yet.
    pub(crate) fn with_raw<R>(
        &self, body: impl FnOnce(&sys::mha_layer_weights) -> Result<R>,
    ) -> Result<R> {
        only_one(("linear", self.linear.is_some()), ("output", self.w_o.is_some()))?;
        // SAFETY: numbers and pointers that may be NULL.
        let mut raw: sys::mha_layer_weights = unsafe { zeroed() };
        raw.struct_size = size_of::<sys::mha_layer_weights>();
        raw.layout = match self.layout {
            WeightLayout::InOut => sys::MHA_LAYOUT_IN_OUT,
            WeightLayout::OutIn => sys::MHA_LAYOUT_OUT_IN,
        };
        raw.type_ = self.kind()?.raw();
        let (q, k, v, qkv) = match &self.projections {
            Projections::Three([w_q, w_k, w_v]) => (Some(w_q), Some(w_k), Some(w_v), None),
            Projections::Fused(w_qkv) => (None, None, None, Some(w_qkv)),
            Projections::Query(w_q) => (Some(w_q), None, None, None),
            Projections::None => (None, None, None, None),
        };
        (raw.w_q, raw.w_k, raw.w_v) =
            (raw_matrix(q, self.b_q), raw_matrix(k, self.b_k), raw_matrix(v, self.b_v));
        raw.w_qkv = raw_matrix(qkv, self.b_qkv);
        (raw.w_o, raw.w_g) =
            (raw_matrix(self.output_matrix(), self.b_o), raw_matrix(self.w_g.as_ref(), self.b_g));
        raw.gate_place =
            if self.has_gate_in_q { sys::MHA_GATE_IN_W_Q } else { sys::MHA_GATE_IN_W_G };
        body(&raw)
    }

    /// Whether there is nothing but the matrix of a linear layer and its bias.
    pub(crate) fn are_linear(&self) -> bool {
        let others = [self.b_q, self.b_k, self.b_v, self.b_qkv, self.b_g];
        self.linear.is_some() && self.w_g.is_none() && others.iter().all(Option::is_none)
    }

    /// Checks that each slice has what a layer of this shape reads. `config` has been found valid
    /// by the library and has its defaults resolved.
    pub(crate) fn check_slices(&self, config: &LayerConfig) -> Result<()> {
        let q_head = config.head_dim + if self.has_gate_in_q { config.gate_dim } else { 0 };
        let [query_dim, key_dim, value_dim, output_dim] =
            extents!(config => query_dim, key_dim, value_dim, output_dim);
        let q = ("num_heads * head_dim", config.num_heads * q_head);
        let k = ("num_kv_heads * head_dim", config.num_kv_heads * config.head_dim);
        let v = ("num_kv_heads * head_dim_v", config.num_kv_heads * config.head_dim_v);
        let g = ("num_heads * gate_dim", config.num_heads * config.gate_dim);
        let qkv = ("columns of Q, K and V", q.1 + k.1 + v.1);
        let context = match config.num_heads {
            0 => query_dim,
            heads => ("num_heads * head_dim_v", heads * config.head_dim_v),
        };
        let check = |name, matrix, rows, columns| {
            self.check_matrix(name, matrix, config.group_size, rows, columns)
        };
        match &self.projections {
            Projections::Three([w_q, w_k, w_v]) => {
                check("w_q", w_q, query_dim, q)?;
                check("w_k", w_k, key_dim, k)?;
                check("w_v", w_v, value_dim, v)?;
            }
            Projections::Fused(w_qkv) => check("w_qkv", w_qkv, query_dim, qkv)?,
            Projections::Query(w_q) => check("w_q", w_q, query_dim, q)?,
            Projections::None => {}
        }
        self.output_matrix().map_or(Ok(()), |w_o| check("w_o", w_o, context, output_dim))?;
        self.w_g.as_ref().map_or(Ok(()), |w_g| check("w_g", w_g, query_dim, g))?;
        check_given! {
            "w_g.bias": self.b_g => [("columns", g.1)];
            "w_q.bias": self.b_q => [("columns", q.1)];
            "w_k.bias": self.b_k => [("columns", k.1)];
            "w_v.bias": self.b_v => [("columns", v.1)];
            "w_qkv.bias": self.b_qkv => [("columns", qkv.1)];
            "w_o.bias": self.b_o => [("columns", output_dim.1)];
        }
        Ok(())
    }

    fn check_matrix(
        &self, name: &str, matrix: &Matrix, group_size: usize, rows: Extent, columns: Extent,
    ) -> Result<()> {
        let (outer, inner) = match self.layout {
            WeightLayout::InOut => (rows, columns),
            WeightLayout::OutIn => (columns, rows),
        };
        let (inner, row, default_group) = match matrix.data {
            Elements::Int4(_) => (("bytes", inner.1.div_ceil(2)), matrix.stride / 2, 32),
            _ => (inner, matrix.stride, usize::MAX),
        };
        let strides = (matrix.stride != 0).then_some(Strides { batch: 0, row, head: 0 });
        check_lengths(name, matrix.data.len(), strides, &[outer, inner])?;
        let groups = ("groups", rows.1.div_ceil(or(group_size, default_group)));
        let blocks = ("blocks", rows.1.div_ceil(256));
        for (part, numbers, in_row) in [
            ("scales", matrix.scales, groups),
            ("offsets", matrix.offsets, groups),
            ("block_scales", matrix.block_scales, blocks),
            ("block_offsets", matrix.block_offsets, blocks),
        ] {
            if let Some(numbers) = numbers {
                check_exact(&format!("{name}.{part}"), numbers.len(), &[columns, in_row])?;
            }
        }
        Ok(())
    }
}

fn raw_matrix(matrix: Option<&Matrix>, bias: Option<&[f32]>) -> sys::mha_matrix {
    sys::mha_matrix {
        data: matrix.map_or(null(), |matrix| matrix.data.as_ptr()),
        bias: slice_ptr(bias),
        scales: slice_ptr(matrix.and_then(|matrix| matrix.scales)),
        offsets: slice_ptr(matrix.and_then(|matrix| matrix.offsets)),
        block_scales: slice_ptr(matrix.and_then(|matrix| matrix.block_scales)),
        block_offsets: slice_ptr(matrix.and_then(|matrix| matrix.block_offsets)),
        row_stride: matrix.map_or(0, |matrix| int(matrix.stride)),
    }
}
