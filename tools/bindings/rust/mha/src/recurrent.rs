use std::mem::{size_of, zeroed};

use mha_sys as sys;

use crate::arrays::{output_ptr, raw_input, slice_ptr, struct_ptr, Array, Output};
use crate::call::{runners, Call};
use crate::error::{needs, only_one};
use crate::options::{Dimensions, Options};
use crate::spans::{extent, int, or, Extent};
use crate::types::{Elements, ElementsMut};
use crate::{CallInfo, Gate, InstructionSet, Result, Scheduler, Strides, Workspace};

/// Attention with a state `[head_dim, head_dim_v]` for each value head in place of a KV cache, so
/// that the cost of a token does not grow with the length of its sequence. It is linear attention;
/// gated with [`decay`](RecurrentCall::decay) (Mamba-2); the delta rule with
/// [`beta`](RecurrentCall::beta); and with both the gated delta rule (Qwen3-Next). Results have the
/// same bits for a prompt at once, in parts and token by token.
///
/// # Examples
///
/// ```
/// use mha::{RecurrentAttention, Workspace};
///
/// let attention = RecurrentAttention::new(1, 2).scale(1.0); // one head of width 2
/// let (mut state, mut output) = ([0.0; 2 * 2], [0.0; 2]);
/// let mut token = |v: &[f32; 2]| {
///     let call = attention.call(&[1.0, 0.0], &[1.0, 0.0], v, &mut output);
///     call.update_state(&mut state).run(&mut Workspace::new())
/// };
/// token(&[3.0, 4.0])?;
/// token(&[0.5, 0.5])?;
/// assert_eq!((output, state), ([3.5, 4.5], [3.5, 4.5, 0.0, 0.0]));
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecurrentAttention {
    num_q_heads: usize,
    num_k_heads: usize,
    num_v_heads: usize,
    head_dim: usize,
    head_dim_v: usize,
    decay_dim: usize,
    scale: f32,
    norm_epsilon: f32,
    beta_function: Gate,
    instruction_set: InstructionSet,
}

impl RecurrentAttention {
    /// Describes `num_v_heads` states, at least 1, for queries and keys of `head_dim` elements, 1
    /// .. 1024. A call checks the numbers.
    pub fn new(num_v_heads: usize, head_dim: usize) -> Self {
        Self {
            num_q_heads: num_v_heads,
            num_k_heads: 0,
            num_v_heads,
            head_dim,
            head_dim_v: 0,
            decay_dim: 0,
            scale: 0.0,
            norm_epsilon: 0.0,
            beta_function: Gate::None,
            instruction_set: InstructionSet::AUTO,
        }
    }

    setters! {
        /// Sets the number of query heads, a divisor or a multiple of the states; by default as
        /// many as there are states. The output has as many heads as the greater of both.
        num_q_heads(heads: usize) => num_q_heads = heads;
        /// Sets the number of key heads, a divisor of the states; 0, the default, is as many as
        /// there are states.
        num_k_heads(heads: usize) => num_k_heads = heads;
        /// Sets the width of a head's values, 1 .. 1024; 0, the default, is `head_dim`.
        head_dim_v(width: usize) => head_dim_v = width;
        /// Sets how many numbers the decay of a head has: 1, or `head_dim`; 0, the default, is 1.
        decay_dim(numbers: usize) => decay_dim = numbers;
        /// Sets the factor of the output, a finite number; 0, the default, is `1 /
        /// sqrt(head_dim)`.
        scale(factor: f32) => scale = factor;
        /// Normalises q and k to `x / sqrt(sum of x^2 + norm_epsilon)`; 0, the default, leaves them
        /// as they are.
        norm_epsilon(epsilon: f32) => norm_epsilon = epsilon;
        /// Applies a function to beta: [`Gate::Sigmoid`], or [`Gate::None`], the default.
        beta_function(function: Gate) => beta_function = function;
        /// Sets the instruction set of the kernels, by default [`InstructionSet::AUTO`]. A call
        /// refuses one that this machine lacks.
        instruction_set(set: InstructionSet) => instruction_set = set;
    }

