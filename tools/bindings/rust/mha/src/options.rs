//! What calls of whole layers and of attention alone have in common.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};

use mha_sys as sys;

use crate::cache::length_of;
use crate::scheduler::Run;
use crate::spans::{check_exact, int, Extent};
use crate::types::{Elements, ElementsMut};
use crate::{
    CacheKind, Error, ErrorKind, KvCache, Norm, Result, Rope, Scheduler, ScoreColumns,
    ScoreOptions, Type,
};

/// An array that a call writes to, borrowed for 'a.
pub(crate) struct Output<'a> {
    start: *mut c_void,
    len: usize,
    kind: Type,
    _borrowed: PhantomData<&'a mut [f32]>,
}

impl<'a> Output<'a> {
    pub fn new(data: &'a mut [f32]) -> Self {
        Self::of(data.into())
    }

    pub fn of(data: ElementsMut<'a>) -> Self {
        let (start, len, kind) = match data {
            ElementsMut::F32(data) => (data.as_mut_ptr().cast(), data.len(), Type::F32),
            ElementsMut::F16(data) => (data.as_mut_ptr().cast(), data.len(), Type::F16),
            ElementsMut::Bf16(data) => (data.as_mut_ptr().cast(), data.len(), Type::Bf16),
        };
        Self { start, len, kind, _borrowed: PhantomData }
    }

