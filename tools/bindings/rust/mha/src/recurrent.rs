use std::mem::{size_of, zeroed};
use std::ptr::null;

use mha_sys as sys;

use crate::attention::{self, Array};
use crate::call::{runners, Call};
use crate::forward::{self, Rows};
use crate::options::{output_ptr, slice_ptr, struct_ptr, Dimensions, Options, Output};
use crate::spans::{check_exact, extent, int, Extent};
use crate::types::{Elements, ElementsMut};
use crate::{CallInfo, Gate, InstructionSet, Result, Scheduler, Strides, Workspace};

/// Attention with a recurrent state in place of a KV cache: linear attention, gated with
/// [`decay`](RecurrentCall::decay) (Mamba-2), the delta rule with [`beta`](RecurrentCall::beta),
/// and with both the gated delta rule (Qwen3-Next). A prompt at once and token by token have the
/// same bits.
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
    /// `num_v_heads` states, of `head_dim` rows and columns.
    pub fn new(num_v_heads: usize, head_dim: usize) -> Self {
        Self {
            num_q_heads: num_v_heads,
            num_k_heads: num_v_heads,
            num_v_heads,
            head_dim,
            head_dim_v: head_dim,
            decay_dim: 1,
            scale: 0.0,
            norm_epsilon: 0.0,
            beta_function: Gate::None,
            instruction_set: InstructionSet::AUTO,
        }
    }

    setters! {
        /// Query heads: a divisor or a multiple of the states. The output has as many heads as the
        /// greater of the two.
        num_q_heads: usize;
        /// Key heads, a divisor of the states.
        num_k_heads: usize;
        /// The width of a head's values, and the columns of its state.
        head_dim_v: usize;
        /// Numbers of a head's decay: 1, or `head_dim`.
        decay_dim: usize;
        /// Factor of the output; `1 / sqrt(head_dim)` if not set.
        scale: f32;
        /// If not 0, q and k are `x / sqrt(sum of x^2 + norm_epsilon)`.
        norm_epsilon: f32;
        /// [`Gate::Sigmoid`]: beta is given as it comes of a product.
        beta_function: Gate;
        /// The instruction set of the kernels; one that this machine lacks is an error, never a
        /// fallback.
        instruction_set: InstructionSet;
    }

    /// A call on q, `[batch, rows, num_q_heads, head_dim]`, k, `[batch, rows, num_k_heads,
    /// head_dim]`, and v, `[batch, rows, num_v_heads, head_dim_v]`, into `output`, `[batch, rows,
    /// max(num_q_heads, num_v_heads), head_dim_v]`. The rows follow from the length of q.
    pub fn call<'a>(
        &self, q: impl Into<Elements<'a>>, k: impl Into<Elements<'a>>, v: impl Into<Elements<'a>>,
        output: impl Into<ElementsMut<'a>>,
    ) -> RecurrentCall<'a> {
        let array = |data| Array { data: Some(data), strides: None };
        RecurrentCall {
            attention: *self,
            batch: 1,
            rows: None,
            q: array(q.into()),
            k: array(k.into()),
            v: array(v.into()),
            decay: Array::default(),
            beta: Array::default(),
            has_shared_beta: false,
            a_log: None,
            dt_bias: None,
            output: Output::of(output.into()),
            output_strides: None,
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
    is_updated: bool,
}

impl State<'_> {
    fn check(&self, shape: &[Extent]) -> Result<()> {
        self.before.map_or(Ok(()), |state| check_exact("state", state.len(), shape))?;
        self.after.as_ref().map_or(Ok(()), |state| check_exact("state_out", state.len(), shape))
    }

    fn raw(&self) -> (*const f32, *mut f32) {
        let after = output_ptr(&self.after);
        (if self.is_updated { after.cast_const() } else { slice_ptr(self.before) }, after)
    }
}

