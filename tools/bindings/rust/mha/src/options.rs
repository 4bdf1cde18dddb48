//! What calls of whole layers and of attention alone have in common.

use std::marker::PhantomData;
use std::mem::{size_of, zeroed};
use std::ptr::null_mut;

use mha_sys as sys;

use crate::arrays::{output_ptr, slice_ptr, Output};
use crate::cache::length_of;
use crate::error::{needs, only_one};
use crate::scheduler::Run;
use crate::spans::{check_exact, flag, int};
use crate::{
    Arithmetic, BlockTables, CacheKind, Error, ErrorKind, KvCache, KvPool, Norm, Result, Rope,
    Scheduler, ScoreColumns, ScoreOptions,
};

/// Optional outputs of the steps in between: each array that is given receives what the call
/// computes at that step. All are contiguous. Asking for one does not affect the others. In
/// padding, masked scores are -infinity, and everything else is 0.
///
/// # Examples
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

impl<'a> Outputs<'a> {
    /// Makes a struct without arrays: nothing is computed beside the output.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Receives the queries as projected, before norm and rotation, `[batch, n_q, num_heads,
        /// head_dim]`. Only calls of a layer compute q, k and v.
        q(q: &'a mut [f32]) => q = Some(Output::new(q));
        /// Receives the keys as projected, before norm and rotation, `[batch, n_kv, num_kv_heads,
        /// head_dim]`: only the rows of this call.
        k(k: &'a mut [f32]) => k = Some(Output::new(k));
        /// Receives the values as projected, `[batch, n_kv, num_kv_heads, head_dim_v]`: only the
        /// rows of this call.
        v(v: &'a mut [f32]) => v = Some(Output::new(v));
        /// Receives q k^T after rotation, with the keys as they are stored, `[batch, num_heads,
        /// n_q, n_kv]`. `n_kv` of this and the following arrays is as in
        /// [`attention_weights`](crate::Forward::attention_weights).
        scores(scores: &'a mut [f32]) => scores = Some(Output::new(scores));
        /// Receives the scores times the scale, `[batch, num_heads, n_q, n_kv]`.
        scaled_scores(scores: &'a mut [f32]) => scaled_scores = Some(Output::new(scores));
        /// Receives the scaled scores after the softcap, `[batch, num_heads, n_q, n_kv]`.
        softcapped_scores(scores: &'a mut [f32]) => softcapped_scores = Some(Output::new(scores));
        /// Receives the softcapped scores after all biases, `[batch, num_heads, n_q, n_kv]`;
        /// -infinity where a key is masked.
        masked_scores(scores: &'a mut [f32]) => masked_scores = Some(Output::new(scores));
        /// Receives the weighted values, before the gate and W_O, `[batch, n_q, num_heads,
        /// head_dim_v]`.
        context(context: &'a mut [f32]) => context = Some(Output::new(context));
    }
}

/// A cache that is borrowed for a call, mutably or only to be read.
pub(crate) struct Cache<'a> {
    raw: *mut sys::mha_kv_cache,
    is_ring: bool,
    capacity: usize,
    tables: Option<BlockTables<'a>>, // of a pool
    _borrowed: PhantomData<&'a mut ()>,
}

impl<'a> Cache<'a> {
    pub fn of(cache: &'a mut KvCache) -> Self {
        Self::to_read(cache)
    }

    /// Of which the call takes a const pointer.
    pub fn to_read(cache: &'a KvCache) -> Self {
        let (is_ring, capacity) = (cache.shape().kind == CacheKind::Ring, cache.shape().capacity);
        Self { raw: cache.as_ptr(), is_ring, capacity, tables: None, _borrowed: PhantomData }
    }

    /// To append to it, the caller has it mutably.
    pub fn of_pool(pool: &'a KvPool<'_>, tables: BlockTables<'a>) -> Self {
        Self { tables: Some(tables), ..Self::to_read(pool.as_cache()) }
    }
}

/// The dimensions of a call.
#[derive(Default)]
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
    pub attention_arithmetic: Arithmetic,
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
    pub cache: Option<Cache<'a>>,
    pub cache_read: Option<Cache<'a>>,
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
    /// The cache to append to, and the cache that is only read, of which one is NULL at least.
    pub fn cache_ptrs(&self) -> (*mut sys::mha_kv_cache, *const sys::mha_kv_cache) {
        let raw = |cache: &Option<Cache>| cache.as_ref().map_or(null_mut(), |cache| cache.raw);
        (raw(&self.cache), raw(&self.cache_read))
    }

    fn any_cache(&self) -> Option<&Cache<'a>> {
        self.cache.as_ref().or(self.cache_read.as_ref())
    }

    fn tables(&self) -> Option<BlockTables<'a>> {
        self.any_cache().and_then(|cache| cache.tables)
    }

    pub fn check_one_cache(&self) -> Result<()> {
        only_one(("cache", self.cache.is_some()), ("cache_read", self.cache_read.is_some()))
    }

    pub fn only_reads_cache(&self) -> bool {
        self.cache_read.is_some()
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

    /// Checks that each slice has what the call reads or writes, and that each setting has a use.
    pub fn check(&self, of: &Dimensions) -> Result<()> {
        let sequences = ("sequences", self.sequences(of));
        if let Some(starts) = self.cu_seqlens_q {
            if of.batch != 1 || starts.len() < 2 {
                let message = format!(
                    "cu_seqlens_q has {} elements and batch is {}; packed sequences are the \
                     rows of a batch of 1, and cu_seqlens_q says where each begins and the last \
                     one ends",
                    starts.len(),
                    of.batch
                );
                return Err(Error::new(ErrorKind::SliceLength, message));
            }
        }
        for (name, list) in self.lists() {
            list.map_or(Ok(()), |list| check_exact(name, list.len(), &[sequences]))?;
        }
        self.tables().map_or(Ok(()), |tables| tables.check(sequences.1))?;
        let [batch, n_q, n_kv] = extents!(of => batch, n_q, n_kv);
        let [heads, kv_heads] = extents!(of => num_heads, num_kv_heads);
        let [width, width_v] = extents!(of => head_dim, head_dim_v);
        let outputs = &self.outputs;
        check_given! {
            "cu_seqlens_kv": self.cu_seqlens_kv =>
                [("sequences + 1", sequences.1.saturating_add(1))];
            "rope_q_positions": self.rope_q_positions => [batch, n_q];
            "rope_k_positions": self.rope_k_positions => [batch, n_kv];
            "lse": self.lse => [batch, heads, n_q];
            "outputs.q": outputs.q => [batch, n_q, heads, width];
            "outputs.k": outputs.k => [batch, n_kv, kv_heads, width];
            "outputs.v": outputs.v => [batch, n_kv, kv_heads, width_v];
            "outputs.context": outputs.context => [batch, n_q, heads, width_v];
        }
        self.norm.map_or(Ok(()), |norm| norm.check(of))?;
        if let Some(score) = &self.score {
            score.check(of, |columns| self.columns(columns, of))?;
        }
        let of_pairs = [
            ("attention_weights", &self.attention_weights),
            ("outputs.scores", &outputs.scores),
            ("outputs.scaled_scores", &outputs.scaled_scores),
            ("outputs.softcapped_scores", &outputs.softcapped_scores),
            ("outputs.masked_scores", &outputs.masked_scores),
        ];
        if of_pairs.iter().any(|(_, output)| output.is_some()) {
            let pairs = [batch, heads, n_q, ("n_kv", self.attended_keys(of)?)];
            for (name, output) in of_pairs {
                output.as_ref().map_or(Ok(()), |output| output.check(name, &pairs))?;
            }
        }
        let has_cache = self.any_cache().is_some() && self.tables().is_none();
        let (rope, cache) = (("rope", self.rope.is_some()), ("cache", has_cache));
        needs(("rope_q_positions", self.rope_q_positions.is_some()), rope)?;
        needs(("rope_k_positions", self.rope_k_positions.is_some()), rope)?;
        needs(("cache_sequences", self.cache_sequences.is_some()), cache)
    }

    /// The columns that each row of a mask or bias needs.
    fn columns(&self, columns: ScoreColumns, of: &Dimensions) -> Result<usize> {
        match (self.any_cache(), columns) {
            (_, ScoreColumns::NewKeys) => Ok(of.n_kv),
            // The library refuses this before it reads any, and says what would be right.
            (Some(Cache { is_ring: true, .. }), _) => Ok(0),
            _ => self.attended_keys(of),
        }
    }

    /// The keys that each query is paired with: those of the call, or with a cache the longest
    /// length of the call's sequences once it has appended.
    pub fn attended_keys(&self, of: &Dimensions) -> Result<usize> {
        let Some(cache) = self.any_cache() else { return Ok(of.n_kv) };
        let mut longest = 0;
        for index in 0..self.sequences(of) {
            let sequence = self.cache_sequences.map_or(int(index), |sequences| sequences[index]);
            let held = match cache.tables {
                // `check` and the library say what is wrong with them.
                Some(BlockTables { lengths, .. }) => {
                    let held = lengths.get(index).map_or(0, |&held| held);
                    usize::try_from(held).unwrap_or(0).min(cache.capacity)
                }
                // SAFETY: a valid cache.
                None => unsafe { length_of(cache.raw, sequence) }?,
            };
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
            score: score.map(|score| score.raw(of)).transpose()?,
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
        let tables = self.tables();
        let all = sys::mha_sequences {
            struct_size: size_of::<sys::mha_sequences>(),
            count: if is_packed { int(self.sequences(of)) } else { 0 },
            cu_seqlens_q: slice_ptr(self.cu_seqlens_q),
            cu_seqlens_kv: slice_ptr(self.cu_seqlens_kv),
            q_lengths: slice_ptr(self.q_lengths),
            kv_lengths: slice_ptr(self.kv_lengths),
            q_first_rows: slice_ptr(self.q_first_rows),
            kv_first_rows: slice_ptr(self.kv_first_rows),
            q_first_positions: slice_ptr(self.q_first_positions),
            cache_sequences: slice_ptr(self.cache_sequences),
            cache_lengths: slice_ptr(tables.map(|tables| tables.lengths)),
            block_tables: slice_ptr(tables.map(|tables| tables.blocks)),
            block_table_entries: tables.map_or(0, |tables| int(tables.entries)),
            block_table_stride: tables.map_or(0, |tables| int(tables.stride)),
            block_table_starts: slice_ptr(tables.and_then(|tables| tables.starts)),
            rope_q_positions: slice_ptr(self.rope_q_positions),
            rope_k_positions: slice_ptr(self.rope_k_positions),
        };
        let is_given = is_packed
            || tables.is_some()
            || self.lists().iter().any(|(_, list)| list.is_some())
            || self.rope_q_positions.is_some()
            || self.rope_k_positions.is_some();
        is_given.then_some(all)
    }

    /// None if there is none.
    fn raw_outputs(&self) -> Option<sys::mha_outputs> {
        let outputs = &self.outputs;
        let all = sys::mha_outputs {
            lse: output_ptr(&self.lse),
            attention_weights: output_ptr(&self.attention_weights),
            q: output_ptr(&outputs.q),
            k: output_ptr(&outputs.k),
            v: output_ptr(&outputs.v),
            scores: output_ptr(&outputs.scores),
            scaled_scores: output_ptr(&outputs.scaled_scores),
            softcapped_scores: output_ptr(&outputs.softcapped_scores),
            masked_scores: output_ptr(&outputs.masked_scores),
            context: output_ptr(&outputs.context),
            ..no_outputs()
        };
        let Outputs { q, k, v, scores, scaled_scores, softcapped_scores, masked_scores, context } =
            outputs;
        let given = [&self.lse, &self.attention_weights, q, k, v, scores, scaled_scores];
        let is_given = given.into_iter().chain([softcapped_scores, masked_scores, context]);
        is_given.flatten().next().is_some().then_some(all)
    }

    pub fn flags(&self) -> u32 {
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

/// Fills the size and the `call` of mha_forward_args or mha_attention_args.
macro_rules! fill_common {
    ($args:ident, $options:expr, $pointees:ident, $of:ident) => {
        $args.struct_size = std::mem::size_of_val(&$args);
        let call = &mut $args.call;
        (call.batch, call.n_q, call.n_kv) =
            [$of.batch, $of.n_q, $of.n_kv].map(crate::spans::extent).into();
        call.flags = $options.flags();
        call.window_left = $options.window_left.map_or(0, int);
        call.window_right = $options.window_right.map_or(0, int);
        call.attention_arithmetic = $options.attention_arithmetic.raw();
        call.rope = struct_ptr(&$pointees.rope);
        call.norm = struct_ptr(&$pointees.norm);
        call.score = struct_ptr(&$pointees.score);
        call.scheduler = struct_ptr(&$pointees.scheduler);
        call.sequences = struct_ptr(&$pointees.sequences);
        call.score_arrays = struct_ptr(&$pointees.score_arrays);
        (call.cache, call.cache_read) = $options.cache_ptrs();
        call.outputs = struct_ptr(&$pointees.outputs);
    };
}
pub(crate) use fill_common;

/// The setters that both calls have.
macro_rules! common_setters {
    () => {
        setters! {
            /// Sets the number of sequences in the arrays; by default 1. Packed sequences have a
            /// batch of 1. To decode one token for each of 3 sequences of a cache, set it to 3.
            batch(sequences: usize) => batch = sequences;
            /// Sets the rows of query and output per sequence. By default, they follow from the
            /// length of the query; a query with strides needs them.
            n_q(rows: usize) => n_q = Some(rows);
            /// Sets the rows of key and value per sequence. By default, they follow from the length
            /// of the key; a key with strides needs them.
            n_kv(rows: usize) => n_kv = Some(rows);
            /// Limits the query at position p to the keys at positions 0 to p.
            causal() => options.is_causal = true;
            /// Limits the query at position p to keys at positions from `p - keys` on. Hugging
            /// Face's `sliding_window` is one more.
            window_left(keys: usize) => options.window_left = Some(keys);
            /// Limits the query at position p to keys at positions up to `p + keys`.
            window_right(keys: usize) => options.window_right = Some(keys);
            /// Sets what scores and context are computed in; by default [`Arithmetic::F32`].
            /// [`Arithmetic::Int16`] multiplies integers: keys of [`Type::Int8`](crate::Type::Int8)
            /// and values of that or of [`Type::Int4`](crate::Type::Int4) in a cache, or the
            /// call's, which are rounded as a cache of [`Type::Int8`](crate::Type::Int8) rounds
            /// them. Other caches and arithmetics are refused.
            attention_arithmetic(arithmetic: Arithmetic) =>
                options.attention_arithmetic = arithmetic;
            /// Packs the sequences one after the other in arrays with a batch of 1: sequence s is
            /// the rows of query and output from `starts[s]` up to `starts[s + 1]`. `starts`,
            /// `[sequences + 1]`, never descends, begins with 0 and ends with `n_q`.
            cu_seqlens_q(starts: &'a [i64]) => options.cu_seqlens_q = Some(starts);
            /// Sets the first rows of packed sequences in key and value, `[sequences + 1]`, from 0
            /// to `n_kv`. By default they are those in the query. Self-attention refuses them.
            cu_seqlens_kv(starts: &'a [i64]) => options.cu_seqlens_kv = Some(starts);
            /// Sets the valid rows of each sequence in query and output, `[batch]`. By default, all
            /// rows from the first valid one on are valid. Other rows are padding: they are not
            /// read, and their outputs are 0.
            q_lengths(rows: &'a [i64]) => options.q_lengths = Some(rows);
            /// Sets the valid rows of each sequence in key and value, `[batch]`, without those in a
            /// cache. Self-attention refuses them.
            kv_lengths(rows: &'a [i64]) => options.kv_lengths = Some(rows);
            /// Sets the first valid row of each sequence in query and output, `[batch]`, for
            /// padding on the left; by default 0.
            q_first_rows(rows: &'a [i64]) => options.q_first_rows = Some(rows);
            /// Sets the first valid row of each sequence in key and value, `[batch]`; by default 0.
            /// Self-attention refuses them.
            kv_first_rows(rows: &'a [i64]) => options.kv_first_rows = Some(rows);
            /// Sets the position of each sequence's first valid query, `[sequences]`, counted from
            /// the sequence's first key. By default, the last query is at the position of the last
            /// key.
            q_first_positions(positions: &'a [i64]) =>
                options.q_first_positions = Some(positions);
            /// Sets which sequences of the cache the call uses, `[sequences]`, no two equal; by
            /// default 0, 1, and so on. Needs a cache.
            cache_sequences(sequences: &'a [i64]) => options.cache_sequences = Some(sequences);
            /// Sets the row of the rotation's tables for each row of the query, `[batch, n_q]`. By
            /// default, rows count from [`q_first_positions`](Self::q_first_positions) on, which
            /// masks use in any case. Needs [`rope`](Self::rope).
            rope_q_positions(rows: &'a [i64]) => options.rope_q_positions = Some(rows);
            /// Sets the row of the rotation's tables for each row of the key, `[batch, n_kv]`; in
            /// self-attention, its rows are those of the query. By default, rows count from the
            /// sequence's first key on. Needs [`rope`](Self::rope).
            rope_k_positions(rows: &'a [i64]) => options.rope_k_positions = Some(rows);
            /// Normalises queries and keys, or the context. By default, nothing is normalised.
            norm(norm: Norm<'a>) => options.norm = Some(norm);
            /// Changes scores, and masks keys beyond [`causal`](Self::causal), windows and lengths.
            score(score: ScoreOptions<'a>) => options.score = Some(score);
            /// Runs the call on threads. By default, it runs on the calling thread alone.
            scheduler(scheduler: &'a dyn Scheduler) => options.scheduler = Some(scheduler);
            /// Asks for results of the steps in between; by default none are written.
            outputs(outputs: Outputs<'a>) => options.outputs = outputs;
            /// Rotates queries and keys. By default, nothing is rotated.
            rope(rope: &'a Rope<'a>) => options.rope = Some(rope);
            /// Sets the scale to 0: before softcap and biases, all scores are equal. A scale that
            /// is set beside it is refused.
            equal_scores() => options.has_equal_scores = true;
            /// Appends the keys and values of this call to the sequences of a cache, and attends to
            /// all that these hold. A call that fails leaves the cache as it was.
            cache(cache: &'a mut KvCache) => options.cache = Some(Cache::of(cache));
            /// Attends to a cache as it is, without keys and values of this call. Any number of
            /// calls may read a cache concurrently.
            cache_read(cache: &'a KvCache) => options.cache_read = Some(Cache::to_read(cache));
            /// Appends to a pool in place of a cache, by these lengths and block tables.
            pool(pool: &'a mut KvPool<'_>, tables: BlockTables<'a>) =>
                options.cache = Some(Cache::of_pool(pool, tables));
            /// Attends to a pool in place of a cache, as [`cache_read`](Self::cache_read) does.
            pool_read(pool: &'a KvPool<'_>, tables: BlockTables<'a>) =>
                options.cache_read = Some(Cache::of_pool(pool, tables));
            /// Receives the weight of each pair of query and key, `[batch, num_heads, n_q, n_kv]`.
            /// A row sums to 1; with sinks to less, and to 0 if all keys are masked. With a cache,
            /// `n_kv` is the longest length that the call's sequences have after it. For packed
            /// sequences, `batch` is 1, and `n_q` and, without a cache, `n_kv` are all rows.
            attention_weights(weights: &'a mut [f32]) =>
                options.attention_weights = Some(Output::new(weights));
            /// Receives ln of the sum of exp(score) over the keys and the sink, `[batch, num_heads,
            /// n_q]`; -infinity if all keys are masked. For packed sequences, `batch` is 1 and
            /// `n_q` is all rows.
            lse(lse: &'a mut [f32]) => options.lse = Some(Output::new(lse));
        }
    };
}
pub(crate) use common_setters;
