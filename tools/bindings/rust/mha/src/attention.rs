use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};

use mha_sys as sys;

use crate::call::{runners, Call};
use crate::error::check;
use crate::options::{
    common_setters, fill_common, no_outputs, output_ptr, raw_input, struct_ptr, Dimensions,
    Options, Output,
};
use crate::spans::{check_exact, check_strided, extent, int, rows_of, Extent};
use crate::types::{Elements, ElementsMut};
use crate::{
    CallInfo, Error, ErrorKind, InstructionSet, KvCache, Norm, Outputs, Result, Rope, Scheduler,
    ScoreOptions, Workspace,
};

/// The middle stage alone, without the projections: `softmax(scale * Q K^T) V` for each head, on
/// queries, keys and values of the caller's.
///
/// ```
/// use mha::{Attention, Workspace};
///
/// let attention = Attention::new(2, 4); // two heads of width 4
/// let (q, k, v) = ([1.0; 2 * 8], [1.0; 3 * 8], [0.5; 3 * 8]);
/// let mut output = [0.0; 2 * 8];
/// attention.call(&q, &mut output).key_value(&k, &v).run(&mut Workspace::new())?;
/// assert_eq!(output, [0.5; 16]);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    head_dim_v: usize,
    scale: f32,
    instruction_set: InstructionSet,
}

impl Attention {
    /// `num_heads` heads, whose queries and keys are `head_dim` wide.
    pub fn new(num_heads: usize, head_dim: usize) -> Self {
        Self {
            num_heads,
            num_kv_heads: num_heads,
            head_dim,
            head_dim_v: head_dim,
            scale: 0.0,
            instruction_set: InstructionSet::AUTO,
        }
    }

    setters! {
        /// Key and value heads, a divisor of the heads (grouped-query attention).
        num_kv_heads: usize;
        /// The width of a head's values.
        head_dim_v: usize;
        /// Factor of the scores; `1 / sqrt(head_dim)` if not set.
        scale: f32;
        /// The instruction set of the kernels; one that this machine lacks is an error, never a
        /// fallback.
        instruction_set: InstructionSet;
    }

    /// A call that attends with the queries `q`, `[batch, n_q, num_heads, head_dim]`, into
    /// `output`, `[batch, n_q, num_heads, head_dim_v]`. `n_q` follows from the length of `q`. The
    /// keys and values come from [`AttentionCall::key_value`], a cache, or both.
    /// [`key_value`](AttentionCall::key_value) is needed, possibly with empty slices, unless there
    /// is a [`cache_read`](AttentionCall::cache_read) or an [`n_kv`](AttentionCall::n_kv) of 0 says
    /// that no keys come with the call.
    pub fn call<'a>(
        &self, q: impl Into<Elements<'a>>, output: impl Into<ElementsMut<'a>>,
    ) -> AttentionCall<'a> {
        AttentionCall {
            attention: *self,
            batch: 1,
            n_q: None,
            n_kv: None,
            q: Array { data: Some(q.into()), strides: None },
            k: Array::default(),
            v: Array::default(),
            output: Output::of(output.into()),
            has_states: false,
            output_strides: None,
            kv_first_position: 0,
            choice: None,
            options: Options::default(),
        }
    }

    /// A call that chooses for each query the `num_chosen` keys with the greatest index scores, the
    /// sum over heads of `weights`, `[batch, n_q, num_heads]`, times `max(0, scale * q k^T)`.
    /// `chosen`, `[batch, n_q, num_chosen]`, receives their positions, ascending, then -1. The
    /// keys, of one head, come from [`AttentionCall::key`], a cache, or both. Values and outputs of
    /// attention are refused, as is [`AttentionCall::info`].
    ///
    /// ```
    /// use mha::{Attention, Workspace};
    ///
    /// let (q, k, mut chosen) = ([1.0], [3.0, 1.0, 5.0], [0; 2]);
    /// Attention::new(1, 1)
    ///     .choose_keys(&q, &[1.0], 2, &mut chosen)
    ///     .key(&k)
    ///     .run(&mut Workspace::new())?;
    /// assert_eq!(chosen, [0, 2]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn choose_keys<'a>(
        &self, q: impl Into<Elements<'a>>, weights: &'a [f32], num_chosen: usize,
        chosen: &'a mut [i32],
    ) -> AttentionCall<'a> {
        let nothing: &mut [f32] = &mut [];
        let mut call = self.num_kv_heads(1).call(q, nothing);
        call.choice = Some(Choice {
            weights,
            num_chosen,
            chosen: Output::of_keys(chosen),
            index_scores: None,
        });
        call
    }

    /// A call over a part of the keys, the others being elsewhere: it writes states, `[batch,
    /// num_heads, n_q, head_dim_v + 2]`, for [`states_merge`] and
    /// [`finish_states`](Self::finish_states).
    pub fn call_states<'a>(
        &self, q: impl Into<Elements<'a>>, states: &'a mut [f32],
    ) -> AttentionCall<'a> {
        AttentionCall { has_states: true, ..self.call(q, states) }
    }

    /// Makes rows of context, `[batch, n_q, num_heads, head_dim_v]`, of states over all keys, and
    /// their `lse`, `[batch, num_heads, n_q]`. `sinks` and `head_scales`, `[num_heads]`, are as in
    /// [`ScoreOptions`].
    pub fn finish_states<'a>(
        &self, batch: usize, states: &[f32], sinks: Option<&[f32]>, head_scales: Option<&[f32]>,
        output: impl Into<ElementsMut<'a>>, lse: &mut [f32],
    ) -> Result<()> {
        let (heads, width) =
            (self.num_heads, if self.head_dim_v == 0 { self.head_dim } else { self.head_dim_v });
        let n_q =
            rows_of("states", states.len(), batch, heads.saturating_mul(width.saturating_add(2)))?;
        let (rows, of_heads) = ([("batch", batch), ("n_q", n_q)], ("num_heads", heads));
        let output = Output::of(output.into());
        check_exact("output", output.len(), &[rows[0], rows[1], of_heads, ("head_dim_v", width)])?;
        check_exact("lse", lse.len(), &[rows[0], of_heads, rows[1]])?;
        for (name, numbers) in [("sinks", sinks), ("head_scales", head_scales)] {
            check_exact(name, numbers.map_or(heads, <[f32]>::len), &[of_heads])?;
        }
        let args = sys::mha_states_args {
            struct_size: size_of::<sys::mha_states_args>(),
            batch: extent(batch),
            num_heads: int(heads),
            n_q: extent(n_q),
            head_dim_v: int(width),
            instruction_set: self.instruction_set.0,
            reserved: 0,
            states: states.as_ptr(),
            sinks: sinks.map_or(null(), <[f32]>::as_ptr),
            head_scales: head_scales.map_or(null(), <[f32]>::as_ptr),
            output: output.raw(raw_strides(None)),
            lse: lse.as_mut_ptr(),
        };
        // SAFETY: slices of the shapes that the struct says.
        check(|error| unsafe { sys::mha_states_finish(&args, error) })
    }
}