/// The setters of both calls.
macro_rules! state_setters {
    () => {
        setters! {
            /// The sequences of the arrays, 1 if not set. Packed sequences have a batch of 1.
            batch: usize;
            /// Rows per sequence. Needed only where strides are given.
            rows: usize;
        }

        setters! { @options
            /// `[sequences + 1]`: the sequences are packed, one after the other, in arrays with a
            /// batch of 1; sequence s is the rows from `cu_seqlens_q[s]` up to `cu_seqlens_q[s +
            /// 1]`.
            cu_seqlens_q: &'a [i64];
            /// `[batch]`: the valid rows; all from the first one on if not set. The others are
            /// padding, which is not read; its outputs are 0.
            q_lengths: &'a [i64];
            /// `[batch]`: the first valid row, 0 if not set: padding on the left.
            q_first_rows: &'a [i64];
            /// Threads; if not set, the call runs on the calling thread alone.
            scheduler: &'a dyn Scheduler;
        }

        /// The states before the first row; 0 if not set.
        pub fn state(mut self, state: &'a [f32]) -> Self {
            (self.state.before, self.state.is_updated) = (Some(state), false);
            self
        }

        /// Receives the states after the last row.
        pub fn state_out(mut self, state: &'a mut [f32]) -> Self {
            (self.state.after, self.state.is_updated) = (Some(Output::new(state)), false);
            self
        }

        /// The states before the first row, which become those after the last row.
        pub fn update_state(mut self, state: &'a mut [f32]) -> Self {
            self.state = State { before: None, after: Some(Output::new(state)), is_updated: true };
            self
        }
    };
}

/// A call of recurrent attention, made by [`RecurrentAttention::call`]. States are
/// `[sequences, num_v_heads, head_dim, head_dim_v]`, those of packed sequences too.
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
    has_shared_beta: bool,
    a_log: Option<&'a [f32]>,
    dt_bias: Option<&'a [f32]>,
    output: Output<'a>,
    output_strides: Option<Strides>,
    state: State<'a>,
    snapshots: Option<(usize, Output<'a>)>,
    options: Options<'a>,
}

impl<'a> RecurrentCall<'a> {
    state_setters!();

    /// The logarithm of what each row multiplies the state by, `[batch, rows, num_v_heads,
    /// decay_dim]`.
    pub fn decay(mut self, decay: impl Into<Elements<'a>>) -> Self {
        self.decay.data = Some(decay.into());
        self
    }

    /// The delta rule, with beta `[batch, rows, num_v_heads]`.
    pub fn beta(mut self, beta: impl Into<Elements<'a>>) -> Self {
        (self.beta.data, self.has_shared_beta) = (Some(beta.into()), false);
        self
    }

    /// The delta rule, with one beta for all heads, contiguous `[batch, rows]`.
    pub fn shared_beta(mut self, beta: impl Into<Elements<'a>>) -> Self {
        (self.beta.data, self.has_shared_beta) = (Some(beta.into()), true);
        self
    }

    /// Receives the states before the last row, before the last two rows and so on, `count` of them
    /// for each sequence, `[sequences, count, num_v_heads, head_dim, head_dim_v]`, to drop rejected
    /// tokens; at most 16.
    pub fn snapshots(mut self, count: usize, states: &'a mut [f32]) -> Self {
        self.snapshots = Some((count, Output::new(states)));
        self
    }

    /// Where the queries are not contiguous. Needs [`rows`](Self::rows).
    pub fn q_strides(mut self, strides: Strides) -> Self {
        self.q.strides = Some(strides);
        self
    }

    /// Where the keys are not contiguous.
    pub fn k_strides(mut self, strides: Strides) -> Self {
        self.k.strides = Some(strides);
        self
    }

    /// Where the values are not contiguous.
    pub fn v_strides(mut self, strides: Strides) -> Self {
        self.v.strides = Some(strides);
        self
    }

    /// Where the decay is not contiguous.
    pub fn decay_strides(mut self, strides: Strides) -> Self {
        self.decay.strides = Some(strides);
        self
    }

    /// Where [`beta`](Self::beta) is not contiguous.
    pub fn beta_strides(mut self, strides: Strides) -> Self {
        self.beta.strides = Some(strides);
        self
    }