    /// Of positions of keys.
    pub fn of_keys(data: &'a mut [i32]) -> Self {
        Self {
            start: data.as_mut_ptr().cast(),
            len: data.len(),
            kind: Type::F32,
            _borrowed: PhantomData,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Where it starts.
    pub fn start(&self) -> *mut c_void {
        self.start
    }

    /// As the library takes it.
    pub fn raw(&self, strides: sys::mha_strides) -> sys::mha_output {
        sys::mha_output { data: self.start, type_: self.kind.raw(), reserved: 0, strides }
    }
}

/// An input as the library takes it, where it is given.
pub(crate) fn raw_input(data: Option<Elements>, strides: sys::mha_strides) -> sys::mha_input {
    let (data, type_) = data.map_or((null(), 0), |data| (data.as_ptr(), data.kind().raw()));
    sys::mha_input { data, type_, reserved: 0, strides, reserved_pointer: null() }
}

/// Of an output that has floats.
pub(crate) fn output_ptr(output: &Option<Output>) -> *mut f32 {
    output.as_ref().map_or(null_mut(), |output| output.start.cast())
}

fn list_ptr(list: Option<&[i64]>) -> *const i64 {
    list.map_or(null(), <[i64]>::as_ptr)
}

pub(crate) fn slice_ptr(slice: Option<&[f32]>) -> *const f32 {
    slice.map_or(null(), <[f32]>::as_ptr)
}

pub(crate) fn struct_ptr<T>(value: &Option<T>) -> *const T {
    value.as_ref().map_or(null(), std::ptr::from_ref)
}

/// Optional outputs of the steps in between: each array that is given receives what the call
/// computed at that point. Asking for one changes no other output.
///
/// ```
/// # use mha::{Layer, LayerConfig, Outputs, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let (mut y, mut q, mut scores) = ([0.0; 12], [0.0; 12], [0.0; 2 * 3 * 3]);
/// let outputs = Outputs::new().q(&mut q).scores(&mut scores);
/// layer.forward(&[1.0; 12], &mut y).outputs(outputs).run(&mut Workspace::new())?;
/// assert_eq!(q, [1.0; 12]);
/// assert_eq!(scores, [2.0; 18]);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Default)]
pub struct Outputs<'a> {
    q: Option<Output<'a>>,
    k: Option<Output<'a>>,
    v: Option<Output<'a>>,
    scores: Option<Output<'a>>,
    scaled_scores: Option<Output<'a>>,
    softcapped_scores: Option<Output<'a>>,
    masked_scores: Option<Output<'a>>,
    context: Option<Output<'a>>,
}

macro_rules! outputs {
    ($($(#[$text:meta])* $name:ident)*) => {
        impl<'a> Outputs<'a> {
            /// No arrays yet.
            pub fn new() -> Self {
                Self::default()
            }

            $($(#[$text])*
            pub fn $name(mut self, $name: &'a mut [f32]) -> Self {
                self.$name = Some(Output::new($name));
                self
            })*
        }
    };
}

outputs! {
    /// `[batch, n_q, num_heads, head_dim]`: the queries as projected, before norm and rotation.
    /// Only a call of a whole layer has q, k and v.
    q
    /// `[batch, n_kv, num_kv_heads, head_dim]`: the keys as projected, before norm and rotation;
    /// only the rows of this call.
    k
    /// `[batch, n_kv, num_kv_heads, head_dim_v]`: the values as projected; only the rows of this
    /// call.
    v
    /// `[batch, num_heads, n_q, n_kv]`: q k^T after rotation, the keys as they are stored.
    scores
    /// `[batch, num_heads, n_q, n_kv]`: the scores times scale.
    scaled_scores
    /// `[batch, num_heads, n_q, n_kv]`: the scaled scores after the softcap.
    softcapped_scores
    /// `[batch, num_heads, n_q, n_kv]`: the softcapped scores after all biases, -infinity where
    /// masked.
    masked_scores
    /// `[batch, n_q, num_heads, head_dim_v]`: the weighted values, before the gate and W_O.
    context
}

/// A cache that is borrowed for a call, mutably or only to be read.
struct Cache<'a> {
    raw: *mut sys::mha_kv_cache,
    is_read_only: bool,
    is_ring: bool,
    _borrowed: PhantomData<&'a mut ()>,
}

impl Cache<'_> {
    fn of(cache: &KvCache, is_read_only: bool) -> Self {
        Self {
            raw: cache.as_ptr(),
            is_read_only,
            is_ring: cache.shape().kind == CacheKind::Ring,
            _borrowed: PhantomData,
        }
    }
}

/// The dimensions of a call.
pub(crate) struct Dimensions {
    pub batch: usize,
    pub n_q: usize,
    /// Rows of key and value that come with the call.
    pub n_kv: usize,
    /// The keys are the rows of the query.
    pub is_self: bool,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub head_dim_v: usize,
}

#[derive(Default)]
pub(crate) struct Options<'a> {
    pub is_causal: bool,
    pub has_equal_scores: bool,
    pub window_left: Option<usize>,
    pub window_right: Option<usize>,
    pub cu_seqlens_q: Option<&'a [i64]>,
    pub cu_seqlens_kv: Option<&'a [i64]>,
    pub q_lengths: Option<&'a [i64]>,
    pub kv_lengths: Option<&'a [i64]>,
    pub q_first_rows: Option<&'a [i64]>,
    pub kv_first_rows: Option<&'a [i64]>,
    pub q_first_positions: Option<&'a [i64]>,
    pub cache_sequences: Option<&'a [i64]>,
    pub rope_q_positions: Option<&'a [i64]>,
    pub rope_k_positions: Option<&'a [i64]>,
    cache: Option<Cache<'a>>,
    has_both_caches: bool,
    pub norm: Option<Norm<'a>>,
    pub rope: Option<&'a Rope<'a>>,
    pub score: Option<ScoreOptions<'a>>,
    pub scheduler: Option<&'a dyn Scheduler>,
    pub attention_weights: Option<Output<'a>>,
    pub lse: Option<Output<'a>>,
    pub outputs: Outputs<'a>,
}

/// The structs that the library's arguments point to.
pub(crate) struct Pointees<'a> {
    pub norm: Option<sys::mha_norm>,
    pub rope: Option<sys::mha_rope>,
    pub score: Option<sys::mha_score_options>,
    pub score_arrays: Option<sys::mha_score_arrays>,
    pub sequences: Option<sys::mha_sequences>,
    pub outputs: Option<sys::mha_outputs>,
    run: Option<Run<'a>>,
    pub scheduler: Option<sys::mha_scheduler>,
}

impl<'a> Options<'a> {
    pub fn set_cache(&mut self, cache: &'a mut KvCache) {
        self.has_both_caches |= self.only_reads_cache();
        self.cache = Some(Cache::of(cache, false));
    }

