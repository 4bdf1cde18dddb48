use std::borrow::Cow;
use std::mem::size_of;
use std::ptr::null;

use mha_sys as sys;

use crate::error::check;
use crate::spans::{check_exact, int};
use crate::{Error, ErrorKind, Result};

/// How the angles of a rotary position embedding (RoPE) are chosen. With [`new`](Self::new) alone:
/// Llama's.
///
/// ```
/// use mha::RopeConfig;
///
/// let llama3 = RopeConfig::new(128).base(500000.0).tables(8192)?;
/// let llama31 = RopeConfig::new(128).base(500000.0).llama3(8.0, 8192).tables(131072)?;
/// let stretched = RopeConfig::new(128).yarn(4.0, 32768).tables(131072)?;
/// assert_eq!(llama3.cos().len(), 8192 * 64);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RopeConfig<'a> {
    dims: usize,
    base: f64,
    linear_factor: f64,
    yarn_factor: f64,
    yarn_betas: (f64, f64),
    is_yarn_unrounded: bool,
    llama3_factor: f64,
    llama3_freq_factors: (f64, f64),
    ntk_factor: f64,
    ntk_positions: usize,
    pair_factors: Option<&'a [f64]>,
    original_positions: usize,
    attention_factor: f64,
    mrope: Option<([usize; 3], &'a [i64], bool)>,
}

impl<'a> RopeConfig<'a> {
    /// Rotates the first `dims` elements of a head, an even number.
    pub fn new(dims: usize) -> Self {
        Self { dims, ..Self::default() }
    }

    setters! {
        /// The base of the angles; 10000 if not set.
        base: f64;
    }

    /// Divides positions by `factor` (position interpolation, "linear" in Hugging Face's
    /// `rope_scaling`).
    pub fn linear(mut self, factor: f64) -> Self {
        self.linear_factor = factor;
        self
    }

    /// Stretches a context of `original_positions` by `factor` as Llama 3.1 does ("llama3"). Of
    /// YaRN and what follows, a config has one.
    pub fn llama3(mut self, factor: f64, original_positions: usize) -> Self {
        (self.llama3_factor, self.original_positions) = (factor, original_positions);
        self
    }

    /// `low_freq_factor` and `high_freq_factor` of [`llama3`](Self::llama3); 1 and 4 if not set.
    pub fn llama3_freq_factors(mut self, low: f64, high: f64) -> Self {
        self.llama3_freq_factors = (low, high);
        self
    }

    /// Stretches a context of `original_positions` by `factor` as YaRN (Peng et al.,
    /// arXiv:2309.00071) does, in the form of Hugging Face's "yarn".
    pub fn yarn(mut self, factor: f64, original_positions: usize) -> Self {
        (self.yarn_factor, self.original_positions) = (factor, original_positions);
        self
    }

    /// Of YaRN: pairs that turn more often than `fast` in the original context keep their angle, 32
    /// if not set; those that turn less often than `slow` are stretched in full, 1 if not set.
    pub fn yarn_betas(mut self, fast: f64, slow: f64) -> Self {
        self.yarn_betas = (fast, slow);
        self
    }

    /// Of YaRN: the pairs between which the stretching sets in are not rounded to whole ones
    /// ("truncate": false; gpt-oss).
    pub fn yarn_unrounded(mut self) -> Self {
        self.is_yarn_unrounded = true;
        self
    }

    /// Raises the base once there are more than `original_positions` in the context, of which there
    /// are `positions` now (dynamic NTK, "dynamic").
    pub fn dynamic_ntk(mut self, factor: f64, original_positions: usize, positions: usize) -> Self {
        (self.ntk_factor, self.original_positions, self.ntk_positions) =
            (factor, original_positions, positions);
        self
    }

    setters! {
        /// `[dims / 2]`: divides the angle of each pair (LongRoPE, "longrope").
        pair_factors: &'a [f64];
        /// Factor of cosines and sines, with any of these; with YaRN `0.1 ln(factor) + 1` if not
        /// set.
        attention_factor: f64;
    }

    /// Rows of three positions, in time, height and width (M-RoPE): `positions` is `[3,
    /// num_positions]`, and calls name rows by
    /// [`rope_q_positions`](crate::Forward::rope_q_positions) and
    /// [`rope_k_positions`](crate::Forward::rope_k_positions). `section` says how many pairs go by
    /// each, in order (Qwen2-VL) or interleaved (Qwen3-VL).
    pub fn mrope(mut self, section: [usize; 3], positions: &'a [i64], interleaved: bool) -> Self {
        self.mrope = Some((section, positions, interleaved));
        self
    }

