use std::mem::{size_of, zeroed};
use std::ptr::null_mut;

use mha_sys as sys;

use crate::arrays::{output_ptr, slice_ptr, struct_ptr, Array, Output};
use crate::call::{runners, Call};
use crate::error::{check, needs, only_one};
use crate::options::{common_setters, fill_common, no_outputs, Cache, Dimensions, Options};
use crate::spans::{extent, int, or, rows_of};
use crate::types::{Elements, ElementsMut};
use crate::{
    Arithmetic, BlockTables, CallInfo, Error, ErrorKind, InstructionSet, KvCache, KvPool, Norm,
    Outputs, Result, Rope, Scheduler, ScoreOptions, Workspace,
};

/// Attention without projections: `softmax(scale * q k^T) v` for each head, on the caller's
/// queries, keys and values. The struct describes the heads; a call begins with
/// [`call`](Self::call).
///
/// # Examples
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
    /// Describes `num_heads` query heads, each at least 1, whose queries and keys have `head_dim`
    /// elements, at least 1. A call checks the numbers.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::Attention;
    ///
    /// // Llama 3 8B: 32 query heads share 8 key and value heads.
    /// let attention = Attention::new(32, 128).num_kv_heads(8);
    /// # let _ = attention;
    /// ```
    pub fn new(num_heads: usize, head_dim: usize) -> Self {
        Self {
            num_heads,
            num_kv_heads: 0,
            head_dim,
            head_dim_v: 0,
            scale: 0.0,
            instruction_set: InstructionSet::AUTO,
        }
    }

    setters! {
        /// Sets the number of key and value heads, a divisor of the query heads (grouped-query
        /// attention); 0, the default, is as many as there are query heads.
        num_kv_heads(heads: usize) => num_kv_heads = heads;
        /// Sets the width of a head's values; 0, the default, is `head_dim`.
        head_dim_v(width: usize) => head_dim_v = width;
        /// Sets the factor of the scores, a finite number; 0, the default, is `1 /
        /// sqrt(head_dim)`.
        scale(factor: f32) => scale = factor;
        /// Sets the instruction set of the kernels, by default [`InstructionSet::AUTO`]. A call
        /// refuses one that this machine lacks.
        instruction_set(set: InstructionSet) => instruction_set = set;
    }

    /// Starts a call that attends with the queries `q`, `[batch, n_q, num_heads, head_dim]`, and
    /// writes to `output`, `[batch, n_q, num_heads, head_dim_v]`. Both are slices, arrays or
    /// vectors of `f32`, or [`Elements`] and [`ElementsMut`] of 16 bits. `n_q` follows from the
    /// length of `q`.
    ///
    /// Keys and values come from [`AttentionCall::key_value`], a cache, or both. A call without
    /// keys of its own needs [`cache_read`](AttentionCall::cache_read), or an
    /// [`n_kv`](AttentionCall::n_kv) of 0.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{Attention, Workspace};
    ///
    /// // Two sequences of one query each, with three keys each.
    /// let (q, k, v, mut output) = ([1.0; 2 * 4], [1.0; 6 * 4], [0.5; 6 * 4], [0.0; 2 * 4]);
    /// let call = Attention::new(1, 4).call(&q, &mut output).batch(2).key_value(&k, &v);
    /// call.causal().run(&mut Workspace::new())?;
    /// assert_eq!(output, [0.5; 8]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn call<'a>(
        &self, q: impl Into<Elements<'a>>, output: impl Into<ElementsMut<'a>>,
    ) -> AttentionCall<'a> {
        AttentionCall {
            attention: *self,
            batch: 1,
            n_q: None,
            n_kv: None,
            q: Array::of(q.into()),
            k: Array::default(),
            v: Array::default(),
            key: None,
            output: Output::of(output.into()),
            has_partials: false,
            index_scores: None,
            kv_first_position: 0,
            choice: None,
            options: Options::default(),
        }
    }

    /// Starts a call that chooses for each query the `num_chosen` keys with the greatest index
    /// scores: the sum over heads of `weights`, `[batch, n_q, num_heads]`, times `max(0, scale * q
    /// k^T)`. `chosen`, `[batch, n_q, num_chosen]`, receives their positions, ascending, then -1.
    ///
    /// All heads share one key head: the keys come from [`AttentionCall::key`], a cache, or both.
    /// Such a call refuses [`num_kv_heads`](Self::num_kv_heads) of more than 1, values and their
    /// [`head_dim_v`](Self::head_dim_v), outputs of attention, score options, and
    /// [`AttentionCall::info`].
    ///
    /// # Examples
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
        let one_head = Self { num_kv_heads: or(self.num_kv_heads, 1), ..*self };
        let mut call = one_head.call(q, nothing);
        call.choice = Some(Choice { weights, num_chosen, chosen: Output::of_keys(chosen) });
        call
    }

    /// Starts a call over a part of the keys, the others being elsewhere. It writes partials,
    /// `[batch, num_heads, n_q, head_dim_v + 2]`, for [`partials_merge`] and
    /// [`finish_partials`](Self::finish_partials), and takes no other outputs, no sinks and no head
    /// scales. [`partials_merge`] has an example.
    pub fn call_partials<'a>(
        &self, q: impl Into<Elements<'a>>, partials: &'a mut [f32],
    ) -> AttentionCall<'a> {
        AttentionCall { has_partials: true, ..self.call(q, partials) }
    }

    /// Computes rows of context, `[batch, n_q, num_heads, head_dim_v]`, from partials over all
    /// keys, `[batch, num_heads, n_q, head_dim_v + 2]`, and their `lse`, `[batch, num_heads, n_q]`,
    /// on the calling thread. `sinks` and `head_scales`, `[num_heads]`, are as in [`ScoreOptions`];
    /// None = none. [`partials_merge`] has an example.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::SliceLength`] for a slice that does not have its shape, and
    /// [`ErrorKind::InvalidValue`] for a dimension that is 0.
    pub fn finish_partials<'a>(
        &self, batch: usize, partials: &[f32], sinks: Option<&[f32]>, head_scales: Option<&[f32]>,
        output: impl Into<ElementsMut<'a>>, lse: &mut [f32],
    ) -> Result<()> {
        let width = or(self.head_dim_v, self.head_dim);
        let row = self.num_heads.saturating_mul(width.saturating_add(2));
        let n_q = rows_of("partials", partials.len(), batch, row)?;
        let [heads] = extents!(self => num_heads);
        let (batch, n_q, width) = (("batch", batch), ("n_q", n_q), ("head_dim_v", width));
        let output = Output::of(output.into());
        output.check("output", &[batch, n_q, heads, width])?;
        check_given! {
            "lse": Some(&*lse) => [batch, heads, n_q];
            "sinks": sinks => [heads];
            "head_scales": head_scales => [heads];
        }
        let args = sys::mha_partials_args {
            struct_size: size_of::<sys::mha_partials_args>(),
            batch: extent(batch.1),
            num_heads: int(heads.1),
            n_q: extent(n_q.1),
            head_dim_v: int(width.1),
            instruction_set: self.instruction_set.0,
            reserved: 0,
            partials: partials.as_ptr(),
            sinks: slice_ptr(sinks),
            head_scales: slice_ptr(head_scales),
            output: output.raw(),
            lse: lse.as_mut_ptr(),
        };
        // SAFETY: slices of the shapes that the struct says.
        check(|error| unsafe { sys::mha_partials_finish(&args, error) })
    }
}

