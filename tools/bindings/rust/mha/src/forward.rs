use std::mem::zeroed;

use mha_sys as sys;

use crate::arrays::{struct_ptr, Array, Output};
use crate::call::{runners, Call};
use crate::error::needs;
use crate::options::{common_setters, fill_common, Cache, Dimensions, Options};
use crate::spans::int;
use crate::types::{Elements, ElementsMut};
use crate::{
    Arithmetic, BlockTables, CallInfo, Error, ErrorKind, Gate, KvCache, KvPool, Layer, Norm,
    Outputs, Result, Rope, Scheduler, ScoreOptions, Strides, Workspace,
};

/// A call of a whole layer, which [`Layer::forward`] starts: say what it is to do, then
/// [`run`](Self::run) it.
///
/// # Examples
///
/// ```
/// use mha::{Layer, LayerConfig, Weights, Workspace};
///
/// let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let x = [1.0; 2 * 3 * 4]; // two sequences of three rows
/// let (mut y, mut weights) = ([0.0; 24], [0.0; 2 * 2 * 3 * 3]);
/// let call = layer.forward(&x, &mut y).batch(2).causal().attention_weights(&mut weights);
/// call.run(&mut Workspace::new())?;
/// assert_eq!(weights[..3], [1.0, 0.0, 0.0]); // the first row sees only itself
/// # Ok::<(), mha::Error>(())
/// ```
///
/// A slice that does not have the length that its shape requires is an error, and nothing is
/// written:
///
/// ```
/// # use mha::{Layer, LayerConfig, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let error = layer.forward(&[1.0; 12], &mut [0.0; 8]).run(&mut Workspace::new()).unwrap_err();
/// assert_eq!(error.to_string(), "output has 8 elements; [batch 1, n_q 3, output_dim 4] are 12");
/// # Ok::<(), mha::Error>(())
/// ```
///
/// Outputs cannot overlap inputs:
///
/// ```compile_fail,E0502
/// # use mha::{Layer, LayerConfig, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let mut x = [1.0; 12];
/// layer.forward(&x, &mut x).run(&mut Workspace::new())?; // does not compile
/// # Ok::<(), mha::Error>(())
/// ```
#[must_use = "nothing happens before .run()"]
pub struct Forward<'a> {
    layer: &'a Layer<'a>,
    batch: usize,
    n_q: Option<usize>,
    n_kv: Option<usize>,
    query: Array<'a>,
    key: Array<'a>,
    value: Array<'a>,
    output: Output<'a>,
    options: Options<'a>,
}

impl<'a> Forward<'a> {
    pub(crate) fn new(layer: &'a Layer<'a>, query: Elements<'a>, output: ElementsMut<'a>) -> Self {
        Self {
            layer,
            batch: 1,
            n_q: None,
            n_kv: None,
            query: Array::of(query),
            key: Array::default(),
            value: Array::default(),
            output: Output::of(output),
            options: Options::default(),
        }
    }

    setters! {
        /// Gives the rows that keys are projected from, `[batch, n_kv, key_dim]`, for
        /// cross-attention. Values are projected from the same rows unless [`value`](Self::value)
        /// is given. By default, keys come from the rows of the query. `rows` is a slice, an array
        /// or a vector of `f32`, or [`Elements`].
        key(rows: impl Into<Elements<'a>>) => key.data = Some(rows.into());
        /// Gives the rows that values are projected from, `[batch, n_kv, value_dim]`. By default,
        /// values come from the rows of the key.
        value(rows: impl Into<Elements<'a>>) => value.data = Some(rows.into());
        /// Sets the strides of the query, in elements: from one sequence to the next, and from one
        /// row to the next; 0 = contiguous. Needs [`n_q`](Self::n_q).
        query_strides(batch: usize, row: usize) =>
            query.strides = Some(Strides { batch, row, head: 0 });
        /// Sets the strides of the key, as [`query_strides`](Self::query_strides) does. Needs
        /// [`key`](Self::key) and [`n_kv`](Self::n_kv).
        key_strides(batch: usize, row: usize) =>
            key.strides = Some(Strides { batch, row, head: 0 });
        /// Sets the strides of the value, as [`query_strides`](Self::query_strides) does. Needs
        /// [`value`](Self::value).
        value_strides(batch: usize, row: usize) =>
            value.strides = Some(Strides { batch, row, head: 0 });
        /// Sets the strides of the output, as [`query_strides`](Self::query_strides) does.
        /// Elements between rows are not written.
        output_strides(batch: usize, row: usize) =>
            output.strides = Some(Strides { batch, row, head: 0 });
    }

    common_setters!();

    runners!();

    fn dimensions(&self) -> Result<Dimensions> {
        self.options.check_one_cache()?;
        let (shape, batch, reads) =
            (self.layer.shape(), self.batch, self.options.only_reads_cache());
        let n_q = self.query.rows("query", "n_q", self.n_q, batch, shape.query_dim)?;
        let is_self = !reads && self.key.data.is_none();
        let n_kv = if self.key.data.is_some() {
            self.key.rows("key", "n_kv", self.n_kv, batch, shape.key_dim)?
        } else if self.value.data.is_some() {
            self.value.rows("value", "n_kv", self.n_kv, batch, shape.value_dim)?
        } else if reads {
            0
        } else {
            n_q
        };
        if self.n_kv.is_some_and(|given| given != n_kv) {
            let message = format!(
                "n_kv is {}, but no key is given, so that the call has {n_kv} rows of key; give \
                 key, or leave n_kv out",
                self.n_kv.unwrap_or_default()
            );
            return Err(Error::new(ErrorKind::InvalidValue, message));
        }
        let shape = *shape;
        Ok(Dimensions {
            batch,
            n_q,
            n_kv,
            is_self,
            num_heads: shape.num_heads,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            head_dim_v: shape.head_dim_v,
        })
    }

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let of = self.dimensions()?;
        let [batch, n_q, n_kv] = extents!(of => batch, n_q, n_kv);
        let [query_dim, key_dim, value_dim, output_dim] =
            extents!(self.layer.shape() => query_dim, key_dim, value_dim, output_dim);
        self.query.check("query", &[batch, n_q, query_dim])?;
        self.key.check("key", &[batch, n_kv, key_dim])?;
        self.value.check("value", &[batch, n_kv, value_dim])?;
        self.output.check("output", &[batch, n_q, output_dim])?;
        self.options.check(&of)?;
        needs(
            ("norm.context.after_gate", self.options.norm.is_some_and(|norm| norm.needs_gate())),
            ("a layer with a gate", self.layer.shape().gate != Gate::None),
        )?;
        let mut pointees = self.options.pointees(&of)?;
        pointees.connect();

        // SAFETY: numbers and pointers that may be NULL.
        let mut args: sys::mha_forward_args = unsafe { zeroed() };
        fill_common!(args, self.options, pointees, of);
        (args.query, args.key, args.value) = (self.query.raw(), self.key.raw(), self.value.raw());
        args.output = self.output.raw();
        let result = body(Call::Forward(self.layer.as_ptr(), &args));
        pointees.resume_panic();
        result
    }
}
