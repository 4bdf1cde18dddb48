use std::borrow::Cow;
use std::mem::size_of;

use mha_sys as sys;

use crate::arrays::slice_ptr;
use crate::error::check;
use crate::spans::{int, or};
use crate::{Error, ErrorKind, Result};

/// The angles of a rotary position embedding (RoPE; Su et al., arXiv:2104.09864). The defaults are
/// those of the original: the angle of pair i at position p is `p * base^(-2 i / dims)`. At most
/// one of [`llama3`](Self::llama3), [`yarn`](Self::yarn), [`dynamic_ntk`](Self::dynamic_ntk) and
/// [`pair_factors`](Self::pair_factors) can be set.
///
/// # Examples
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
    /// Rotates `dims` elements of a head, an even number from 2 on.
    pub fn new(dims: usize) -> Self {
        Self { dims, ..Self::default() }
    }

    setters! {
        /// Sets the base of the angles, 1 .. 2^64, with YaRN more than 1; 0, the default, is 10000.
        base(base: f64) => base = base;
        /// Divides positions by `factor`, 1 .. 2^31 (position interpolation; "linear" in Hugging
        /// Face's `rope_scaling`); 0, the default, is 1.
        linear(factor: f64) => linear_factor = factor;
        /// Stretches slow pairs by `factor`, 1 .. 2^31, as Llama 3.1 does ("llama3"), for a model
        /// trained on `original_positions`, 1 .. 2^31.
        llama3(factor: f64, original_positions: usize) =>
            llama3_factor = factor, original_positions = original_positions;
        /// Sets the turns in the original context below which [`llama3`](Self::llama3) stretches a
        /// pair in full, and above which it leaves a pair as it is: `low_freq_factor` and
        /// `high_freq_factor`, 2^-31 .. 2^31; 0, the default, is 1 and 4.
        llama3_freq_factors(low: f64, high: f64) => llama3_freq_factors = (low, high);
        /// Stretches slow pairs by `factor`, 1 .. 2^31, as YaRN does (Peng et al.,
        /// arXiv:2309.00071; "yarn"), for a model trained on `original_positions`, 1 .. 2^31.
        yarn(factor: f64, original_positions: usize) =>
            yarn_factor = factor, original_positions = original_positions;
        /// Sets the turns in the original context above which [`yarn`](Self::yarn) leaves a pair as
        /// it is, and below which it stretches a pair in full: 2^-31 .. 2^31, `slow` at most
        /// `fast`; 0, the default, is 32 and 1.
        yarn_betas(fast: f64, slow: f64) => yarn_betas = (fast, slow);
        /// Leaves the pairs between which [`yarn`](Self::yarn) begins and ends unrounded
        /// ("truncate": false; gpt-oss). By default, they are whole numbers.
        yarn_unrounded() => is_yarn_unrounded = true;
        /// Raises the base by `factor`, 1 .. 2^31, once there are more than `original_positions` in
        /// the context, of which there are `positions` now (dynamic NTK; "dynamic").
        dynamic_ntk(factor: f64, original_positions: usize, positions: usize) =>
            ntk_factor = factor, original_positions = original_positions,
            ntk_positions = positions;
        /// Divides the angle of each pair by a factor, `[dims / 2]`, 1/2 .. 2^31 (LongRoPE,
        /// arXiv:2402.13753; "longrope").
        pair_factors(factors: &'a [f64]) => pair_factors = Some(factors);
        /// Sets the factor of cosines and sines, 2^-31 .. 2^31; 0, the default, is 1, and with YaRN
        /// `0.1 ln(factor) + 1`.
        attention_factor(factor: f64) => attention_factor = factor;
        /// Gives each row of the tables three positions, in time, height and width (M-RoPE):
        /// `positions` is `[3, num_positions]`. `section` says how many pairs go by each, in order
        /// (Qwen2-VL) or `interleaved` (Qwen3-VL); its sum is `dims / 2`. Calls name rows of the
        /// tables by [`rope_q_positions`](crate::Forward::rope_q_positions) and
        /// [`rope_k_positions`](crate::Forward::rope_k_positions).
        mrope(section: [usize; 3], positions: &'a [i64], interleaved: bool) =>
            mrope = Some((section, positions, interleaved));
    }

    /// Makes a rotation with tables for the positions 0 to `num_positions - 1`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidValue`] for a number outside its range or settings that contradict each
    /// other, [`ErrorKind::SliceLength`] for a slice that does not have its shape, and
    /// [`ErrorKind::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::RopeConfig;
    ///
    /// let rope = RopeConfig::new(64).tables(2048)?;
    /// assert_eq!(rope.cos().len(), 2048 * 32);
    /// # Ok::<(), mha::Error>(())
    /// ```
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
    /// `first_position` on. A row has the same bits in any table, so several threads can fill parts
    /// of one. With [`mrope`](Self::mrope), `first_position` must be 0.
    ///
    /// # Errors
    ///
    /// Those of [`tables`](Self::tables), and [`ErrorKind::SliceLength`] for `cos` and `sin`.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{Rope, RopeConfig};
    ///
    /// let (mut cos, mut sin) = ([0.0; 16 * 4], [0.0; 16 * 4]);
    /// RopeConfig::new(8).fill(0, 16, &mut cos, &mut sin)?;
    /// let rope = Rope::new(8, &cos, &sin);
    /// assert_eq!(rope, RopeConfig::new(8).tables(16)?);
    /// # Ok::<(), mha::Error>(())
    /// ```
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
            pair_factors: slice_ptr(self.pair_factors),
            mrope_section: slice_ptr(section.as_ref().map(<[i64; 3]>::as_slice)),
            mrope_positions: slice_ptr(self.mrope.map(|(_, positions, _)| positions)),
            mrope_interleaved: self.mrope.map_or(0, |(.., interleaved)| u32::from(interleaved)),
        };
        let (rows, pairs) = (("num_positions", num_positions), ("dims / 2", self.dims / 2));
        check_given! {
            "pair_factors": self.pair_factors => [pairs];
            "positions": self.mrope.map(|(_, positions, _)| positions) => [("axes", 3), rows];
            "cos": Some(&*cos) => [rows, pairs];
            "sin": Some(&*sin) => [rows, pairs];
        }
        // SAFETY: tables of the length that the config asks for.
        check(|error| unsafe {
            sys::mha_rope_tables(&config, cos.as_mut_ptr(), sin.as_mut_ptr(), error)
        })
    }
}

