use std::mem::{size_of, zeroed};

use mha_sys as sys;

use crate::call::{runners, Call};
use crate::options::{raw_input, struct_ptr, Output};
use crate::scheduler::Run;
use crate::spans::{check_exact, check_strided, extent, int, rows_of};
use crate::types::{Elements, ElementsMut};
use crate::{CallInfo, Layer, Result, Scheduler, Workspace};

/// A product alone, made by [`Layer::linear`]: `y = x W + b`, and plus a residual, on the kernels
/// of the projections.
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
    x: Elements<'a>,
    output: Output<'a>,
    residual: Residual<'a>,
    strides: [usize; 3],
    rows: Option<usize>,
    scheduler: Option<&'a dyn Scheduler>,
}

enum Residual<'a> {
    None,
    Rows(Elements<'a>),
    Output,
}

impl<'a> Linear<'a> {
    pub(crate) fn new(layer: &'a Layer<'a>, x: Elements<'a>, output: ElementsMut<'a>) -> Self {
        Self {
            layer,
            x,
            output: Output::of(output),
            residual: Residual::None,
            strides: [0; 3],
            rows: None,
            scheduler: None,
        }
    }

    /// Rows to be added to the product, of the type and the shape of the output.
    pub fn residual(mut self, rows: impl Into<Elements<'a>>) -> Self {
        self.residual = Residual::Rows(rows.into());
        self
    }

    /// Adds the product to what the output holds.
    pub fn add_to_output(mut self) -> Self {
        self.residual = Residual::Output;
        self
    }

    /// The number of rows, and the elements from one row to the next of x, the residual and the
    /// output; 0 = contiguous.
    pub fn strides(mut self, rows: usize, x: usize, residual: usize, output: usize) -> Self {
        (self.rows, self.strides) = (Some(rows), [x, residual, output]);
        self
    }

    setters! {
        /// Threads; if not set, the call runs on the calling thread alone.
        scheduler: &'a dyn Scheduler;
    }

    runners!();

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let shape = self.layer.shape();
        let (width, outputs) = (
            if shape.num_heads == 0 { shape.query_dim } else { shape.num_heads * shape.head_dim_v },
            shape.output_dim,
        );
        let rows = match self.rows {
            Some(rows) => rows,
            None => rows_of("x", self.x.len(), 1, width)?,
        };
        let check_rows = |name: &str, len: usize, width: usize, stride: usize| match stride {
            0 => check_exact(name, len, &[("rows", rows), ("width", width)]),
            _ => check_strided(name, len, &[("rows", rows), ("width", width)], &[stride]),
        };
        check_rows("x", self.x.len(), width, self.strides[0])?;
        check_rows("output", self.output.len(), outputs, self.strides[2])?;
        let [x, of_residual, of_output] =
            self.strides.map(|stride| sys::mha_strides { batch: 0, row: int(stride), head: 0 });
        let output = self.output.raw(of_output);
        let mut residual = raw_input(None, of_residual);
        match self.residual {
            Residual::None => {}
            Residual::Rows(given) => {
                check_rows("residual", given.len(), outputs, self.strides[1])?;
                residual = raw_input(Some(given), of_residual);
            }
            Residual::Output => {
                (residual.data, residual.type_, residual.strides) =
                    (output.data, output.type_, of_output)
            }
        }
        let run = self.scheduler.map(Run::new);
        let scheduler = run.as_ref().map(Run::raw);
        // SAFETY: numbers and pointers that may be NULL.
        let mut args: sys::mha_linear_args = unsafe { zeroed() };
        args.struct_size = size_of::<sys::mha_linear_args>();
        args.rows = extent(rows);
        (args.x, args.residual, args.output) = (raw_input(Some(self.x), x), residual, output);
        args.scheduler = struct_ptr(&scheduler);
        let result = body(Call::Linear(self.layer.as_ptr(), &args));
        if let Some(run) = &run {
            run.resume_panic();
        }
        result
    }
}