    setters! {
        /// `[num_v_heads]`: decay is `-exp(a_log) * softplus(decay + dt_bias)`.
        a_log: &'a [f32];
        /// `[num_v_heads, decay_dim]`, only with [`a_log`](Self::a_log).
        dt_bias: &'a [f32];
        /// Where the output is not contiguous.
        output_strides: Strides;
    }

    runners!();

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        // as the library has it
        let or = |value: usize, default: usize| if value == 0 { default } else { value };
        let how = &self.attention;
        let k_heads = ("num_k_heads", or(how.num_k_heads, how.num_v_heads));
        let (q_heads, v_heads) =
            (("num_q_heads", or(how.num_q_heads, k_heads.1)), ("num_v_heads", how.num_v_heads));
        let (width, width_v) =
            (("head_dim", how.head_dim), ("head_dim_v", or(how.head_dim_v, how.head_dim)));
        let decay_dim = ("decay_dim", or(how.decay_dim, 1));
        let of_q = q_heads.1.saturating_mul(width.1);
        let n = attention::rows("q", "rows", self.rows, &self.q, self.batch, of_q)?;
        let (batch, rows, beta_heads) = (
            ("batch", self.batch),
            ("rows", n),
            ("heads", if self.has_shared_beta { 1 } else { v_heads.1 }),
        );
        attention::check_array("q", &self.q, &[batch, rows, q_heads, width])?;
        attention::check_array("k", &self.k, &[batch, rows, k_heads, width])?;
        attention::check_array("v", &self.v, &[batch, rows, v_heads, width_v])?;
        attention::check_array("decay", &self.decay, &[batch, rows, v_heads, decay_dim])?;
        let beta = Array {
            data: self.beta.data,
            strides: self.beta.strides.filter(|_| !self.has_shared_beta),
        };
        attention::check_array("beta", &beta, &[batch, rows, beta_heads, ("numbers", 1)])?;
        let heads = ("heads", q_heads.1.max(v_heads.1));
        attention::check_lengths(
            "output",
            self.output.len(),
            self.output_strides,
            &[batch, rows, heads, width_v],
        )?;
        self.a_log.map_or(Ok(()), |numbers| check_exact("a_log", numbers.len(), &[v_heads]))?;
        self.dt_bias.map_or(Ok(()), |numbers| {
            check_exact("dt_bias", numbers.len(), &[v_heads, decay_dim])
        })?;
        let of = dimensions(self.batch, n);
        self.options.check_slices(&of)?;
        let sequences = ("sequences", self.options.sequences(&of));
        self.state.check(&[sequences, v_heads, width, width_v])?;
        if let Some((count, states)) = &self.snapshots {
            check_exact(
                "snapshots",
                states.len(),
                &[sequences, ("count", *count), v_heads, width, width_v],
            )?;
        }
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
        (args.q, args.k, args.v) = (
            attention::raw_array(&self.q),
            attention::raw_array(&self.k),
            attention::raw_array(&self.v),
        );
        (args.decay, args.beta) = (attention::raw_array(&self.decay), attention::raw_array(&beta));
        if self.has_shared_beta {
            args.beta.strides =
                sys::mha_strides { batch: int(n.max(1)), row: 1, head: sys::MHA_BROADCAST };
        }
        args.output = self.output.raw(attention::raw_strides(self.output_strides));
        (args.state, args.state_out) = self.state.raw();
        if let Some((count, states)) = &self.snapshots {
            (args.snapshots, args.num_snapshots) = (states.start().cast(), int(*count));
        }
        let result = body(Call::Recurrent(&args));
        pointees.resume_panic();
        result
    }
}

/// What lists of sequences are checked against.
fn dimensions(batch: usize, rows: usize) -> Dimensions {
    Dimensions {
        batch,
        n_q: rows,
        n_kv: 0,
        is_self: true,
        num_heads: 0,
        num_kv_heads: 0,
        head_dim: 0,
        head_dim_v: 0,
    }
}