/// Joins the states of two neighbouring parts of the keys, which [`Attention::call_states`] has
/// written, in `left`, the earlier one.
///
/// ```
/// use mha::{states_merge, Attention, Workspace};
///
/// let attention = Attention::new(1, 1);
/// let (mut left, mut right, mut output, mut lse) = ([0.0; 3], [0.0; 3], [0.0], [0.0]);
/// attention.call_states(&[1.0], &mut left).key_value(&[0.5], &[4.0]).run(&mut Workspace::new())?;
/// attention
///     .call_states(&[1.0], &mut right)
///     .key_value(&[0.5], &[8.0])
///     .kv_first_position(1usize)
///     .run(&mut Workspace::new())?;
/// states_merge(1, &mut left, &right)?;
/// attention.finish_states(1, &left, None, None, &mut output, &mut lse)?;
/// assert_eq!(output, [6.0]); // equal weights
/// # Ok::<(), mha::Error>(())
/// ```
pub fn states_merge(head_dim_v: usize, left: &mut [f32], right: &[f32]) -> Result<()> {
    let rows = rows_of("left", left.len(), 1, head_dim_v.saturating_add(2))?;
    check_exact(
        "right",
        right.len(),
        &[("rows", rows), ("head_dim_v + 2", head_dim_v.saturating_add(2))],
    )?;
    let to = left.as_mut_ptr();
    // SAFETY: states of this many rows; the result may be the left ones.
    check(|error| unsafe {
        sys::mha_states_merge(extent(rows), int(head_dim_v), to, right.as_ptr(), to, 0, error)
    })
}

/// Elements from one sequence, row and head of an array to the next; 0 = contiguous `[batch, n,
/// heads, width]`. If `head` is set, `row` must be set too, and `batch` for more than one sequence.
/// A stride must step over all that the strides of 0 inside it span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Strides {
    pub batch: usize,
    pub row: usize,
    pub head: usize,
}

impl Strides {
    /// Those of `[batch, heads, n, width]`.
    pub fn heads_first(heads: usize, n: usize, width: usize) -> Self {
        let head = n.saturating_mul(width); // a call refuses what is too large
        Self { batch: heads.saturating_mul(head), row: width, head }
    }
}

