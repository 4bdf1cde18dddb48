use std::mem::zeroed;

use mha_sys as sys;

use crate::call::{runners, Call};
use crate::options::{
    common_setters, fill_common, raw_input, struct_ptr, Dimensions, Options, Output,
};
use crate::spans::{check_exact, check_strided, int, rows_of, Extent};
use crate::types::{Elements, ElementsMut};
use crate::{
    CallInfo, Error, ErrorKind, KvCache, Layer, Norm, Outputs, Result, Rope, Scheduler,
    ScoreOptions, Workspace,
};

/// A call of a whole layer, made by [`Layer::forward`]: say what it is to do, then
/// [`run`](Self::run) it.
///
/// ```
/// use mha::{Layer, LayerConfig, Weights, Workspace};
///
/// let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let x = [1.0; 2 * 3 * 4]; // two sequences of three rows
/// let (mut y, mut weights) = ([0.0; 24], [0.0; 2 * 2 * 3 * 3]);
/// let call = layer.forward(&x, &mut y).batch(2).causal().attention_weights(&mut weights);
/// call.run(&mut Workspace::new())?;
/// assert_eq!(weights[..3], [1.0, 0.0, 0.0]); // of the first row, which sees itself only
/// # Ok::<(), mha::Error>(())
/// ```
///
/// A slice that does not have the length that the shapes ask for is an error, and nothing is
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
    query: Rows<'a>,
    key: Rows<'a>,
    value: Rows<'a>,
    output: Output<'a>,
    output_strides: Option<[usize; 2]>,
    options: Options<'a>,
}

/// Input rows, where they are given, and the strides of sequences and rows, where they are not
/// contiguous.
#[derive(Default)]
pub(crate) struct Rows<'a> {
    pub data: Option<Elements<'a>>,
    pub strides: Option<[usize; 2]>,
}

impl<'a> Forward<'a> {
    pub(crate) fn new(layer: &'a Layer<'a>, query: Elements<'a>, output: ElementsMut<'a>) -> Self {
        Self {
            layer,
            batch: 1,
            n_q: None,
            n_kv: None,
            query: Rows { data: Some(query), strides: None },
            key: Rows::default(),
            value: Rows::default(),
            output: Output::of(output),
            output_strides: None,
            options: Options::default(),
        }
    }

    /// Rows for the keys, `[batch, n_kv, key_dim]`, and unless [`value`](Self::value) is given for
    /// the values: cross-attention.
    pub fn key(mut self, rows: impl Into<Elements<'a>>) -> Self {
        self.key.data = Some(rows.into());
        self
    }

    /// Rows for the values, `[batch, n_kv, value_dim]`, where they are not those for the keys.
    pub fn value(mut self, rows: impl Into<Elements<'a>>) -> Self {
        self.value.data = Some(rows.into());
        self
    }

    /// Elements from one sequence of the query to the next, and from one row to the next; 0 =
    /// contiguous. Needs [`n_q`](Self::n_q).
    pub fn query_strides(mut self, batch: usize, row: usize) -> Self {
        self.query.strides = Some([batch, row]);
        self
    }

    /// Likewise of the key. Needs [`n_kv`](Self::n_kv).
    pub fn key_strides(mut self, batch: usize, row: usize) -> Self {
        self.key.strides = Some([batch, row]);
        self
    }

    /// Likewise of the value.
    pub fn value_strides(mut self, batch: usize, row: usize) -> Self {
        self.value.strides = Some([batch, row]);
        self
    }

    /// Likewise of the output.
    pub fn output_strides(mut self, batch: usize, row: usize) -> Self {
        self.output_strides = Some([batch, row]);
        self
    }

    common_setters!();

    runners!();

    fn dimensions(&self) -> Result<Dimensions> {
        self.options.check_one_cache()?;
        let shape = self.layer.shape();
        let n_q = match self.n_q {
            Some(n_q) => n_q,
            None => rows("query", "n_q", &self.query, self.batch, shape.query_dim)?,
        };
        let given = [("key", &self.key, shape.key_dim), ("value", &self.value, shape.value_dim)]
            .into_iter()
            .find(|rows| rows.1.data.is_some());
        let n_kv = match (given, self.n_kv) {
            (Some(_), Some(n_kv)) => n_kv,
            (Some((name, given, width)), None) => rows(name, "n_kv", given, self.batch, width)?,
            // The library does not look at n_kv then.
            (None, _) if self.options.only_reads_cache() => 0,
            (None, _) => n_q,
        };
        let is_self = !self.options.only_reads_cache() && self.key.data.is_none();
        Ok(Dimensions {
            batch: self.batch,
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
        let shape = self.layer.shape();
        let (batch, n_q, n_kv) = (("batch", of.batch), ("n_q", of.n_q), ("n_kv", of.n_kv));
        check_rows("query", &self.query, &[batch, n_q, ("query_dim", shape.query_dim)])?;
        check_rows("key", &self.key, &[batch, n_kv, ("key_dim", shape.key_dim)])?;
        check_rows("value", &self.value, &[batch, n_kv, ("value_dim", shape.value_dim)])?;
        check_lengths(
            "output",
            self.output.len(),
            self.output_strides,
            &[batch, n_q, ("output_dim", shape.output_dim)],
        )?;
        self.options.check_slices(&of)?;
        let mut pointees = self.options.pointees(&of)?;
        pointees.connect();

        // SAFETY: numbers and pointers that may be NULL.
        let mut args: sys::mha_forward_args = unsafe { zeroed() };
        fill_common!(args, self.options, pointees, of);
        (args.query, args.key, args.value) =
            (raw_rows(&self.query), raw_rows(&self.key), raw_rows(&self.value));
        args.output = self.output.raw(raw_strides(self.output_strides));
        let result = body(Call::Forward(self.layer.as_ptr(), &args));
        pointees.resume_panic();
        result
    }
}

/// The rows of each sequence, as the length of a contiguous array says; 0 without an array.
pub(crate) fn rows(
    name: &str, count: &str, rows: &Rows, batch: usize, width: usize,
) -> Result<usize> {
    match rows {
        Rows { data: None, .. } => Ok(0),
        Rows { data: Some(data), strides: None } => rows_of(name, data.len(), batch, width),
        _ => Err(Error::new(
            ErrorKind::InvalidValue,
            format!("{name} has strides, so that its length does not tell the rows; set {count}"),
        )),
    }
}

pub(crate) fn check_rows(name: &str, rows: &Rows, shape: &[Extent; 3]) -> Result<()> {
    match &rows.data {
        Some(data) => check_lengths(name, data.len(), rows.strides, shape),
        None => Ok(()),
    }
}

pub(crate) fn check_lengths(
    name: &str, len: usize, strides: Option<[usize; 2]>, shape: &[Extent; 3],
) -> Result<()> {
    let Some([batch, row]) = strides else { return check_exact(name, len, shape) };
    let [_, (_, n), (_, width)] = *shape;
    let row = if row == 0 { width } else { row };
    let batch = if batch == 0 { n.saturating_mul(row) } else { batch };
    check_strided(name, len, shape, &[batch, row])
}

pub(crate) fn raw_strides(strides: Option<[usize; 2]>) -> sys::mha_strides {
    let [batch, row] = strides.unwrap_or_default().map(int);
    sys::mha_strides { batch, row, head: 0 }
}

pub(crate) fn raw_rows(rows: &Rows) -> sys::mha_input {
    raw_input(rows.data, raw_strides(rows.strides))
}