/// A depthwise causal convolution: each channel of a row is the sum of its last rows, times
/// weights. Cut anywhere, it has the same bits.
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
    /// With weights `[channels, kernel_size]`; the kernel's size is 2 to 8.
    pub fn new(channels: usize, kernel_size: usize, weights: &'a [f32]) -> Self {
        let (activation, instruction_set) = (sys::MHA_ACTIVATION_NONE, InstructionSet::AUTO);
        Self { channels, kernel_size, weights, bias: None, activation, instruction_set }
    }

    setters! {
        /// `[channels]`.
        bias: &'a [f32];
        /// The instruction set of the kernels; one that this machine lacks is an error, never a
        /// fallback.
        instruction_set: InstructionSet;
    }

    /// Each result y becomes `y * sigmoid(y)`.
    pub fn silu(mut self) -> Self {
        self.activation = sys::MHA_ACTIVATION_SILU;
        self
    }

    /// A call on x, `[batch, rows, channels]`, into `output`, of the same shape. The rows follow
    /// from the length of x.
    pub fn call(
        &self, x: impl Into<Elements<'a>>, output: impl Into<ElementsMut<'a>>,
    ) -> CausalConvCall<'a> {
        CausalConvCall {
            conv: *self,
            batch: 1,
            rows: None,
            x: Rows { data: Some(x.into()), strides: None },
            output: Output::of(output.into()),
            output_strides: None,
            state: State::default(),
            options: Options::default(),
        }
    }
}

/// A call of a convolution, made by [`CausalConv::call`]. States are `[sequences, kernel_size - 1,
/// channels]`: the rows before the first, the newest last.
#[must_use = "nothing happens before .run()"]
pub struct CausalConvCall<'a> {
    conv: CausalConv<'a>,
    batch: usize,
    rows: Option<usize>,
    x: Rows<'a>,
    output: Output<'a>,
    output_strides: Option<[usize; 2]>,
    state: State<'a>,
    options: Options<'a>,
}

impl<'a> CausalConvCall<'a> {
    state_setters!();

    /// Elements from one sequence of x to the next, and from one row to the next; 0 = contiguous.
    /// Needs [`rows`](Self::rows).
    pub fn x_strides(mut self, batch: usize, row: usize) -> Self {
        self.x.strides = Some([batch, row]);
        self
    }

    /// Likewise of the output.
    pub fn output_strides(mut self, batch: usize, row: usize) -> Self {
        self.output_strides = Some([batch, row]);
        self
    }

    runners!();

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let conv = &self.conv;
        let (channels, kernel_size) =
            (("channels", conv.channels), ("kernel_size", conv.kernel_size));
        check_exact("weights", conv.weights.len(), &[channels, kernel_size])?;
        conv.bias.map_or(Ok(()), |numbers| check_exact("bias", numbers.len(), &[channels]))?;
        let n = match self.rows {
            Some(rows) => rows,
            None => forward::rows("x", "rows", &self.x, self.batch, conv.channels)?,
        };
        let shape = [("batch", self.batch), ("rows", n), channels];
        forward::check_rows("x", &self.x, &shape)?;
        forward::check_lengths("output", self.output.len(), self.output_strides, &shape)?;
        let of = dimensions(self.batch, n);
        self.options.check_slices(&of)?;
        let of_state = [
            ("sequences", self.options.sequences(&of)),
            ("kernel_size - 1", conv.kernel_size.saturating_sub(1)),
            channels,
        ];
        self.state.check(&of_state)?;
        let mut pointees = self.options.pointees(&of)?;
        pointees.connect();

        let (state, state_out) = self.state.raw();
        let args = sys::mha_causal_conv_args {
            struct_size: size_of::<sys::mha_causal_conv_args>(),
            channels: int(conv.channels),
            kernel_size: int(conv.kernel_size),
            weights: if conv.weights.is_empty() { null() } else { conv.weights.as_ptr() },
            bias: slice_ptr(conv.bias),
            activation: conv.activation,
            instruction_set: conv.instruction_set.0,
            scheduler: struct_ptr(&pointees.scheduler),
            batch: extent(self.batch),
            rows: extent(n),
            x: forward::raw_rows(&self.x),
            output: self.output.raw(forward::raw_strides(self.output_strides)),
            sequences: struct_ptr(&pointees.sequences),
            state,
            state_out,
        };
        let result = body(Call::CausalConv(&args));
        pointees.resume_panic();
        result
    }
}