    pub fn set_cache_read(&mut self, cache: &'a KvCache) {
        self.has_both_caches |= self.cache.is_some() && !self.only_reads_cache();
        self.cache = Some(Cache::of(cache, true));
    }

    pub fn check_one_cache(&self) -> Result<()> {
        if self.has_both_caches {
            return Err(Error::new(
                ErrorKind::InvalidValue,
                "cache and cache_read are both given; give one of them",
            ));
        }
        Ok(())
    }

    /// The cache to append to, and the cache that is only read, of which one is NULL at least.
    pub fn cache_ptrs(&self) -> (*mut sys::mha_kv_cache, *const sys::mha_kv_cache) {
        match &self.cache {
            None => (null_mut(), null()),
            Some(cache) if cache.is_read_only => (null_mut(), cache.raw),
            Some(cache) => (cache.raw, null()),
        }
    }

    pub fn only_reads_cache(&self) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.is_read_only)
    }

    /// The lists with an entry per sequence.
    fn lists(&self) -> [(&'static str, Option<&'a [i64]>); 6] {
        [
            ("q_lengths", self.q_lengths),
            ("kv_lengths", self.kv_lengths),
            ("q_first_rows", self.q_first_rows),
            ("kv_first_rows", self.kv_first_rows),
            ("q_first_positions", self.q_first_positions),
            ("cache_sequences", self.cache_sequences),
        ]
    }

    /// The lists with an entry per row, and the rows that they are for.
    fn row_lists(&self, of: &Dimensions) -> [(&'static str, Option<&'a [i64]>, Extent); 2] {
        [
            ("rope_q_positions", self.rope_q_positions, ("n_q", of.n_q)),
            ("rope_k_positions", self.rope_k_positions, ("n_kv", of.n_kv)),
        ]
    }

    /// That each slice has what the call reads or writes.
    pub fn check_slices(&self, of: &Dimensions) -> Result<()> {
        let sequences = self.sequences(of);
        if let Some(starts) = self.cu_seqlens_q {
            if of.batch != 1 || starts.len() < 2 {
                let message = format!(
                    "cu_seqlens_q has {} elements and batch is {}; packed sequences are the rows \
                        of a batch of 1, and cu_seqlens_q says where \
                     each begins and the last one ends",
                    starts.len(),
                    of.batch
                );
                return Err(Error::new(ErrorKind::SliceLength, message));
            }
        }
        if let Some(starts) = self.cu_seqlens_kv {
            check_exact(
                "cu_seqlens_kv",
                starts.len(),
                &[("sequences + 1", sequences.saturating_add(1))],
            )?;
        }
        for (name, list) in self.lists() {
            if let Some(list) = list {
                check_exact(name, list.len(), &[("sequences", sequences)])?;
            }
        }
        let (batch, n_q, n_kv) = (("batch", of.batch), ("n_q", of.n_q), ("n_kv", of.n_kv));
        for (name, list, rows) in self.row_lists(of) {
            if let Some(list) = list {
                check_exact(name, list.len(), &[batch, rows])?;
            }
        }
        if let Some(norm) = &self.norm {
            norm.check(of)?;
        }
        if let Some(score) = &self.score {
            score.check(of, |columns| self.columns(columns, of))?;
        }
        let (heads, kv_heads) = (("num_heads", of.num_heads), ("num_kv_heads", of.num_kv_heads));
        let (width, width_v) = (("head_dim", of.head_dim), ("head_dim_v", of.head_dim_v));
        let check = |name: &str, output: &Option<Output>, shape: &[Extent]| match output {
            Some(output) => check_exact(name, output.len(), shape),
            None => Ok(()),
        };
        let outputs = &self.outputs;
        check("lse", &self.lse, &[batch, heads, n_q])?;
        check("outputs.q", &outputs.q, &[batch, n_q, heads, width])?;
        check("outputs.k", &outputs.k, &[batch, n_kv, kv_heads, width])?;
        check("outputs.v", &outputs.v, &[batch, n_kv, kv_heads, width_v])?;
        check("outputs.context", &outputs.context, &[batch, n_q, heads, width_v])?;
        let of_pairs = [
            ("attention_weights", &self.attention_weights),
            ("outputs.scores", &outputs.scores),
            ("outputs.scaled_scores", &outputs.scaled_scores),
            ("outputs.softcapped_scores", &outputs.softcapped_scores),
            ("outputs.masked_scores", &outputs.masked_scores),
        ];
        if of_pairs.iter().any(|(_, output)| output.is_some()) {
            let pairs = [batch, heads, n_q, ("n_kv", self.attended_keys(of)?)];
            of_pairs.iter().try_for_each(|(name, output)| check(name, output, &pairs))?;
        }
        Ok(())
    }

    /// The columns that each row of a mask or bias needs.
    fn columns(&self, columns: ScoreColumns, of: &Dimensions) -> Result<usize> {
        match (&self.cache, columns) {
            (_, ScoreColumns::NewKeys) => Ok(of.n_kv),
            // The library refuses this before it reads any, and says what would be right.
            (Some(Cache { is_ring: true, .. }), _) => Ok(0),
            _ => self.attended_keys(of),
        }
    }

    /// The keys that each query is paired with: those of the call, or with a cache the longest
    /// length of the call's sequences once it has appended.
    pub fn attended_keys(&self, of: &Dimensions) -> Result<usize> {
        let Some(cache) = &self.cache else { return Ok(of.n_kv) };
        let mut longest = 0;
        for index in 0..self.sequences(of) {
            let sequence = self.cache_sequences.map_or(int(index), |sequences| sequences[index]);
            // SAFETY: a valid cache.
            let held = unsafe { length_of(cache.raw, sequence) }?;
            longest = longest.max(held + self.new_keys(index, of));
        }
        Ok(longest)
    }

    /// The keys that come with the call to a sequence, at most all rows: the library checks the
    /// numbers.
    fn new_keys(&self, index: usize, of: &Dimensions) -> usize {
        let within = |rows: i64| usize::try_from(rows).unwrap_or(0).min(of.n_kv);
        let (packed, lengths, first_rows) = if of.is_self {
            (self.cu_seqlens_q, self.q_lengths, self.q_first_rows)
        } else {
            (self.cu_seqlens_kv.or(self.cu_seqlens_q), self.kv_lengths, self.kv_first_rows)
        };
        match (packed, lengths, first_rows) {
            (Some(starts), _, _) => within(starts[index + 1].saturating_sub(starts[index])),
            (_, Some(lengths), _) => within(lengths[index]),
            (_, _, Some(first_rows)) => of.n_kv - within(first_rows[index]),
            _ => of.n_kv,
        }
    }

    /// The sequences of the call: those of the arrays, unless these are packed in the arrays' only
    /// one.
    pub fn sequences(&self, of: &Dimensions) -> usize {
        self.cu_seqlens_q.map_or(of.batch, |starts| starts.len().saturating_sub(1))
    }

    pub fn pointees(&self, of: &Dimensions) -> Result<Pointees<'a>> {
        let score = self.score.as_ref();
        Ok(Pointees {
            norm: self.norm.as_ref().map(|norm| norm.raw(of)),
            rope: self.rope.map(Rope::raw).transpose()?,
            score: score.map(ScoreOptions::raw),
            score_arrays: score.map(ScoreOptions::raw_arrays),
            sequences: self.raw_sequences(of),
            outputs: self.raw_outputs(),
            run: self.scheduler.map(Run::new),
            scheduler: None,
        })
    }

    /// None if every sequence of the batch is whole.
    fn raw_sequences(&self, of: &Dimensions) -> Option<sys::mha_sequences> {
        let is_packed = self.cu_seqlens_q.is_some() || self.cu_seqlens_kv.is_some();
        let has_lists = self.lists().iter().any(|(_, list)| list.is_some())
            || self.row_lists(of).iter().any(|(_, list, _)| list.is_some());
        (is_packed || has_lists).then(|| sys::mha_sequences {
            struct_size: size_of::<sys::mha_sequences>(),
            count: if is_packed { int(self.sequences(of)) } else { 0 },
            cu_seqlens_q: list_ptr(self.cu_seqlens_q),
            cu_seqlens_kv: list_ptr(self.cu_seqlens_kv),
            q_lengths: list_ptr(self.q_lengths),
            kv_lengths: list_ptr(self.kv_lengths),
            q_first_rows: list_ptr(self.q_first_rows),
            kv_first_rows: list_ptr(self.kv_first_rows),
            q_first_positions: list_ptr(self.q_first_positions),
            cache_sequences: list_ptr(self.cache_sequences),
            rope_q_positions: list_ptr(self.rope_q_positions),
            rope_k_positions: list_ptr(self.rope_k_positions),
        })
    }

    /// None if there is none.
    fn raw_outputs(&self) -> Option<sys::mha_outputs> {
        let Outputs { q, k, v, scores, scaled_scores, softcapped_scores, masked_scores, context } =
            &self.outputs;
        let all = [
            &self.lse,
            &self.attention_weights,
            q,
            k,
            v,
            scores,
            scaled_scores,
            softcapped_scores,
            masked_scores,
            context,
        ];
        all.iter().any(|output| output.is_some()).then(|| sys::mha_outputs {
            lse: output_ptr(&self.lse),
            attention_weights: output_ptr(&self.attention_weights),
            q: output_ptr(q),
            k: output_ptr(k),
            v: output_ptr(v),
            scores: output_ptr(scores),
            scaled_scores: output_ptr(scaled_scores),
            softcapped_scores: output_ptr(softcapped_scores),
            masked_scores: output_ptr(masked_scores),
            context: output_ptr(context),
            ..no_outputs()
        })
    }

    pub fn flags(&self) -> u32 {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        flag(self.is_causal, sys::MHA_CAUSAL)
            | flag(self.window_left.is_some(), sys::MHA_WINDOW_LEFT)
            | flag(self.window_right.is_some(), sys::MHA_WINDOW_RIGHT)
            | flag(self.has_equal_scores, sys::MHA_EQUAL_SCORES)
    }
}

