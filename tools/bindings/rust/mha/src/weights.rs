use std::mem::{size_of, zeroed};
use std::ptr::null;

use mha_sys as sys;

use crate::layer::LayerConfig;
use crate::options::slice_ptr;
use crate::spans::{check_exact, check_strided, int, Extent};
use crate::types::Elements;
use crate::{Error, ErrorKind, Result, Type};

/// How weight matrices lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum WeightLayout {
    /// `[in, out]`, y = x W: GPT-2's Conv1D.
    #[default]
    InOut,
    /// `[out, in]`, y = x W^T: PyTorch's `nn.Linear` and `in_proj_weight`.
    OutIn,
}

/// A weight matrix: its numbers, the scales of quantised ones, and how far apart its rows are.
/// Slices, arrays and vectors of `f32` convert into it.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    data: Elements<'a>,
    scales: Option<&'a [f32]>,
    offsets: Option<&'a [f32]>,
    stride: usize,
}

impl<'a> Matrix<'a> {
    /// Floats.
    pub fn f32(data: &'a [f32]) -> Self {
        Self { data: Elements::F32(data), scales: None, offsets: None, stride: 0 }
    }

    /// The bits of IEEE binary16 numbers.
    pub fn f16(data: &'a [u16]) -> Self {
        Self { data: Elements::F16(data), scales: None, offsets: None, stride: 0 }
    }

    /// The bits of bfloat16 numbers.
    pub fn bf16(data: &'a [u16]) -> Self {
        Self { data: Elements::Bf16(data), scales: None, offsets: None, stride: 0 }
    }

    /// Codes of a quantiser with a scale for each output column, or for each group `[out, groups]`,
    /// taken as they are. Needs [`Type::Int8`] in [`LayerConfig::weight_type`].
    pub fn int8(codes: &'a [i8], scales: &'a [f32]) -> Self {
        Self { data: Elements::Int8(codes), scales: Some(scales), offsets: None, stride: 0 }
    }

    /// Codes of a quantiser with a scale for each group, `[out, groups]`, taken as they are: rows
    /// of `ceil(in / 2)` bytes, of which each holds two codes + 8, with offsets two codes 0 .. 15,
    /// that of the earlier input in the low half. Needs [`WeightLayout::OutIn`], and [`Type::Int4`]
    /// in [`LayerConfig::weight_type`].
    pub fn int4(codes: &'a [u8], scales: &'a [f32]) -> Self {
        Self { data: Elements::Int4(codes), scales: Some(scales), offsets: None, stride: 0 }
    }

    setters! {
        /// Elements from one row to the next, where they do not follow each other. Of int4 even.
        stride: usize;
    }

    /// Offsets of groups, `[out, groups]`: a weight is then code * scale + offset.
    pub fn offsets(mut self, offsets: &'a [f32]) -> Self {
        self.offsets = Some(offsets);
        self
    }
}

impl<'a, T: Into<Elements<'a>>> From<T> for Matrix<'a> {
    fn from(data: T) -> Self {
        Self { data: data.into(), scales: None, offsets: None, stride: 0 }
    }
}

/// The weights of a layer, borrowed while it is packed.
///
/// W_Q, W_K and W_V come as three matrices or as one fused matrix, or W_Q alone; W_O and biases are
/// optional. The columns of W_Q, W_K and W_V and the rows of W_O are those of head 0, then of head
/// 1, and so on.
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
#[derive(Debug, Clone)]
pub struct Weights<'a> {
    projections: Projections<'a>,
    layout: WeightLayout,
    w_o: Option<Matrix<'a>>,
    b_q: Option<&'a [f32]>,
    b_k: Option<&'a [f32]>,
    b_v: Option<&'a [f32]>,
    b_qkv: Option<&'a [f32]>,
    b_o: Option<&'a [f32]>,
    w_g: Option<Matrix<'a>>,
    b_g: Option<&'a [f32]>,
}