    /// A rotation with tables for the positions 0 to `num_positions - 1`.
    pub fn tables(&self, num_positions: usize) -> Result<Rope<'static>> {
        let len = num_positions.saturating_mul(self.dims / 2);
        let table = || {
            let mut table = Vec::new();
            let out_of_memory = |_| {
                Error::new(
                    ErrorKind::OutOfMemory,
                    format!("there is no memory for a table of {len} angles"),
                )
            };
            table.try_reserve_exact(len).map_err(out_of_memory)?;
            table.resize(len, 0.0);
            Ok(table)
        };
        let (mut cos, mut sin) = (table()?, table()?);
        self.fill(0, num_positions, &mut cos, &mut sin)?;
        Ok(Rope::of(self.dims, cos.into(), sin.into()))
    }

    /// Fills `cos` and `sin`, both `[num_positions, dims / 2]`, with the rows of the positions from
    /// `first_position` on. The rows are the same in any table, so that parts of one can be filled
    /// by several threads.
    pub fn fill(
        &self, first_position: usize, num_positions: usize, cos: &mut [f32], sin: &mut [f32],
    ) -> Result<()> {
        let section = self.mrope.map(|(section, ..)| section.map(int));
        let config = sys::mha_rope_config {
            struct_size: size_of::<sys::mha_rope_config>(),
            dims: int(self.dims),
            first_position: int(first_position),
            num_positions: int(num_positions),
            base: self.base,
            linear_factor: self.linear_factor,
            yarn_factor: self.yarn_factor,
            original_positions: int(self.original_positions),
            yarn_beta_fast: self.yarn_betas.0,
            yarn_beta_slow: self.yarn_betas.1,
            attention_factor: self.attention_factor,
            yarn_unrounded: u32::from(self.is_yarn_unrounded),
            llama3_factor: self.llama3_factor,
            llama3_low_freq_factor: self.llama3_freq_factors.0,
            llama3_high_freq_factor: self.llama3_freq_factors.1,
            ntk_factor: self.ntk_factor,
            ntk_positions: int(self.ntk_positions),
            pair_factors: self.pair_factors.map_or(null(), <[f64]>::as_ptr),
            mrope_section: section.as_ref().map_or(null(), |section| section.as_ptr()),
            mrope_positions: self.mrope.map_or(null(), |(_, positions, _)| positions.as_ptr()),
            mrope_interleaved: self.mrope.map_or(0, |(.., interleaved)| u32::from(interleaved)),
        };
        if let Some(factors) = self.pair_factors {
            check_exact("pair_factors", factors.len(), &[("dims / 2", self.dims / 2)])?;
        }
        if let Some((_, positions, _)) = self.mrope {
            check_exact(
                "positions",
                positions.len(),
                &[("axes", 3), ("num_positions", num_positions)],
            )?;
        }
        let shape = [("num_positions", num_positions), ("dims / 2", self.dims / 2)];
        check_exact("cos", cos.len(), &shape)?;
        check_exact("sin", sin.len(), &shape)?;
        // SAFETY: tables of the length that the config asks for.
        check(|error| unsafe {
            sys::mha_rope_tables(&config, cos.as_mut_ptr(), sin.as_mut_ptr(), error)
        })
    }
}

/// Which elements of a head are paired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum RopeStyle {
    /// Element i with element i + dims / 2: Llama as Hugging Face has it, GPT-NeoX.
    #[default]
    Half,
    /// Element 2 i with element 2 i + 1: Llama as Meta has it, GPT-J.
    Interleaved,
}

/// A rotation of queries and keys, with its tables: `.rope(&rope)`. All layers, calls and threads
/// can share one.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope<'a> {
    cos: Cow<'a, [f32]>,
    sin: Cow<'a, [f32]>,
    dims: usize,
    offset: usize,
    stride: usize,
    style: RopeStyle,
}

impl<'a> Rope<'a> {
    /// Tables of the caller's, `[num_positions, dims / 2]`: row p is for position p, column i for
    /// pair i. `dims` elements of a head are rotated, the first ones or, with
    /// [`offset`](Self::offset), those from there on. A call refuses tables whose last row is not
    /// whole.
    pub fn new(dims: usize, cos: &'a [f32], sin: &'a [f32]) -> Self {
        Self::of(dims, cos.into(), sin.into())
    }

    fn of(dims: usize, cos: Cow<'a, [f32]>, sin: Cow<'a, [f32]>) -> Self {
        Self { cos, sin, dims, offset: 0, stride: 0, style: RopeStyle::Half }
    }

    /// Elements from one row of either table to the next; 0 = contiguous.
    pub fn table_stride(mut self, elements: usize) -> Self {
        self.stride = elements;
        self
    }

    /// The first element of a head that is rotated; with `dims` at most the width of a head. MLA
    /// rotates the last ones.
    pub fn offset(mut self, element: usize) -> Self {
        self.offset = element;
        self
    }

    setters! {
        /// Which elements are paired.
        style: RopeStyle;
    }

    /// The cosines, `[num_positions, dims / 2]`.
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// The sines, `[num_positions, dims / 2]`.
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// What the library takes.
    pub(crate) fn raw(&self) -> Result<sys::mha_rope> {
        if self.cos.len() != self.sin.len() {
            let message = format!(
                "cos has {} elements and sin {}; both are [num_positions, dims / 2]",
                self.cos.len(),
                self.sin.len()
            );
            return Err(Error::new(ErrorKind::SliceLength, message));
        }
        let columns = self.dims / 2;
        if columns == 0 || self.cos.len() < columns {
            let message = format!(
                "cos and sin have {} elements; a row of {} dims needs {}",
                self.cos.len(),
                self.dims,
                columns.max(1)
            );
            return Err(Error::new(ErrorKind::SliceLength, message));
        }
        let stride = if self.stride == 0 { columns } else { self.stride };
        let after_rows = self.cos.len() % stride;
        // The library refuses a stride of less than a row.
        if stride >= columns && after_rows != 0 && after_rows < columns {
            let message = format!(
                "cos and sin have {} elements, the last {after_rows} of which are no whole row; a \
                    row of {} dims needs {columns}",
                self.cos.len(),
                self.dims
            );
            return Err(Error::new(ErrorKind::SliceLength, message));
        }
        let num_positions = (self.cos.len() - columns) / stride + 1;
        Ok(sys::mha_rope {
            struct_size: size_of::<sys::mha_rope>(),
            style: match self.style {
                RopeStyle::Half => sys::MHA_ROPE_HALF,
                RopeStyle::Interleaved => sys::MHA_ROPE_INTERLEAVED,
            },
            reserved: 0,
            dims: int(self.dims),
            offset: int(self.offset),
            num_positions: int(num_positions),
            cos: self.cos.as_ptr(),
            sin: self.sin.as_ptr(),
            table_stride: int(self.stride),
        })
    }
}