pub(crate) fn no_outputs() -> sys::mha_outputs {
    // SAFETY: a number and pointers that may be NULL.
    sys::mha_outputs { struct_size: size_of::<sys::mha_outputs>(), ..unsafe { zeroed() } }
}

impl Pointees<'_> {
    /// To be called once they lie where they stay.
    pub fn connect(&mut self) {
        self.scheduler = self.run.as_ref().map(Run::raw);
    }

    pub fn resume_panic(&self) {
        if let Some(run) = &self.run {
            run.resume_panic();
        }
    }
}

/// Fills the fields that mha_forward_args and mha_attention_args have in common.
macro_rules! fill_common {
    ($args:ident, $options:expr, $pointees:ident, $of:ident) => {
        $args.struct_size = std::mem::size_of_val(&$args);
        ($args.batch, $args.n_q, $args.n_kv) =
            [$of.batch, $of.n_q, $of.n_kv].map(crate::spans::extent).into();
        $args.flags = $options.flags();
        $args.window_left = $options.window_left.map_or(0, int);
        $args.window_right = $options.window_right.map_or(0, int);
        $args.rope = struct_ptr(&$pointees.rope);
        $args.norm = struct_ptr(&$pointees.norm);
        $args.score = struct_ptr(&$pointees.score);
        $args.scheduler = struct_ptr(&$pointees.scheduler);
        $args.sequences = struct_ptr(&$pointees.sequences);
        $args.score_arrays = struct_ptr(&$pointees.score_arrays);
        ($args.cache, $args.cache_read) = $options.cache_ptrs();
        $args.outputs = struct_ptr(&$pointees.outputs);
    };
}
pub(crate) use fill_common;