/// A call of attention alone, made by [`Attention::call`]: say what it is to do, then
/// [`run`](Self::run) it.
#[must_use = "nothing happens before .run()"]
pub struct AttentionCall<'a> {
    attention: Attention,
    batch: usize,
    n_q: Option<usize>,
    n_kv: Option<usize>,
    q: Array<'a>,
    k: Array<'a>,
    v: Array<'a>,
    output: Output<'a>, // or states
    has_states: bool,
    output_strides: Option<Strides>,
    kv_first_position: usize,
    choice: Option<Choice<'a>>,
    options: Options<'a>,
}

/// What a call that chooses keys has beside its queries and keys.
struct Choice<'a> {
    weights: &'a [f32],
    num_chosen: usize,
    chosen: Output<'a>,
    index_scores: Option<Output<'a>>,
}

/// Heads of input rows, where they are given.
#[derive(Default)]
pub(crate) struct Array<'a> {
    pub data: Option<Elements<'a>>,
    pub strides: Option<Strides>,
}

impl<'a> AttentionCall<'a> {
    /// The keys, `[batch, n_kv, num_kv_heads, head_dim]`, and values, `[batch, n_kv, num_kv_heads,
    /// head_dim_v]`: slices of `f32`, or f16 and bf16 as [`Elements`]. With a cache, they are
    /// appended.
    pub fn key_value(mut self, k: impl Into<Elements<'a>>, v: impl Into<Elements<'a>>) -> Self {
        self.k.data = Some(k.into());
        self.v.data = Some(v.into());
        self
    }

    /// The keys alone, for a cache whose [values are in the
    /// keys](crate::CacheConfig::values_in_keys).
    pub fn key(mut self, k: impl Into<Elements<'a>>) -> Self {
        self.k.data = Some(k.into());
        self
    }

    /// An optional output of [`Attention::choose_keys`], `[batch, n_q, n_kv]`: the scores,
    /// -infinity of keys that may not be chosen. `n_kv` is as in
    /// [`attention_weights`](Self::attention_weights).
    pub fn index_scores(mut self, scores: &'a mut [f32]) -> Self {
        if let Some(choice) = &mut self.choice {
            choice.index_scores = Some(Output::new(scores));
        }
        self
    }

    /// Where the queries are not contiguous. Needs [`n_q`](Self::n_q).
    pub fn q_strides(mut self, strides: Strides) -> Self {
        self.q.strides = Some(strides);
        self
    }

    /// Where the keys are not contiguous. Needs [`n_kv`](Self::n_kv).
    pub fn k_strides(mut self, strides: Strides) -> Self {
        self.k.strides = Some(strides);
        self
    }

    /// Where the values are not contiguous.
    pub fn v_strides(mut self, strides: Strides) -> Self {
        self.v.strides = Some(strides);
        self
    }

    setters! {
        /// Where the output is not contiguous.
        output_strides: Strides;
        /// The position of every sequence's first key, of the call or of its cache, where earlier
        /// ones are elsewhere.
        kv_first_position: usize;
    }

    common_setters!();

    runners!();

    fn dimensions(&self) -> Result<Dimensions> {
        let Attention { num_heads, num_kv_heads, head_dim, head_dim_v, .. } = self.attention;
        // as the library has it
        let or = |value: usize, default: usize| if value == 0 { default } else { value };
        let (num_kv_heads, head_dim_v) = (or(num_kv_heads, num_heads), or(head_dim_v, head_dim));
        self.options.check_one_cache()?;
        if self.k.data.is_none() && self.n_kv.is_none() && !self.options.only_reads_cache() {
            let keys = if self.choice.is_some() { "key" } else { "key_value" };
            let message = format!(
                "{keys} is not given; give it, or cache_read to attend to a \
                cache alone, or set n_kv to 0 for no keys"
            );
            return Err(Error::new(ErrorKind::NullPointer, message));
        }
        let n_q =
            rows("q", "n_q", self.n_q, &self.q, self.batch, num_heads.saturating_mul(head_dim))?;
        let n_kv = rows(
            "k",
            "n_kv",
            self.n_kv,
            &self.k,
            self.batch,
            num_kv_heads.saturating_mul(head_dim),
        )?;
        if self.options.only_reads_cache() && n_kv != 0 {
            let message = "a cache that is only read takes no keys and values; give it by cache() \
                to append them";
            return Err(Error::new(ErrorKind::InvalidValue, message));
        }
        Ok(Dimensions {
            batch: self.batch,
            n_q,
            n_kv,
            is_self: false,
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim_v,
        })
    }

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let of = self.dimensions()?;
        let (batch, n_q, n_kv) = (("batch", of.batch), ("n_q", of.n_q), ("n_kv", of.n_kv));
        let (heads, kv_heads) = (("num_heads", of.num_heads), ("num_kv_heads", of.num_kv_heads));
        let (width, width_v) = (("head_dim", of.head_dim), ("head_dim_v", of.head_dim_v));
        check_array("q", &self.q, &[batch, n_q, heads, width])?;
        check_array("k", &self.k, &[batch, n_kv, kv_heads, width])?;
        check_array("v", &self.v, &[batch, n_kv, kv_heads, width_v])?;
        if self.has_states {
            check_exact(
                "states",
                self.output.len(),
                &[batch, heads, n_q, ("head_dim_v + 2", of.head_dim_v.saturating_add(2))],
            )?;
        } else if let Some(choice) = &self.choice {
            check_exact("weights", choice.weights.len(), &[batch, n_q, heads])?;
            check_exact(
                "chosen",
                choice.chosen.len(),
                &[batch, n_q, ("num_chosen", choice.num_chosen)],
            )?;
            if let Some(scores) = &choice.index_scores {
                check_exact(
                    "index_scores",
                    scores.len(),
                    &[batch, n_q, ("n_kv", self.options.attended_keys(&of)?)],
                )?;
            }
        } else {
            check_lengths(
                "output",
                self.output.len(),
                self.output_strides,
                &[batch, n_q, heads, width_v],
            )?;
        }
        self.options.check_slices(&of)?;
        let mut pointees = self.options.pointees(&of)?;
        pointees.connect();