#[derive(Debug, Clone)]
enum Projections<'a> {
    Three([Matrix<'a>; 3]),
    Fused(Matrix<'a>),
    Query(Matrix<'a>),
    None,
}

impl<'a> Weights<'a> {
    /// Three matrices: W_Q `[query_dim, num_heads * head_dim]`, W_K `[key_dim, num_kv_heads *
    /// head_dim]`, W_V `[value_dim, num_kv_heads * head_dim_v]`.
    pub fn new(
        w_q: impl Into<Matrix<'a>>, w_k: impl Into<Matrix<'a>>, w_v: impl Into<Matrix<'a>>,
    ) -> Self {
        Self::of(Projections::Three([w_q.into(), w_k.into(), w_v.into()]))
    }

    /// One fused matrix of all columns, W_Q's, then W_K's, then W_V's. Query, key and value rows
    /// must be of one width.
    pub fn fused(w_qkv: impl Into<Matrix<'a>>) -> Self {
        Self::of(Projections::Fused(w_qkv.into()))
    }

    /// W_Q alone, for calls that attend to a cache as it is
    /// ([`cache_read`](crate::Forward::cache_read)). The shape has `key_dim` and `value_dim` 0.
    pub fn query_only(w_q: impl Into<Matrix<'a>>) -> Self {
        Self::of(Projections::Query(w_q.into()))
    }

    /// W_O alone, `[in, out]`, for a layer of [`LayerConfig::linear`].
    pub fn linear(w: impl Into<Matrix<'a>>) -> Self {
        Self::of(Projections::None).output(w)
    }

    fn of(projections: Projections<'a>) -> Self {
        let layout = WeightLayout::InOut;
        let (b_q, b_k, b_v, b_qkv, b_o, b_g) = (None, None, None, None, None, None);
        Self { projections, layout, w_o: None, b_q, b_k, b_v, b_qkv, b_o, w_g: None, b_g }
    }

    setters! {
        /// How all matrices lie in memory.
        layout: WeightLayout;
    }

    /// W_O `[num_heads * head_dim_v, output_dim]`. Without it, the output is the merged heads.
    pub fn output(mut self, w_o: impl Into<Matrix<'a>>) -> Self {
        self.w_o = Some(w_o.into());
        self
    }

    /// The bias of the queries, `[num_heads * head_dim]`.
    pub fn query_bias(mut self, b_q: &'a [f32]) -> Self {
        self.b_q = Some(b_q);
        self
    }

    /// The bias of the keys, `[num_kv_heads * head_dim]`.
    pub fn key_bias(mut self, b_k: &'a [f32]) -> Self {
        self.b_k = Some(b_k);
        self
    }

    /// The bias of the values, `[num_kv_heads * head_dim_v]`.
    pub fn value_bias(mut self, b_v: &'a [f32]) -> Self {
        self.b_v = Some(b_v);
        self
    }

    /// The biases of queries, keys and values one after the other, in place of these three. Goes
    /// with any form of the weights.
    pub fn fused_bias(mut self, b_qkv: &'a [f32]) -> Self {
        self.b_qkv = Some(b_qkv);
        self
    }

    /// The bias of the output, `[output_dim]`; only with W_O.
    pub fn output_bias(mut self, b_o: &'a [f32]) -> Self {
        self.b_o = Some(b_o);
        self
    }

    /// W_G `[query_dim, num_heads * gate_dim]` of a layer with a [`Gate`](crate::Gate). Without it,
    /// the columns of each head's gate follow the head's own in W_Q, and the biases in its bias.
    pub fn gate(mut self, w_g: impl Into<Matrix<'a>>) -> Self {
        self.w_g = Some(w_g.into());
        self
    }

    /// The bias of the gate, `[num_heads * gate_dim]`; only with W_G.
    pub fn gate_bias(mut self, b_g: &'a [f32]) -> Self {
        self.b_g = Some(b_g);
        self
    }

    /// The type that all matrices have.
    fn kind(&self) -> Result<Type> {
        let first = match &self.projections {
            Projections::Three([w_q, ..]) => w_q.data.kind(),
            Projections::Fused(one) | Projections::Query(one) => one.data.kind(),
            Projections::None => self.w_o.map_or(Type::F32, |w_o| w_o.data.kind()),
        };
        let three: &[Matrix] =
            if let Projections::Three(matrices) = &self.projections { matrices } else { &[] };
        let mut kinds =
            three.iter().chain(&self.w_o).chain(&self.w_g).map(|matrix| matrix.data.kind());
        match kinds.find(|kind| *kind != first) {
            Some(other) => Err(Error::new(
                ErrorKind::InvalidValue,
                format!(
                    "the weight matrices are {first:?} and {other:?}; all of a layer must be \
                    of one type"
                ),
            )),
            None => Ok(first),
        }
    }

    /// Calls `body` with what the library takes, whose slices are not checked yet.
    pub(crate) fn with_raw<R>(
        &self, body: impl FnOnce(&sys::mha_layer_weights) -> Result<R>,
    ) -> Result<R> {
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
            (raw_matrix(self.w_o.as_ref(), self.b_o), raw_matrix(self.w_g.as_ref(), self.b_g));
        body(&raw)
    }

    /// Whether there is nothing but W_O and its bias.
    pub(crate) fn are_linear(&self) -> bool {
        let has_others =
            [self.b_q, self.b_k, self.b_v, self.b_qkv, self.b_g].iter().any(Option::is_some)
                || self.w_g.is_some();
        matches!(self.projections, Projections::None) && self.w_o.is_some() && !has_others
    }

    /// That each slice has what a layer of this shape reads. `config` has been found valid by the
    /// library and has its defaults resolved.
    pub(crate) fn check_slices(&self, config: &LayerConfig) -> Result<()> {
        // Without W_G, a head's gate follows the head's own columns in W_Q.
        let q_head = config.head_dim + if self.w_g.is_some() { 0 } else { config.gate_dim };
        let (q_columns, g_columns) =
            (config.num_heads * q_head, config.num_heads * config.gate_dim);
        let k_columns = config.num_kv_heads * config.head_dim;
        let v_columns = config.num_kv_heads * config.head_dim_v;
        match &self.projections {
            Projections::Three([w_q, w_k, w_v]) => {
                self.check_matrix(
                    "w_q",
                    w_q,
                    config.group_size,
                    ("query_dim", config.query_dim),
                    ("num_heads * head_dim", q_columns),
                )?;
                self.check_matrix(
                    "w_k",
                    w_k,
                    config.group_size,
                    ("key_dim", config.key_dim),
                    ("num_kv_heads * head_dim", k_columns),
                )?;
                self.check_matrix(
                    "w_v",
                    w_v,
                    config.group_size,
                    ("value_dim", config.value_dim),
                    ("num_kv_heads * head_dim_v", v_columns),
                )?;
            }
            Projections::Fused(w_qkv) => {
                let columns = ("columns of Q, K and V", q_columns + k_columns + v_columns);
                self.check_matrix(
                    "w_qkv",
                    w_qkv,
                    config.group_size,
                    ("query_dim", config.query_dim),
                    columns,
                )?;
            }
            Projections::Query(w_q) => {
                self.check_matrix(
                    "w_q",
                    w_q,
                    config.group_size,
                    ("query_dim", config.query_dim),
                    ("num_heads * head_dim", q_columns),
                )?;
            }
            Projections::None => {}
        }
        if let Some(w_o) = &self.w_o {
            let rows = match config.num_heads {
                0 => ("query_dim", config.query_dim),
                num_heads => ("num_heads * head_dim_v", num_heads * config.head_dim_v),
            };
            self.check_matrix(
                "w_o",
                w_o,
                config.group_size,
                rows,
                ("output_dim", config.output_dim),
            )?;
        }
        if let Some(w_g) = &self.w_g {
            self.check_matrix(
                "w_g",
                w_g,
                config.group_size,
                ("query_dim", config.query_dim),
                ("num_heads * gate_dim", g_columns),
            )?;
        }
        let biases = [
            ("w_g.bias", self.b_g, g_columns),
            ("w_q.bias", self.b_q, q_columns),
            ("w_k.bias", self.b_k, k_columns),
            ("w_v.bias", self.b_v, v_columns),
            ("w_qkv.bias", self.b_qkv, q_columns + k_columns + v_columns),
            ("w_o.bias", self.b_o, config.output_dim),
        ];
        for (name, bias, columns) in biases {
            if let Some(bias) = bias {
                check_exact(name, bias.len(), &[("columns", columns)])?;
            }
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
        let shape = match matrix.data {
            Elements::Int4(_) => [outer, ("bytes", inner.1.div_ceil(2))],
            _ => [outer, inner],
        };
        let stride = if matches!(matrix.data, Elements::Int4(_)) {
            matrix.stride / 2
        } else {
            matrix.stride
        };
        if matrix.stride == 0 {
            check_exact(name, matrix.data.len(), &shape)?;
        } else {
            check_strided(name, matrix.data.len(), &shape, &[stride])?;
        }
        let groups = match (group_size, &matrix.data) {
            (0, Elements::Int4(_)) => rows.1.div_ceil(32),
            (0, _) => 1,
            _ => rows.1.div_ceil(group_size),
        };
        for (of_groups, numbers) in [("scales", matrix.scales), ("offsets", matrix.offsets)] {
            if let Some(numbers) = numbers {
                check_exact(
                    &format!("{name}.{of_groups}"),
                    numbers.len(),
                    &[columns, ("groups", groups)],
                )?;
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
        row_stride: matrix.map_or(0, |matrix| int(matrix.stride)),
    }
}