/// The setters that both calls have.
macro_rules! common_setters {
    () => {
        setters! {
            /// The sequences of the arrays, 1 if not set: rows are `[batch, n, width]`. Packed
            /// sequences have a batch of 1. To decode one token for each of 3 sequences of a cache,
            /// call `.batch(3)`.
            batch: usize;
            /// Rows of query and output per sequence. Needed only where strides are given; else it
            /// follows from the length of the query.
            n_q: usize;
            /// Rows of key and value per sequence. Needed only where strides are given; else it
            /// follows from the length of the key.
            n_kv: usize;
        }

        /// The query at position p attends to the keys at positions 0 to p only.
        pub fn causal(mut self) -> Self {
            self.options.is_causal = true;
            self
        }

        setters! { @options
            /// The query at position p attends to keys at positions from `p - keys` on only.
            window_left: usize;
            /// The query at position p attends to keys at positions up to `p + keys` only.
            window_right: usize;
            /// `[sequences + 1]`: the sequences are packed, one after the other, in arrays with a
            /// batch of 1. Sequence s is the rows of query and output from `cu_seqlens_q[s]` up to
            /// `cu_seqlens_q[s + 1]`; the first number is 0 and the last one `n_q`.
            cu_seqlens_q: &'a [i64];
            /// The same for key and value, from 0 to `n_kv`; as for query if not set. Not in
            /// self-attention.
            cu_seqlens_kv: &'a [i64];
            /// `[batch]`: the valid rows of query and output; all from the first one on if not set.
            /// The others are padding, which is not read; its outputs are 0.
            q_lengths: &'a [i64];
            /// `[batch]`: the same for key and value, where these are given; not the rows in a
            /// cache.
            kv_lengths: &'a [i64];
            /// `[batch]`: the first valid row of query and output, 0 if not set: padding on the
            /// left.
            q_first_rows: &'a [i64];
            /// `[batch]`: the same for key and value, where these are given.
            kv_first_rows: &'a [i64];
            /// `[sequences]`: the position of each sequence's first valid query, counted from its
            /// first key. If not set, the last query stands at the last key.
            q_first_positions: &'a [i64];
            /// `[sequences]`: the sequences of the cache, no two equal; 0, 1, ... if not set.
            /// Ignored without a cache.
            cache_sequences: &'a [i64];
            /// `[batch, n_q]`: the row of the rotation's tables for each row of query, in place of
            /// the positions from [`q_first_positions`](Self::q_first_positions) on, by which masks
            /// go all the same. Ignored without [`rope`](Self::rope).
            rope_q_positions: &'a [i64];
            /// `[batch, n_kv]`: the same for the rows of key, in place of counting from the
            /// sequence's first key. In self-attention the rows of key are those of query.
            rope_k_positions: &'a [i64];
            /// Normalises queries and keys.
            norm: Norm<'a>;
            /// What changes scores, and masks beyond [`causal`](Self::causal), windows and lengths.
            score: ScoreOptions<'a>;
            /// Threads; if not set, the call runs on the calling thread alone.
            scheduler: &'a dyn Scheduler;
            /// Optional outputs of the steps in between.
            outputs: Outputs<'a>;
            /// Rotates queries and keys.
            rope: &'a Rope<'a>;
        }

        /// The scale is 0: before softcap and biases, all scores are equal.
        pub fn equal_scores(mut self) -> Self {
            self.options.has_equal_scores = true;
            self
        }

        /// Appends the keys and values of this call to the sequences of a cache, and attends to all
        /// that these hold.
        pub fn cache(mut self, cache: &'a mut KvCache) -> Self {
            self.options.set_cache(cache);
            self
        }

        /// Attends to a cache as it is, without keys and values of this call. Any number of calls
        /// may do so at the same time.
        pub fn cache_read(mut self, cache: &'a KvCache) -> Self {
            self.options.set_cache_read(cache);
            self
        }

        /// An optional output `[batch, num_heads, n_q, n_kv]`: the weights of each pair, of which a
        /// row sums to 1, with sinks to less, or is 0 if all is masked. With a cache, `n_kv` is the
        /// longest length of the call's sequences once the call has appended. Packed: `batch` is 1,
        /// `n_q` and, without a cache, `n_kv` are all rows.
        pub fn attention_weights(mut self, weights: &'a mut [f32]) -> Self {
            self.options.attention_weights = Some(Output::new(weights));
            self
        }

        /// An optional output `[batch, num_heads, n_q]`: ln of the sum of exp(score), with that of
        /// the sink; -infinity if all is masked. Packed: `batch` is 1 and `n_q` is all rows.
        pub fn lse(mut self, lse: &'a mut [f32]) -> Self {
            self.options.lse = Some(Output::new(lse));
            self
        }
    };
}
pub(crate) use common_setters;