    /// Starts a call on q, `[batch, rows, num_q_heads, head_dim]`, k, `[batch, rows, num_k_heads,
    /// head_dim]`, and v, `[batch, rows, num_v_heads, head_dim_v]`, that writes to `output`,
    /// `[batch, rows, max(num_q_heads, num_v_heads), head_dim_v]`. The rows follow from the length
    /// of q.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{RecurrentAttention, Workspace};
    ///
    /// // Mamba-2: each row halves the state of the rows before it.
    /// let (ones, decay, mut output) = ([1.0; 3], [0.5f32.ln(); 3], [0.0; 3]);
    /// let call = RecurrentAttention::new(1, 1).call(&ones, &ones, &ones, &mut output);
    /// call.decay(&decay).run(&mut Workspace::new())?;
    /// assert_eq!(output, [1.0, 1.5, 1.75]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn call<'a>(
        &self, q: impl Into<Elements<'a>>, k: impl Into<Elements<'a>>, v: impl Into<Elements<'a>>,
        output: impl Into<ElementsMut<'a>>,
    ) -> RecurrentCall<'a> {
        RecurrentCall {
            attention: *self,
            batch: 1,
            rows: None,
            q: Array::of(q.into()),
            k: Array::of(k.into()),
            v: Array::of(v.into()),
            decay: Array::default(),
            beta: Array::default(),
            shared_beta: None,
            a_log: None,
            dt_bias: None,
            output: Output::of(output.into()),
            state: State::default(),
            snapshots: None,
            options: Options::default(),
        }
    }
}

/// The states before and after a call.
#[derive(Default)]
struct State<'a> {
    before: Option<&'a [f32]>,
    after: Option<Output<'a>>,
    updated: Option<Output<'a>>, // in place of both
}

impl State<'_> {
    fn check(&self, shape: &[Extent]) -> Result<()> {
        let updated = ("update_state", self.updated.is_some());
        only_one(("state", self.before.is_some()), updated)?;
        only_one(("state_out", self.after.is_some()), updated)?;
        check_given! {
            "state": self.before => shape[..];
            "state_out": self.after.as_ref().or(self.updated.as_ref()) => shape[..];
        }
        Ok(())
    }

    fn raw(&self) -> (*const f32, *mut f32) {
        match &self.updated {
            Some(_) => (output_ptr(&self.updated).cast_const(), output_ptr(&self.updated)),
            None => (slice_ptr(self.before), output_ptr(&self.after)),
        }
    }
}