/// Joins the partials of two neighbouring parts of the keys, both `[rows, head_dim_v + 2]` as
/// [`Attention::call_partials`] has written them. `left` has the earlier keys, and receives the
/// result.
///
/// # Errors
///
/// [`ErrorKind::SliceLength`] if `left` has no whole rows, or `right` has another length.
///
/// # Examples
///
/// ```
/// use mha::{partials_merge, Attention, Workspace};
///
/// let attention = Attention::new(1, 1);
/// let (mut left, mut right, mut output, mut lse) = ([0.0; 3], [0.0; 3], [0.0], [0.0]);
/// let mut workspace = Workspace::new();
/// attention.call_partials(&[1.0], &mut left).key_value(&[0.5], &[4.0]).run(&mut workspace)?;
/// attention
///     .call_partials(&[1.0], &mut right)
///     .key_value(&[0.5], &[8.0])
///     .kv_first_position(1)
///     .run(&mut Workspace::new())?;
/// partials_merge(1, &mut left, &right)?;
/// attention.finish_partials(1, &left, None, None, &mut output, &mut lse)?;
/// assert_eq!(output, [6.0]); // equal weights
/// # Ok::<(), mha::Error>(())
/// ```
pub fn partials_merge(head_dim_v: usize, left: &mut [f32], right: &[f32]) -> Result<()> {
    let width = ("head_dim_v + 2", head_dim_v.saturating_add(2));
    let rows = rows_of("left", left.len(), 1, width.1)?;
    check_given!("right": Some(right) => [("rows", rows), width];);
    let to = left.as_mut_ptr();
    // SAFETY: partials of this many rows; the result may be the left ones.
    check(|error| unsafe {
        sys::mha_partials_merge(extent(rows), int(head_dim_v), to, right.as_ptr(), to, 0, error)
    })
}

