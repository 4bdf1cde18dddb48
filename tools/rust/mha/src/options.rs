//! What calls of whole layers and of attention alone have in common.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr::{null, null_mut};

use mha_sys as sys;

use crate::cache::length_of;
use crate::scheduler::Run;
use crate::spans::{check_exact, int, Extent};
use crate::types::ElementsMut;
use crate::{CacheKind, Error, ErrorKind, KvCache, Norm, Result, Rope, Scheduler, ScoreColumns, ScoreOptions, StorageType};

/// An array that a call writes to, borrowed for 'a.
pub(crate) struct Output<'a> {
    start: *mut c_void,
    len: usize,
    kind: StorageType,
    _borrowed: PhantomData<&'a mut [f32]>,
}

impl<'a> Output<'a> {
    pub fn new(data: &'a mut [f32]) -> Self {
        Self::of(data.into())
    }

    pub fn of(data: ElementsMut<'a>) -> Self {
        let (start, len, kind) = match data {
            ElementsMut::F32(data) => (data.as_mut_ptr().cast(), data.len(), StorageType::F32),
            ElementsMut::F16(data) => (data.as_mut_ptr().cast(), data.len(), StorageType::F16),
            ElementsMut::Bf16(data) => (data.as_mut_ptr().cast(), data.len(), StorageType::Bf16),
        };
        Self { start, len, kind, _borrowed: PhantomData }
    }