/// The setters of both calls.
macro_rules! state_setters {
    () => {
        setters! {
            /// Sets the number of sequences in the arrays; by default 1. Packed sequences have a
            /// batch of 1.
            batch(sequences: usize) => batch = sequences;
            /// Sets the rows per sequence. By default, they follow from the length of the first
            /// array; arrays with strides need them.
            rows(rows: usize) => rows = Some(rows);
            /// Packs the sequences one after the other in arrays with a batch of 1: sequence s is
            /// the rows from `starts[s]` up to `starts[s + 1]`. `starts`, `[sequences + 1]`, never
            /// descends, begins with 0 and ends with the number of rows.
            cu_seqlens_q(starts: &'a [i64]) => options.cu_seqlens_q = Some(starts);
            /// Sets the valid rows of each sequence, `[batch]`. By default, all rows from the first
            /// valid one on are valid. Other rows are padding: they are not read, and their outputs
            /// are 0.
            q_lengths(rows: &'a [i64]) => options.q_lengths = Some(rows);
            /// Sets the first valid row of each sequence, `[batch]`, for padding on the left; by
            /// default 0.
            q_first_rows(rows: &'a [i64]) => options.q_first_rows = Some(rows);
            /// Runs the call on threads. By default, it runs on the calling thread alone.
            scheduler(scheduler: &'a dyn Scheduler) => options.scheduler = Some(scheduler);
            /// Gives the states before the first row; by default 0.
            state(state: &'a [f32]) => state.before = Some(state);
            /// Receives the states after the last row. By default, they are not written.
            state_out(state: &'a mut [f32]) => state.after = Some(Output::new(state));
            /// Gives the states before the first row, and receives those after the last one, in
            /// place of [`state`](Self::state) and [`state_out`](Self::state_out).
            update_state(state: &'a mut [f32]) => state.updated = Some(Output::new(state));
        }
    };
}

/// A call of recurrent attention, which [`RecurrentAttention::call`] starts. States are
/// `[sequences, num_v_heads, head_dim, head_dim_v]`.
#[must_use = "nothing happens before .run()"]
pub struct RecurrentCall<'a> {
    attention: RecurrentAttention,
    batch: usize,
    rows: Option<usize>,
    q: Array<'a>,
    k: Array<'a>,
    v: Array<'a>,
    decay: Array<'a>,
    beta: Array<'a>,
    shared_beta: Option<Elements<'a>>,
    a_log: Option<&'a [f32]>,
    dt_bias: Option<&'a [f32]>,
    output: Output<'a>,
    state: State<'a>,
    snapshots: Option<(usize, Output<'a>)>,
    options: Options<'a>,
}

impl<'a> RecurrentCall<'a> {
    state_setters!();

    setters! {
        /// Multiplies the state of each row by exp(decay), `[batch, rows, num_v_heads, decay_dim]`;
        /// by default by 1.
        decay(decay: impl Into<Elements<'a>>) => decay.data = Some(decay.into());
        /// Applies the delta rule with beta, `[batch, rows, num_v_heads]`.
        beta(beta: impl Into<Elements<'a>>) => beta.data = Some(beta.into());
        /// Applies the delta rule with a beta that all heads share, contiguous `[batch, rows]`, in
        /// place of [`beta`](Self::beta).
        shared_beta(beta: impl Into<Elements<'a>>) => shared_beta = Some(beta.into());
        /// Receives the states before the last row, before the last two rows and so on, `count` of
        /// them, 1 .. 16, to drop rejected tokens: `[sequences, count, num_v_heads, head_dim,
        /// head_dim_v]`. A sequence with fewer rows has the state before its first row there.
        snapshots(count: usize, states: &'a mut [f32]) =>
            snapshots = Some((count, Output::new(states)));
        /// Sets the strides of the queries. Needs [`rows`](Self::rows).
        q_strides(strides: Strides) => q.strides = Some(strides);
        /// Sets the strides of the keys.
        k_strides(strides: Strides) => k.strides = Some(strides);
        /// Sets the strides of the values.
        v_strides(strides: Strides) => v.strides = Some(strides);
        /// Sets the strides of [`decay`](Self::decay).
        decay_strides(strides: Strides) => decay.strides = Some(strides);
        /// Sets the strides of [`beta`](Self::beta).
        beta_strides(strides: Strides) => beta.strides = Some(strides);
        /// Computes the decay as `-exp(a_log) * softplus(decay + dt_bias)`, with `a_log`
        /// `[num_v_heads]`. Needs [`decay`](Self::decay), which is used as it is by default.
        a_log(a_log: &'a [f32]) => a_log = Some(a_log);
        /// Sets the bias of [`a_log`](Self::a_log)'s decay, `[num_v_heads, decay_dim]`; by default
        /// 0.
        dt_bias(bias: &'a [f32]) => dt_bias = Some(bias);
        /// Sets the strides of the output. Elements between rows and heads are not written.
        output_strides(strides: Strides) => output.strides = Some(strides);
    }

    runners!();

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let how = &self.attention;
        let v_heads = ("num_v_heads", how.num_v_heads);
        let k_heads = ("num_k_heads", or(how.num_k_heads, v_heads.1));
        let q_heads = ("num_q_heads", or(how.num_q_heads, k_heads.1));
        let heads = ("heads", q_heads.1.max(v_heads.1));
        let width = ("head_dim", how.head_dim);
        let width_v = ("head_dim_v", or(how.head_dim_v, width.1));
        let decay_dim = ("decay_dim", or(how.decay_dim, 1));
        let of_q = q_heads.1.saturating_mul(width.1);
        let n = self.q.rows("q", "rows", self.rows, self.batch, of_q)?;
        let (batch, rows) = (("batch", self.batch), ("rows", n));
        let shared_beta = ("shared_beta", self.shared_beta.is_some());
        only_one(("beta", self.beta.data.is_some()), shared_beta)?;
        needs(("decay_dim", how.decay_dim > 1), ("decay", self.decay.data.is_some()))?;
        self.q.check("q", &[batch, rows, q_heads, width])?;
        self.k.check("k", &[batch, rows, k_heads, width])?;
        self.v.check("v", &[batch, rows, v_heads, width_v])?;
        self.decay.check("decay", &[batch, rows, v_heads, decay_dim])?;
        self.beta.check("beta", &[batch, rows, v_heads, ("numbers", 1)])?;
        self.output.check("output", &[batch, rows, heads, width_v])?;
        let of = dimensions(self.batch, n);
        self.options.check(&of)?;
        let sequences = ("sequences", self.options.sequences(&of));
        self.state.check(&[sequences, v_heads, width, width_v])?;
        check_given! {
            "shared_beta": self.shared_beta => [batch, rows];
            "a_log": self.a_log => [v_heads];
            "dt_bias": self.dt_bias => [v_heads, decay_dim];
        }
        let (count, snapshots) =
            self.snapshots.as_ref().map_or((0, None), |(count, states)| (*count, Some(states)));
        check_given!("snapshots": snapshots =>
            [sequences, ("count", count), v_heads, width, width_v];);
        let mut pointees = self.options.pointees(&of)?;
        pointees.connect();

        // SAFETY: numbers and pointers that may be NULL.
        let mut args: sys::mha_recurrent_args = unsafe { zeroed() };
        args.struct_size = size_of::<sys::mha_recurrent_args>();
        (args.num_q_heads, args.num_k_heads, args.num_v_heads) =
            (int(q_heads.1), int(k_heads.1), int(v_heads.1));
        (args.head_dim, args.head_dim_v, args.decay_dim) =
            (int(width.1), int(width_v.1), int(decay_dim.1));
        (args.scale, args.norm_epsilon, args.beta_function) =
            (how.scale, how.norm_epsilon, how.beta_function.raw());
        (args.a_log, args.dt_bias) = (slice_ptr(self.a_log), slice_ptr(self.dt_bias));
        (args.instruction_set, args.scheduler) =
            (how.instruction_set.0, struct_ptr(&pointees.scheduler));
        (args.batch, args.rows, args.sequences) =
            (extent(self.batch), extent(n), struct_ptr(&pointees.sequences));
        (args.q, args.k, args.v) = (self.q.raw(), self.k.raw(), self.v.raw());
        (args.decay, args.beta) = (self.decay.raw(), self.beta.raw());
        if let Some(beta) = self.shared_beta {
            let (batch, head) = (int(n.max(1)), sys::MHA_BROADCAST);
            args.beta = raw_input(Some(beta), sys::mha_strides { batch, row: 1, head });
        }
        args.output = self.output.raw();
        (args.state, args.state_out) = self.state.raw();
        if let Some(states) = snapshots {
            (args.snapshots, args.num_snapshots) = (states.start().cast(), int(count));
        }
        let result = body(Call::Recurrent(&args));
        pointees.resume_panic();
        result
    }
}

/// What lists of sequences are checked against.
fn dimensions(batch: usize, n_q: usize) -> Dimensions {
    Dimensions { batch, n_q, is_self: true, ..Dimensions::default() }
}

/// A depthwise causal convolution: each channel of a row is the sum of its last `kernel_size` rows
/// times weights, the newest last. Results have the same bits however a sequence is cut into calls.
///
/// # Examples
///
/// ```
/// use mha::{CausalConv, Workspace};
///
/// let conv = CausalConv::new(1, 2, &[0.5, 1.0]); // one channel, of the row before and this one
/// let (mut state, mut output) = ([4.0], [0.0; 3]);
/// conv.call(&[1.0, 2.0, 3.0], &mut output).update_state(&mut state).run(&mut Workspace::new())?;
/// assert_eq!((output, state), ([3.0, 2.5, 4.0], [3.0]));
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CausalConv<'a> {
    channels: usize,
    kernel_size: usize,
    weights: &'a [f32],
    bias: Option<&'a [f32]>,
    activation: u32,
    instruction_set: InstructionSet,
}

impl<'a> CausalConv<'a> {
    /// Borrows weights `[channels, kernel_size]`. `channels` is at least 1, and `kernel_size` 2 ..
    /// 8. A call checks them.
    pub fn new(channels: usize, kernel_size: usize, weights: &'a [f32]) -> Self {
        let (activation, instruction_set) = (sys::MHA_FUNCTION_NONE, InstructionSet::AUTO);
        Self { channels, kernel_size, weights, bias: None, activation, instruction_set }
    }

    setters! {
        /// Sets the bias, `[channels]`; by default 0.
        bias(bias: &'a [f32]) => bias = Some(bias);
        /// Sets the instruction set of the kernels, by default [`InstructionSet::AUTO`]. A call
        /// refuses one that this machine lacks.
        instruction_set(set: InstructionSet) => instruction_set = set;
        /// Makes each result y `y * sigmoid(y)`. By default, results stay as they are.
        silu() => activation = sys::MHA_FUNCTION_SILU;
    }

    /// Starts a call on x, `[batch, rows, channels]`, that writes to `output`, of the same shape.
    /// The rows follow from the length of x. [`CausalConv`] has an example.
    pub fn call(
        &self, x: impl Into<Elements<'a>>, output: impl Into<ElementsMut<'a>>,
    ) -> CausalConvCall<'a> {
        CausalConvCall {
            conv: *self,
            batch: 1,
            rows: None,
            x: Array::of(x.into()),
            output: Output::of(output.into()),
            state: State::default(),
            options: Options::default(),
        }
    }
}

/// A call of a convolution, which [`CausalConv::call`] starts. States are `[sequences, kernel_size
/// - 1, channels]`: the rows before the first, the newest last.
#[must_use = "nothing happens before .run()"]
pub struct CausalConvCall<'a> {
    conv: CausalConv<'a>,
    batch: usize,
    rows: Option<usize>,
    x: Array<'a>,
    output: Output<'a>,
    state: State<'a>,
    options: Options<'a>,
}

impl<'a> CausalConvCall<'a> {
    state_setters!();

    setters! {
        /// Sets the strides of x, in elements: from one sequence to the next, and from one row to
        /// the next; 0 = contiguous. Needs [`rows`](Self::rows).
        x_strides(batch: usize, row: usize) => x.strides = Some(Strides { batch, row, head: 0 });
        /// Sets the strides of the output, as [`x_strides`](Self::x_strides) does. Elements between
        /// rows are not written.
        output_strides(batch: usize, row: usize) =>
            output.strides = Some(Strides { batch, row, head: 0 });
    }

    runners!();

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let conv = &self.conv;
        let [channels, kernel_size] = extents!(conv => channels, kernel_size);
        let n = self.x.rows("x", "rows", self.rows, self.batch, conv.channels)?;
        let shape = [("batch", self.batch), ("rows", n), channels];
        check_given! {
            "weights": Some(conv.weights) => [channels, kernel_size];
            "bias": conv.bias => [channels];
        }
        self.x.check("x", &shape)?;
        self.output.check("output", &shape)?;
        let of = dimensions(self.batch, n);
        self.options.check(&of)?;
        let sequences = ("sequences", self.options.sequences(&of));
        let kept = ("kernel_size - 1", conv.kernel_size.saturating_sub(1));
        self.state.check(&[sequences, kept, channels])?;
        let mut pointees = self.options.pointees(&of)?;
        pointees.connect();

        let (state, state_out) = self.state.raw();
        let args = sys::mha_causal_conv_args {
            struct_size: size_of::<sys::mha_causal_conv_args>(),
            channels: int(conv.channels),
            kernel_size: int(conv.kernel_size),
            weights: slice_ptr((!conv.weights.is_empty()).then_some(conv.weights)),
            bias: slice_ptr(conv.bias),
            activation: conv.activation,
            instruction_set: conv.instruction_set.0,
            scheduler: struct_ptr(&pointees.scheduler),
            batch: extent(self.batch),
            rows: extent(n),
            x: self.x.raw(),
            output: self.output.raw(),
            sequences: struct_ptr(&pointees.sequences),
            state,
            state_out,
        };
        let result = body(Call::CausalConv(&args));
        pointees.resume_panic();
        result
    }
}