/// The strides of an array of heads, in elements: from one sequence, row and head to the next. 0 is
/// the stride of a contiguous array `[batch, n, heads, width]`, which steps over all that is inside
/// it. If `head` is set, `row` must be set too, and `batch` for more than one sequence.
///
/// # Examples
///
/// ```
/// use mha::Strides;
///
/// // The queries in the rows of a fused array [batch, n, 3 * 512].
/// let of_queries = Strides { row: 3 * 512, ..Strides::default() };
/// # let _ = of_queries;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Strides {
    /// From one sequence to the next.
    pub batch: usize,
    /// From one row to the next.
    pub row: usize,
    /// From one head to the next.
    pub head: usize,
}

impl Strides {
    /// Returns the strides of an array `[batch, heads, n, width]`.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::Strides;
    ///
    /// assert_eq!(Strides::heads_first(2, 10, 64), Strides { batch: 1280, row: 64, head: 640 });
    /// ```
    pub fn heads_first(heads: usize, n: usize, width: usize) -> Self {
        let head = n.saturating_mul(width); // a call refuses what is too large
        Self { batch: heads.saturating_mul(head), row: width, head }
    }
}

/// A call of attention alone, which [`Attention::call`] starts: say what it is to do, then
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
    key: Option<Elements<'a>>, // without values
    output: Output<'a>,        // or partials
    has_partials: bool,
    index_scores: Option<Output<'a>>,
    kv_first_position: usize,
    choice: Option<Choice<'a>>,
    options: Options<'a>,
}

/// What a call that chooses keys has beside its queries and keys.
struct Choice<'a> {
    weights: &'a [f32],
    num_chosen: usize,
    chosen: Output<'a>,
}