    /// Of positions of keys.
    pub fn of_keys(data: &'a mut [i32]) -> Self {
        Self { start: data.as_mut_ptr().cast(), len: data.len(), kind: StorageType::F32, _borrowed: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Where it starts, and its type.
    pub fn raw(&self) -> (*mut c_void, u32) {
        (self.start, self.kind.raw())
    }
}

/// Of an output that has floats.
pub(crate) fn output_ptr(output: &Option<Output>) -> *mut f32 {
    output.as_ref().map_or(null_mut(), |output| output.start.cast())
}

pub(crate) fn list_ptr(list: Option<&[i64]>) -> *const i64 {
    list.map_or(null(), <[i64]>::as_ptr)
}

pub(crate) fn slice_ptr(slice: Option<&[f32]>) -> *const f32 {
    slice.map_or(null(), <[f32]>::as_ptr)
}

pub(crate) fn struct_ptr<T>(value: &Option<T>) -> *const T {
    value.as_ref().map_or(null(), std::ptr::from_ref)
}

/// A look inside a call: each array that is given receives what the call computed at that point. Asking does not change the other outputs.
///
/// ```
/// # use mha::{Layer, LayerConfig, Taps, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let (mut y, mut q, mut scores) = ([0.0; 12], [0.0; 12], [0.0; 2 * 3 * 3]);
/// layer.forward(&[1.0; 12], &mut y).taps(Taps::new().q(&mut q).scores(&mut scores)).run(&mut Workspace::new())?;
/// assert_eq!(q, [1.0; 12]);
/// assert_eq!(scores, [2.0; 18]);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Default)]
pub struct Taps<'a> {
    q: Option<Output<'a>>,
    k: Option<Output<'a>>,
    v: Option<Output<'a>>,
    scores: Option<Output<'a>>,
    scaled_scores: Option<Output<'a>>,
    softcapped_scores: Option<Output<'a>>,
    masked_scores: Option<Output<'a>>,
    context: Option<Output<'a>>,
}

macro_rules! taps {
    ($($(#[$text:meta])* $name:ident)*) => {
        impl<'a> Taps<'a> {
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

taps! {
    /// `[batch, n_q, num_heads, head_dim]`: the queries as projected, before any rotation. Of whole layers only, likewise k and v.
    q
    /// `[batch, n_kv, num_kv_heads, head_dim]`: the keys, likewise, before storing; the rows of this call alone.
    k
    /// `[batch, n_kv, num_kv_heads, head_dim_v]`: the values, likewise.
    v
    /// `[batch, num_heads, n_q, n_kv]`: q k^T, both rotated, the keys as they are stored.
    scores
    /// `[batch, num_heads, n_q, n_kv]`: the scores times scale.
    scaled_scores
    /// `[batch, num_heads, n_q, n_kv]`: the scaled scores after the softcap.
    softcapped_scores
    /// `[batch, num_heads, n_q, n_kv]`: the softcapped scores with ALiBi and bias, -infinity where masked.
    masked_scores
    /// `[batch, n_q, num_heads, head_dim_v]`: the weighted values, before W_O.
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
        Self { raw: cache.as_ptr(), is_read_only, is_ring: cache.shape().kind == CacheKind::Ring, _borrowed: PhantomData }
    }
}

/// The dimensions of a call.
pub(crate) struct Dimensions {
    pub batch: usize,
    pub n_q: usize,
    /// Rows of key and value that come with the call.
    pub n_kv: usize,
    /// The keys are the rows of the query, and have their lengths.
    pub is_self: bool,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub head_dim_v: usize,
}

#[derive(Default)]
pub(crate) struct Options<'a> {
    pub is_causal: bool,
    pub has_left_padding: bool,
    pub window_left: Option<usize>,
    pub window_right: Option<usize>,
    pub q_start: Option<&'a [i64]>,
    pub q_lengths: Option<&'a [i64]>,
    pub kv_lengths: Option<&'a [i64]>,
    pub kv_start: Option<&'a [i64]>,
    pub cu_seqlens_q: Option<&'a [i64]>,
    pub cu_seqlens_kv: Option<&'a [i64]>,
    cache: Option<Cache<'a>>,
    pub cache_sequences: Option<&'a [i64]>,
    pub norm: Option<Norm<'a>>,
    pub rope: Option<Rope<'a>>,
    pub score: Option<ScoreOptions<'a>>,
    pub scheduler: Option<&'a dyn Scheduler>,
    pub attention_weights: Option<Output<'a>>,
    pub lse: Option<Output<'a>>,
    pub taps: Option<Taps<'a>>,
}

/// The structs that the library's arguments point to.
pub(crate) struct Pointees<'a> {
    pub norm: Option<sys::mha_norm>,
    pub rope: Option<sys::mha_rope>,
    pub score: Option<sys::mha_score_options>,
    pub taps: Option<sys::mha_taps>,
    run: Option<Run<'a>>,
    pub scheduler: Option<sys::mha_scheduler>,
}

impl<'a> Options<'a> {
    pub fn set_cache(&mut self, cache: &'a mut KvCache) {
        self.cache = Some(Cache::of(cache, false));
    }

    pub fn set_cache_read(&mut self, cache: &'a KvCache) {
        self.cache = Some(Cache::of(cache, true));
    }

    pub fn cache_ptr(&self) -> *mut sys::mha_kv_cache {
        self.cache.as_ref().map_or(null_mut(), |cache| cache.raw)
    }

    pub fn only_reads_cache(&self) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.is_read_only)
    }

    /// That each slice has what the call reads or writes.
    pub fn check_slices(&self, of: &Dimensions) -> Result<()> {
        let lists = [
            ("q_start", self.q_start),
            ("q_lengths", self.q_lengths),
            ("kv_lengths", self.kv_lengths),
            ("kv_start", self.kv_start),
            ("cache_sequences", self.cache_sequences),
        ];
        let sequences = self.sequences(of);
        if let Some(starts) = self.cu_seqlens_q {
            if of.batch != 1 || starts.is_empty() {
                let message =
                    "packed sequences are the rows of a batch of 1, and cu_seqlens_q says where each begins and the last one ends";
                return Err(Error::new(ErrorKind::SliceLength, message));
            }
        }
        if let Some(starts) = self.cu_seqlens_kv {
            check_exact("cu_seqlens_kv", starts.len(), &[("sequences + 1", sequences.saturating_add(1))])?;
        }
        for (name, list) in lists {
            if let Some(list) = list {
                check_exact(name, list.len(), &[("batch", sequences)])?;
            }
        }
        if let Some(norm) = &self.norm {
            norm.check(of)?;
        }
        if let Some(score) = &self.score {
            score.check(of, |columns| self.columns(columns, of))?;
        }
        let (batch, n_q, n_kv) = (("batch", of.batch), ("n_q", of.n_q), ("n_kv", of.n_kv));
        let (heads, kv_heads) = (("num_heads", of.num_heads), ("num_kv_heads", of.num_kv_heads));
        let (width, width_v) = (("head_dim", of.head_dim), ("head_dim_v", of.head_dim_v));
        let check = |name: &str, output: &Option<Output>, shape: &[Extent]| match output {
            Some(output) => check_exact(name, output.len(), shape),
            None => Ok(()),
        };
        check("lse", &self.lse, &[batch, heads, n_q])?;
        if let Some(taps) = &self.taps {
            check("the tap q", &taps.q, &[batch, n_q, heads, width])?;
            check("the tap k", &taps.k, &[batch, n_kv, kv_heads, width])?;
            check("the tap v", &taps.v, &[batch, n_kv, kv_heads, width_v])?;
            check("the tap context", &taps.context, &[batch, n_q, heads, width_v])?;
        }
        if self.asks_for_pairs() {
            let columns = ("n_kv", self.attended_keys(of)?);
            let pairs = [batch, heads, n_q, columns];
            check("attention_weights", &self.attention_weights, &pairs)?;
            if let Some(taps) = &self.taps {
                check("the tap scores", &taps.scores, &pairs)?;
                check("the tap scaled_scores", &taps.scaled_scores, &pairs)?;
                check("the tap softcapped_scores", &taps.softcapped_scores, &pairs)?;
                check("the tap masked_scores", &taps.masked_scores, &pairs)?;
            }
        }
        Ok(())
    }

    fn asks_for_pairs(&self) -> bool {
        let of_taps = |taps: &Taps| {
            [&taps.scores, &taps.scaled_scores, &taps.softcapped_scores, &taps.masked_scores].into_iter().any(Option::is_some)
        };
        self.attention_weights.is_some() || self.taps.as_ref().is_some_and(of_taps)
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

    /// The keys that each query is paired with: those of the call, or with a cache the longest length of the call's sequences once it has appended.
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

    /// The keys that come with the call to a sequence, as far as there are so many: the library checks the numbers.
    fn new_keys(&self, index: usize, of: &Dimensions) -> usize {
        let within = |rows: i64| usize::try_from(rows).unwrap_or(0).min(of.n_kv);
        let lengths = if of.is_self { self.q_lengths } else { self.kv_lengths };
        match (self.cu_seqlens_kv.or(self.cu_seqlens_q), lengths, self.kv_start) {
            (Some(starts), _, _) => within(starts[index + 1].saturating_sub(starts[index])),
            (_, Some(lengths), _) => within(lengths[index]),
            (_, _, Some(starts)) => of.n_kv - within(starts[index]),
            _ => of.n_kv,
        }
    }

    /// The sequences of the call: those of the arrays, unless these are packed in the arrays' only one.
    pub fn sequences(&self, of: &Dimensions) -> usize {
        self.cu_seqlens_q.map_or(of.batch, |starts| starts.len().saturating_sub(1))
    }

    pub fn pointees(&self, of: &Dimensions) -> Result<Pointees<'a>> {
        Ok(Pointees {
            norm: self.norm.as_ref().map(|norm| norm.raw(of)),
            rope: self.rope.as_ref().map(|rope| rope.raw(of.batch, of.n_q, of.n_kv)).transpose()?,
            score: self.score.as_ref().map(|score| score.raw(of)),
            taps: self.taps.as_ref().map(|taps| sys::mha_taps {
                struct_size: size_of::<sys::mha_taps>(),
                q: output_ptr(&taps.q),
                k: output_ptr(&taps.k),
                v: output_ptr(&taps.v),
                scores: output_ptr(&taps.scores),
                scaled_scores: output_ptr(&taps.scaled_scores),
                masked_scores: output_ptr(&taps.masked_scores),
                context: output_ptr(&taps.context),
                softcapped_scores: output_ptr(&taps.softcapped_scores),
            }),
            run: self.scheduler.map(Run::new),
            scheduler: None,
        })
    }

    pub fn flags(&self) -> u32 {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        flag(self.is_causal, sys::MHA_CAUSAL)
            | flag(self.window_left.is_some(), sys::MHA_WINDOW_LEFT)
            | flag(self.window_right.is_some(), sys::MHA_WINDOW_RIGHT)
            | flag(self.has_left_padding, sys::MHA_PADDING_LEFT)
            | flag(self.only_reads_cache(), sys::MHA_CACHE_READ)
    }
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
        ($args.batch, $args.n_q, $args.n_kv) = [$options.sequences(&$of), $of.n_q, $of.n_kv].map(crate::spans::extent).into();
        $args.flags = $options.flags();
        $args.window_left = $options.window_left.map_or(0, int);
        $args.window_right = $options.window_right.map_or(0, int);
        $args.q_start = list_ptr($options.q_start);
        $args.q_lengths = list_ptr($options.q_lengths);
        $args.kv_lengths = list_ptr($options.kv_lengths);
        $args.kv_start = list_ptr($options.kv_start);
        $args.cu_seqlens_q = list_ptr($options.cu_seqlens_q);
        $args.cu_seqlens_kv = list_ptr($options.cu_seqlens_kv);
        $args.cache = $options.cache_ptr();
        $args.cache_sequences = list_ptr($options.cache_sequences);
        $args.norm = struct_ptr(&$pointees.norm);
        $args.rope = struct_ptr(&$pointees.rope);
        $args.score = struct_ptr(&$pointees.score);
        $args.taps = struct_ptr(&$pointees.taps);
        $args.scheduler = struct_ptr(&$pointees.scheduler);
        $args.attention_weights = output_ptr(&$options.attention_weights);
        $args.lse = output_ptr(&$options.lse);
    };
}
pub(crate) use fill_common;