        // SAFETY: numbers and pointers that may be NULL.
        let mut args: sys::mha_attention_args = unsafe { zeroed() };
        fill_common!(args, self.options, pointees, of);
        (args.num_heads, args.num_kv_heads) = (int(of.num_heads), int(of.num_kv_heads));
        (args.head_dim, args.head_dim_v) = (int(of.head_dim), int(of.head_dim_v));
        (args.scale, args.instruction_set) =
            (self.attention.scale, self.attention.instruction_set.0);
        (args.q, args.k, args.v) = (raw_array(&self.q), raw_array(&self.k), raw_array(&self.v));
        args.output = self.output.raw(raw_strides(self.output_strides));
        args.kv_first_position = int(self.kv_first_position);
        let mut outputs = pointees.outputs.unwrap_or_else(no_outputs);
        if self.has_states || self.choice.is_some() {
            (args.output.data, args.output.type_) = (null_mut(), 0);
        }
        if self.has_states {
            outputs.states = self.output.start().cast();
            args.outputs = &outputs;
        }
        let result = match &self.choice {
            None => body(Call::Attention(&args)),
            Some(choice) => {
                // SAFETY: as above.
                let mut chooses: sys::mha_choose_keys_args = unsafe { zeroed() };
                chooses.struct_size = std::mem::size_of_val(&chooses);
                chooses.attention = &args;
                chooses.weights = raw_input(Some(choice.weights.into()), raw_strides(None));
                chooses.num_chosen = int(choice.num_chosen);
                chooses.chosen_keys = choice.chosen.start().cast();
                chooses.index_scores = output_ptr(&choice.index_scores);
                body(Call::ChooseKeys(&chooses))
            }
        };
        pointees.resume_panic();
        result
    }
}

/// The rows of each sequence, as they were given or as the length of a contiguous array says; 0
/// without an array.
pub(crate) fn rows(
    name: &str, count: &str, given: Option<usize>, array: &Array, batch: usize, width: usize,
) -> Result<usize> {
    match (given, array) {
        (Some(given), _) => Ok(given),
        (None, Array { data: None, .. }) => Ok(0),
        (None, Array { data: Some(data), strides: None }) => {
            rows_of(name, data.len(), batch, width)
        }
        (None, _) => Err(Error::new(
            ErrorKind::InvalidValue,
            format!("{name} has strides, so that its length does not tell the rows; set {count}"),
        )),
    }
}

pub(crate) fn check_array(name: &str, array: &Array, shape: &[Extent; 4]) -> Result<()> {
    match &array.data {
        Some(data) => check_lengths(name, data.len(), array.strides, shape),
        None => Ok(()),
    }
}

pub(crate) fn check_lengths(
    name: &str, len: usize, strides: Option<Strides>, shape: &[Extent; 4],
) -> Result<()> {
    let Some(Strides { batch, row, head }) = strides else { return check_exact(name, len, shape) };
    let [_, (_, n), (_, heads), (_, width)] = *shape;
    let head = if head == 0 { width } else { head };
    let row = if row == 0 { heads.saturating_mul(head) } else { row };
    let batch = if batch == 0 { n.saturating_mul(row) } else { batch };
    check_strided(name, len, shape, &[batch, row, head])
}

pub(crate) fn raw_strides(strides: Option<Strides>) -> sys::mha_strides {
    let Strides { batch, row, head } = strides.unwrap_or_default();
    sys::mha_strides { batch: int(batch), row: int(row), head: int(head) }
}

pub(crate) fn raw_array(array: &Array) -> sys::mha_input {
    raw_input(array.data, raw_strides(array.strides))
}