impl<'a> AttentionCall<'a> {
    setters! {
        /// Gives the keys, `[batch, n_kv, num_kv_heads, head_dim]`, and the values, `[batch, n_kv,
        /// num_kv_heads, head_dim_v]`: slices, arrays or vectors of `f32`, or [`Elements`] of 16
        /// bits. With a cache, they are appended.
        key_value(k: impl Into<Elements<'a>>, v: impl Into<Elements<'a>>) =>
            k.data = Some(k.into()), v.data = Some(v.into());
        /// Gives the keys alone, `[batch, n_kv, num_kv_heads, head_dim]`, for
        /// [`Attention::choose_keys`] and for a cache whose [values are in the
        /// keys](crate::CacheConfig::values_in_keys).
        key(k: impl Into<Elements<'a>>) => key = Some(k.into());
        /// Receives the index scores of [`Attention::choose_keys`], `[batch, n_q, n_kv]`;
        /// -infinity for keys that may not be chosen. `n_kv` is as in
        /// [`attention_weights`](Self::attention_weights). Other calls refuse it.
        index_scores(scores: &'a mut [f32]) => index_scores = Some(Output::new(scores));
        /// Sets the strides of the queries. Needs [`n_q`](Self::n_q).
        q_strides(strides: Strides) => q.strides = Some(strides);
        /// Sets the strides of the keys. Needs [`n_kv`](Self::n_kv).
        k_strides(strides: Strides) => k.strides = Some(strides);
        /// Sets the strides of the values.
        v_strides(strides: Strides) => v.strides = Some(strides);
        /// Sets the strides of the output. Elements between rows and heads are not written.
        output_strides(strides: Strides) => output.strides = Some(strides);
        /// Sets the position of every sequence's first key, of the call or of its cache, where
        /// earlier keys are elsewhere ([`Attention::call_partials`]); by default 0.
        kv_first_position(position: usize) => kv_first_position = position;
    }

    common_setters!();

    runners!();

    /// The keys, with or without values.
    fn keys(&self) -> Array<'a> {
        Array { data: self.k.data.or(self.key), ..self.k }
    }

    fn dimensions(&self) -> Result<Dimensions> {
        let Attention { num_heads, num_kv_heads, head_dim, head_dim_v, .. } = self.attention;
        let (num_kv_heads, head_dim_v) = (or(num_kv_heads, num_heads), or(head_dim_v, head_dim));
        self.options.check_one_cache()?;
        only_one(("key", self.key.is_some()), ("key_value", self.v.data.is_some()))?;
        let keys = self.keys();
        if keys.data.is_none() && self.n_kv.is_none() && !self.options.only_reads_cache() {
            let keys = if self.choice.is_some() { "key" } else { "key_value" };
            let message = format!(
                "{keys} is not given; give it, or cache_read to attend to a cache alone, or set \
                 n_kv to 0 for no keys"
            );
            return Err(Error::new(ErrorKind::NullPointer, message));
        }
        let batch = self.batch;
        let n_q = self.q.rows("q", "n_q", self.n_q, batch, num_heads.saturating_mul(head_dim))?;
        let of_keys = num_kv_heads.saturating_mul(head_dim);
        let n_kv = keys.rows("k", "n_kv", self.n_kv, batch, of_keys)?;
        if self.options.only_reads_cache() && n_kv != 0 {
            let message = "a cache that is only read takes no keys and values; give it by cache() \
                to append them";
            return Err(Error::new(ErrorKind::InvalidValue, message));
        }
        let is_self = false;
        Ok(Dimensions { batch, n_q, n_kv, is_self, num_heads, num_kv_heads, head_dim, head_dim_v })
    }

    /// Checks all slices, and calls `body` with what the library takes.
    fn with_args<R>(&self, body: impl FnOnce(Call<'_>) -> Result<R>) -> Result<R> {
        let of = self.dimensions()?;
        let [batch, n_q, n_kv] = extents!(of => batch, n_q, n_kv);
        let [heads, kv_heads] = extents!(of => num_heads, num_kv_heads);
        let [width, width_v] = extents!(of => head_dim, head_dim_v);
        self.options.check(&of)?;
        let keys = self.keys();
        self.q.check("q", &[batch, n_q, heads, width])?;
        keys.check("k", &[batch, n_kv, kv_heads, width])?;
        self.v.check("v", &[batch, n_kv, kv_heads, width_v])?;
        if self.has_partials {
            let of_row = ("head_dim_v + 2", of.head_dim_v.saturating_add(2));
            check_given!("partials": Some(&self.output) => [batch, heads, n_q, of_row];);
        } else if let Some(choice) = &self.choice {
            needs(("output_strides", self.output.strides.is_some()), ("output", false))?;
            needs(("head_dim_v", self.attention.head_dim_v != 0), ("values", false))?;
            check_given! {
                "weights": Some(choice.weights) => [batch, n_q, heads];
                "chosen": Some(&choice.chosen) => [batch, n_q, ("num_chosen", choice.num_chosen)];
                "index_scores": self.index_scores =>
                    [batch, n_q, ("n_kv", self.options.attended_keys(&of)?)];
            }
        } else {
            self.output.check("output", &[batch, n_q, heads, width_v])?;
        }
        let chooses = ("choose_keys", self.choice.is_some());
        needs(("index_scores", self.index_scores.is_some()), chooses)?;
        let mut pointees = self.options.pointees(&of)?;
        pointees.connect();

        // SAFETY: numbers and pointers that may be NULL.
        let mut args: sys::mha_attention_args = unsafe { zeroed() };
        fill_common!(args, self.options, pointees, of);
        (args.num_heads, args.num_kv_heads) = (int(of.num_heads), int(of.num_kv_heads));
        (args.head_dim, args.head_dim_v) = (int(of.head_dim), int(of.head_dim_v));
        (args.scale, args.instruction_set) =
            (self.attention.scale, self.attention.instruction_set.0);
        (args.q, args.k, args.v) = (self.q.raw(), keys.raw(), self.v.raw());
        args.output = self.output.raw();
        args.kv_first_position = int(self.kv_first_position);
        let mut outputs = pointees.outputs.unwrap_or_else(no_outputs);
        if self.has_partials || self.choice.is_some() {
            (args.output.data, args.output.type_) = (null_mut(), 0);
        }
        if self.has_partials {
            outputs.partials = self.output.start().cast();
            args.call.outputs = &outputs;
        }
        let result = match &self.choice {
            None => body(Call::Attention(&args)),
            Some(choice) => {
                // SAFETY: as above.
                let mut chooses: sys::mha_choose_keys_args = unsafe { zeroed() };
                chooses.struct_size = size_of::<sys::mha_choose_keys_args>();
                chooses.attention = &args;
                chooses.weights = Array::of(choice.weights.into()).raw();
                chooses.num_chosen = int(choice.num_chosen);
                chooses.chosen_keys = choice.chosen.start().cast();
                chooses.index_scores = output_ptr(&self.index_scores);
                body(Call::ChooseKeys(&chooses))
            }
        };
        pointees.resume_panic();
        result
    }
}
