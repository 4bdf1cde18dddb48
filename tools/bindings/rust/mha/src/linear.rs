use std::mem::{size_of, zeroed};

use mha_sys as sys;

use crate::arrays::{struct_ptr, Array, Output};
use crate::call::{runners, Call};
use crate::error::only_one;
use crate::scheduler::Run;
use crate::spans::{extent, rows_of};
use crate::types::{Elements, ElementsMut};
use crate::{CallInfo, Layer, Result, Scheduler, Strides, Workspace};

/// A linear layer's call, which [`Layer::linear`] starts: `y = x W + b`, plus a residual if there
/// is one, computed like the projections of a layer.
///
/// # Examples
///
/// ```
/// use mha::{Layer, LayerConfig, Weights, Workspace};
///
/// let weights = Weights::linear(&[0.5; 12]).output_bias(&[1.0; 3]);
/// let gate = Layer::new(&LayerConfig::linear(4, 3), &weights)?;
/// let mut y = [10.0; 2 * 3];
/// gate.linear(&[1.0; 2 * 4], &mut y).add_to_output().run(&mut Workspace::new())?;
/// assert_eq!(y, [13.0; 6]);
/// # Ok::<(), mha::Error>(())
/// ```
#[must_use = "nothing happens before .run()"]
pub struct Linear<'a> {
    layer: &'a Layer<'a>,
    x: Array<'a>,
    residual: Array<'a>,
    adds_to_output: bool,
    output: Output<'a>,
    rows: Option<usize>,
    scheduler: Option<&'a dyn Scheduler>,
}

impl<'a> Linear<'a> {
    pub(crate) fn new(layer: &'a Layer<'a>, x: Elements<'a>, output: ElementsMut<'a>) -> Self {
        Self {
            layer,
            x: Array::of(x),
            residual: Array::default(),
            adds_to_output: false,
            output: Output::of(output),
            rows: None,
            scheduler: None,
        }
    }

    setters! {
        /// Adds rows to the product, `[rows, output_dim]`, of the type of the output. By default,
        /// nothing is added.
        residual(rows: impl Into<Elements<'a>>) => residual.data = Some(rows.into());
        /// Adds the product to what the output holds, in place of a
        /// [`residual`](Self::residual).
        add_to_output() => adds_to_output = true;
        /// Sets the number of rows, and the elements from one row to the next of x, the residual
        /// and the output; 0 = contiguous. By default, all are contiguous, and the number of rows
        /// follows from the length of x.
        strides(rows: usize, x: usize, residual: usize, output: usize) =>
            rows = Some(rows), x.strides = of_rows(x), residual.strides = of_rows(residual),
            output.strides = of_rows(output);
        /// Runs the call on threads. By default, it runs on the calling thread alone.
        scheduler(scheduler: &'a dyn Scheduler) => scheduler = Some(scheduler);
    }

    runners!();

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let shape = self.layer.shape();
        let of_heads = shape.num_heads * shape.head_dim_v;
        let width = if shape.num_heads == 0 { shape.query_dim } else { of_heads };
        let rows = match (self.rows, self.x.data) {
            (None, Some(x)) => rows_of("x", x.len(), 1, width)?,
            (rows, _) => rows.unwrap_or_default(),
        };
        let of_output = [("rows", rows), ("width", shape.output_dim)];
        self.x.check("x", &[("rows", rows), ("width", width)])?;
        self.output.check("output", &of_output)?;
        let adds = ("add_to_output", self.adds_to_output);
        only_one(("residual", self.residual.data.is_some()), adds)?;
        only_one(("a stride of residual", self.residual.strides.is_some()), adds)?;
        self.residual.check("residual", &of_output)?;
        let output = self.output.raw();
        let mut residual = self.residual.raw();
        if self.adds_to_output {
            (residual.data, residual.type_, residual.strides) =
                (output.data, output.type_, output.strides);
        }
        let run = self.scheduler.map(Run::new);
        let scheduler = run.as_ref().map(Run::raw);
        // SAFETY: numbers and pointers that may be NULL.
        let mut args: sys::mha_linear_args = unsafe { zeroed() };
        args.struct_size = size_of::<sys::mha_linear_args>();
        args.rows = extent(rows);
        (args.x, args.residual, args.output) = (self.x.raw(), residual, output);
        args.scheduler = struct_ptr(&scheduler);
        let result = body(Call::Linear(self.layer.as_ptr(), &args));
        if let Some(run) = &run {
            run.resume_panic();
        }
        result
    }
}

/// None = contiguous.
fn of_rows(row: usize) -> Option<Strides> {
    (row != 0).then_some(Strides { batch: 0, row, head: 0 })
}