/// The setters that both calls have.
macro_rules! common_setters {
    () => {
        setters! {
            /// The number of sequences, 1 if not set. Rows are `[batch, n, width]`.
            batch: usize;
            /// Rows of query and output per sequence. Needed only where strides are given; else it follows from the length of the query.
            n_q: usize;
            /// Rows of key and value per sequence. Needed only where strides are given; else it follows from the length of the key.
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
            /// `[batch]`: the position of each sequence's first query, counted from its first key. If not set, the last query sees all keys.
            q_start: &'a [i64];
            /// `[batch]`: the valid rows of query and output. The others are padding, which is not read; its outputs are 0.
            q_lengths: &'a [i64];
            /// `[batch]`: the valid rows of key and value, where these are given.
            kv_lengths: &'a [i64];
            /// `[batch]`: the row of the first valid key, in self-attention of query too.
            kv_start: &'a [i64];
            /// `[sequences + 1]`: the rows of query and output at which each sequence begins, and where the last one ends. The sequences are packed
            /// one behind the other, in arrays of batch 1.
            cu_seqlens_q: &'a [i64];
            /// The same of key and value; if not set, it is as of query.
            cu_seqlens_kv: &'a [i64];
            /// `[batch]`: the numbers of the cache's sequences, each at most once; 0, 1, ... if not set.
            cache_sequences: &'a [i64];
            /// Normalises queries and keys.
            norm: Norm<'a>;
            /// What changes scores, and masks that [`causal`](Self::causal), windows and lengths cannot say.
            score: ScoreOptions<'a>;
            /// Threads; if not set, the call runs on the calling thread alone.
            scheduler: &'a dyn Scheduler;
            /// Optional outputs of the steps in between.
            taps: Taps<'a>;
        }

        /// The valid rows of a sequence are the last ones, not the first.
        pub fn padding_left(mut self) -> Self {
            self.options.has_left_padding = true;
            self
        }

        /// Appends the keys and values of this call to the sequences of a cache, and attends to all that these hold.
        pub fn cache(mut self, cache: &'a mut KvCache) -> Self {
            self.options.set_cache(cache);
            self
        }

        /// Attends to a cache as it is, without keys and values of this call. Any number of calls may do so at the same time.
        pub fn cache_read(mut self, cache: &'a KvCache) -> Self {
            self.options.set_cache_read(cache);
            self
        }

        /// Rotates queries and keys: `.rope(&tables)`.
        pub fn rope(mut self, rope: impl Into<Rope<'a>>) -> Self {
            self.options.rope = Some(rope.into());
            self
        }

        /// An optional output `[batch, num_heads, n_q, n_kv]`: the weights of each pair, of which a row sums to 1, with sinks to less, or is 0 if all
        /// is masked. With a cache, `n_kv` is the longest length of the call's sequences once the call has appended.
        pub fn attention_weights(mut self, weights: &'a mut [f32]) -> Self {
            self.options.attention_weights = Some(Output::new(weights));
            self
        }

        /// An optional output `[batch, num_heads, n_q]`: ln of the sum of exp(score), with that of the sink; -infinity if all is masked.
        pub fn lse(mut self, lse: &'a mut [f32]) -> Self {
            self.options.lse = Some(Output::new(lse));
            self
        }
    };
}
pub(crate) use common_setters;