/// Which elements of a head are pair i, counted from [`Rope::offset`] on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum RopeStyle {
    /// Elements i and i + dims / 2: Llama in Hugging Face, GPT-NeoX.
    #[default]
    Half,
    /// Elements 2 i and 2 i + 1: Meta's Llama, GPT-J.
    Interleaved,
}

/// A rotation of queries and keys, with its tables: (a, b) becomes (a cos - b sin, b cos + a sin).
/// A call takes it by [`rope`](crate::Forward::rope). All layers, calls and threads can share one.
///
/// # Examples
///
/// ```
/// use mha::{RopeConfig, RopeStyle};
///
/// // GPT-J rotates neighbours, the first 64 elements of each head.
/// let rope = RopeConfig::new(64).tables(2048)?.style(RopeStyle::Interleaved);
/// # let _ = rope;
/// # Ok::<(), mha::Error>(())
/// ```
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
    /// Borrows tables, both `[num_positions, dims / 2]`: row p is position p, and column i is pair
    /// i. `dims` elements of a head are rotated, the first ones or those from
    /// [`offset`](Self::offset) on. A call refuses tables whose last row is not whole.
    /// [`RopeConfig::fill`] has an example.
    pub fn new(dims: usize, cos: &'a [f32], sin: &'a [f32]) -> Self {
        Self::of(dims, cos.into(), sin.into())
    }

    fn of(dims: usize, cos: Cow<'a, [f32]>, sin: Cow<'a, [f32]>) -> Self {
        Self { cos, sin, dims, offset: 0, stride: 0, style: RopeStyle::Half }
    }

    setters! {
        /// Sets the elements from one row of either table to the next; 0, the default, is
        /// contiguous.
        table_stride(elements: usize) => stride = elements;
        /// Sets the first element of a head that is rotated, by default 0. Together with `dims` it
        /// is at most the width of a head. MLA rotates the last elements.
        offset(element: usize) => offset = element;
        /// Sets which elements are paired, by default [`RopeStyle::Half`].
        style(style: RopeStyle) => style = style;
    }

    /// Returns the cosines, `[num_positions, dims / 2]`.
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// Returns the sines, `[num_positions, dims / 2]`.
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
        let stride = or(self.stride, columns);
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
