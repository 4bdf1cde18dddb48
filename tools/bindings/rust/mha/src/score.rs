use std::mem::size_of;

use mha_sys as sys;

use crate::arrays::{raw_input, slice_ptr};
use crate::error::check;
use crate::options::Dimensions;
use crate::spans::{check_exact, int, spelled, Extent};
use crate::types::Elements;
use crate::{Error, ErrorKind, Result};

/// What changes the scores of a call, and which keys are visible beyond what the call says itself.
/// All options combine. For a query of a sequence at position p in row i, and a key at position j,
/// in this order:
///
/// ```text
/// q = q_scales[sequence, i] * q         once it is rotated
/// s = scale * q k^T
/// s = softcap * tanh(s / softcap)
/// s = s - alibi_slopes[head] * |j - p|
/// s = s + relative_bias[head, j - p]    by distance, or relative_rows[sequence, head, i, j - p]
/// s = s + bias
/// s = -infinity                         where the mask is 0, or the call, segments or chosen keys
///                                       exclude the key
/// weight = exp(s) / (sum of exp(s) over the keys + exp(sinks[head]))
/// context = head_scales[head] * (weights times values)
/// ```
///
/// The mask and the bias are contiguous arrays `[batch, num_heads, n_q, columns]`, whose extents
/// are given with them. As in NumPy, each of the first three may be 1: all sequences, heads or rows
/// have the same then. Rows are those of the query, padding included. [`ScoreColumns`] says which
/// keys the columns stand for. There must be a column for each of these; more are allowed and not
/// read, so one array serves a cache that grows.
///
/// # Examples
///
/// Three drafted tokens follow a text in a cache. The second and the third are guesses at what
/// follows the first:
///
/// ```
/// use mha::{CacheConfig, KvCache, Layer, LayerConfig};
/// use mha::{ScoreColumns, ScoreOptions, Weights, Workspace};
///
/// let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 16))?;
/// let mut workspace = Workspace::new();
/// layer.forward(&[1.0; 5 * 4], &mut [0.0; 5 * 4]).causal().cache(&mut cache).run(&mut workspace)?;
///
/// let tree = [
///     1, 0, 0, //
///     1, 1, 0, // a guess
///     1, 0, 1, // another one, which does not see the first guess
/// ];
/// let options = ScoreOptions::new()
///     .softcap(50.0)
///     .mask(&tree, [1, 1, 3, 3])
///     .column_keys(ScoreColumns::NewKeys);
/// let (mut y, mut weights) = ([0.0; 3 * 4], [0.0; 2 * 3 * 8]);
/// let call = layer.forward(&[1.0; 3 * 4], &mut y).causal().cache(&mut cache).score(options);
/// call.attention_weights(&mut weights).run(&mut workspace)?;
/// // Of the last row in the first head: the text and its parent.
/// assert!(weights[2 * 8..][..6].iter().all(|weight| *weight > 0.1));
/// assert_eq!(weights[2 * 8..][6], 0.0); // the guess beside it
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct ScoreOptions<'a> {
    softcap: f32,
    alibi_slopes: Option<&'a [f32]>,
    sinks: Option<&'a [f32]>,
    bias: Option<Pairs<Elements<'a>>>,
    mask: Option<Pairs<&'a [u8]>>,
    column_keys: ScoreColumns,
    relative_bias: Option<(&'a [f32], usize, usize)>,
    relative_rows: Option<(Pairs<&'a [f32]>, usize)>,
    chosen: Option<(Pairs<&'a [i32]>, usize)>,
    q_scales: Option<&'a [f32]>,
    num_columns: usize,
    segments: Option<SegmentNumbers<'a>>,
    head_scales: Option<&'a [f32]>,
}

/// What they do, those of the queries, and those of the keys unless they are the queries'.
type SegmentNumbers<'a> = (Segments, &'a [i32], Option<&'a [i32]>);

/// What the numbers of [`ScoreOptions::segments`] do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Segments {
    /// A query attends only to keys of its own number, of those that the call leaves to it: packed
    /// documents, chunks.
    Within,
    /// A query also attends to all keys of its own number, beside those that
    /// [`causal`](crate::Forward::causal) and windows leave to it: blocks of an image, prefixes. A
    /// negative number is no segment.
    Also,
}

/// Which keys the columns of a mask and a bias stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ScoreColumns {
    /// The rows of the key or, with a cache, all positions in it, including those that the call
    /// appends. A ring, which has no first position, refuses it.
    #[default]
    AllKeys,
    /// The rows of the key that come with the call. The keys that a cache held before have no
    /// column: all queries may attend to them, with a bias of 0.
    NewKeys,
}

/// A number for each pair of query and key.
#[derive(Debug, Clone, Copy)]
struct Pairs<T> {
    data: T,
    extents: [usize; 4],
}

impl<'a> ScoreOptions<'a> {
    /// Makes options that change nothing.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Bounds scores to less than `softcap` on either side, a positive number (Gemma 2); 0, the
        /// default, is no bound.
        softcap(softcap: f32) => softcap = softcap;
        /// Lowers scores by a slope, `[num_heads]`, for each position between query and key (ALiBi;
        /// Press et al., arXiv:2108.12409). [`alibi_slopes`] computes the usual ones.
        alibi_slopes(slopes: &'a [f32]) => alibi_slopes = Some(slopes);
        /// Adds a number to scores, `[num_heads, left + 1 + right]`, by the distance of the key
        /// from the query, from `-left` to `right`. Keys that are farther away have the first or
        /// the last number. [`t5_relative_bias`] computes that of T5.
        relative_bias(bias: &'a [f32], left: usize, right: usize) =>
            relative_bias = Some((bias, left, right));
        /// Adds numbers of each query by distance, in place of
        /// [`relative_bias`](Self::relative_bias): `[batch, num_heads, n_q, left + 1 + right]`.
        /// Each of the first three `extents` is the call's, or 1 if all have the same.
        relative_rows(rows: &'a [f32], extents: [usize; 4], left: usize) =>
            relative_rows = Some((Pairs { data: rows, extents }, left));
        /// Lists the keys that each query attends to, of those that all else leaves to it: their
        /// positions or, with a `block` of more than 1, numbers of blocks of `block` keys. They
        /// come in any order; -1 is none. `lists` is `[batch, num_kv_heads, n_q, entries]`. Each of
        /// the first three `extents` is the call's, or 1 if all have the same.
        chosen_keys(lists: &'a [i32], extents: [usize; 4], block: usize) =>
            chosen = Some((Pairs { data: lists, extents }, block));
        /// Multiplies each query by a factor after rotation, `[batch, n_q]`; by default 1.
        q_scales(factors: &'a [f32]) => q_scales = Some(factors);
        /// Adds a key without a value to every row, with the score `sinks[head]`, `[num_heads]`,
        /// which is not scaled: the weights of a row then sum to less than 1.
        sinks(scores: &'a [f32]) => sinks = Some(scores);
        /// Adds a bias to scores, `[batch, num_heads, n_q, columns]`: `f32`, or f16 as
        /// [`Elements`]. -infinity masks a key. Each of the first three `extents` is the call's, or
        /// 1 if all have the same.
        bias(bias: impl Into<Elements<'a>>, extents: [usize; 4]) =>
            bias = Some(Pairs { data: bias.into(), extents });
        /// Masks keys where the mask is 0, `[batch, num_heads, n_q, columns]`. `extents` are as in
        /// [`bias`](Self::bias).
        mask(mask: &'a [u8], extents: [usize; 4]) => mask = Some(Pairs { data: mask, extents });
        /// Sets which keys the columns of mask, bias and segments stand for, by default
        /// [`ScoreColumns::AllKeys`].
        column_keys(keys: ScoreColumns) => column_keys = keys;
        /// Multiplies the contexts of heads by factors, `[num_heads]`; by default 1. A head of 0 is
        /// not computed, and its other outputs are those of padding.
        head_scales(factors: &'a [f32]) => head_scales = Some(factors);
        /// Sets how many columns mask, bias and the segments of keys have; 0, the default, is
        /// one for each key. Keys after the last column are masked.
        num_columns(columns: usize) => num_columns = columns;
        /// Gives numbers to the rows of the query, `[batch, n_q]`, and to the columns, `[batch,
        /// columns]`, and lets a query see the keys of its own number as `segments` says. None
        /// gives columns the numbers of the query's rows, if keys are rows of the query. A ring
        /// refuses segments.
        segments(segments: Segments, of_queries: &'a [i32], of_keys: Option<&'a [i32]>) =>
            segments = Some((segments, of_queries, of_keys));
    }

    /// Checks that there is a number for each head, query and pair, with as many columns as
    /// `needed` says.
    pub(crate) fn check(
        &self, of: &Dimensions, needed: impl Fn(ScoreColumns) -> Result<usize>,
    ) -> Result<()> {
        let [heads, batch, n_q] = extents!(of => num_heads, batch, n_q);
        let needed = || match self.num_columns {
            0 => needed(self.column_keys),
            columns => Ok(columns),
        };
        let distances = self
            .relative_bias
            .map_or(0, |(_, left, right)| left.saturating_add(right).saturating_add(1));
        check_given! {
            "relative_bias": self.relative_bias.map(|(bias, ..)| bias) =>
                [heads, ("left + 1 + right", distances)];
            "q_scales": self.q_scales => [batch, n_q];
            "segments of queries": self.segments.map(|(_, numbers, _)| numbers) => [batch, n_q];
            "segments of keys": self.segments.and_then(|(.., numbers)| numbers) =>
                [batch, ("columns", needed()?)];
        }
        if let Some((rows, left)) = &self.relative_rows {
            if rows.extents[3] <= *left {
                let message = format!(
                    "relative_rows is {}, but left is {left}; a row has left + 1 numbers or more",
                    spelled(&rows.shape())
                );
                return Err(Error::new(ErrorKind::Shape, message));
            }
            rows.check("relative_rows", rows.data.len(), of, of.num_heads, 0)?;
        }
        if let Some((lists, _)) = &self.chosen {
            lists.check("chosen_keys", lists.data.len(), of, of.num_kv_heads, 0)?;
        }
        if let Some(bias) = &self.bias {
            bias.check("bias", bias.data.len(), of, of.num_heads, needed()?)?;
        }
        if let Some(mask) = &self.mask {
            mask.check("mask", mask.data.len(), of, of.num_heads, needed()?)?;
        }
        Ok(())
    }

    /// What the library takes for the model, with arrays that have a number for each head.
    pub(crate) fn raw(&self, of: &Dimensions) -> Result<sys::mha_score_options> {
        let of_heads = |name, numbers: Option<&[f32]>| {
            check_given! { name: numbers => extents!(of => num_heads); }
            Ok(slice_ptr(numbers))
        };
        let relative = self.relative_bias.map(|(_, left, right)| (left, right));
        let (left, right) = relative
            .or(self.relative_rows.map(|(rows, left)| (left, rows.extents[3] - 1 - left)))
            .unwrap_or((0, 0));
        Ok(sys::mha_score_options {
            struct_size: size_of::<sys::mha_score_options>(),
            softcap: self.softcap,
            reserved: 0,
            alibi_slopes: of_heads("alibi_slopes", self.alibi_slopes)?,
            sinks: of_heads("sinks", self.sinks)?,
            head_scales: of_heads("head_scales", self.head_scales)?,
            relative_bias: slice_ptr(self.relative_bias.map(|(bias, ..)| bias)),
            relative_left: int(left),
            relative_right: int(right),
        })
    }

    /// What the library takes for the call.
    pub(crate) fn raw_arrays(&self) -> sys::mha_score_arrays {
        let none = sys::mha_strides { batch: 0, row: 0, head: 0 };
        sys::mha_score_arrays {
            struct_size: size_of::<sys::mha_score_arrays>(),
            bias: raw_input(
                self.bias.map(|bias| bias.data),
                self.bias.map_or(none, |bias| bias.strides()),
            ),
            mask: slice_ptr(self.mask.map(|mask| mask.data)),
            mask_strides: self.mask.map_or(none, |mask| mask.strides()),
            column_keys: match self.column_keys {
                ScoreColumns::AllKeys => sys::MHA_COLUMNS_ALL_KEYS,
                ScoreColumns::NewKeys => sys::MHA_COLUMNS_NEW_KEYS,
            },
            segments: match self.segments {
                Some((Segments::Also, ..)) => sys::MHA_SEGMENTS_ALSO,
                _ => sys::MHA_SEGMENTS_WITHIN,
            },
            num_columns: int(self.num_columns),
            q_segments: slice_ptr(self.segments.map(|(_, of_queries, _)| of_queries)),
            kv_segments: slice_ptr(self.segments.and_then(|(.., of_keys)| of_keys)),
            q_scales: slice_ptr(self.q_scales),
            relative_rows: slice_ptr(self.relative_rows.map(|(rows, _)| rows.data)),
            relative_rows_strides: self.relative_rows.map_or(none, |(rows, _)| rows.strides()),
            chosen_keys: slice_ptr(self.chosen.map(|(lists, _)| lists.data)),
            chosen_keys_strides: self.chosen.map_or(none, |(lists, _)| lists.strides()),
            num_chosen: self.chosen.map_or(0, |(lists, _)| int(lists.extents[3])),
            chosen_block: self.chosen.map_or(0, |(_, block)| int(block)),
        }
    }
}

impl<T> Pairs<T> {
    fn shape(&self) -> [Extent; 4] {
        let [batch, heads, n_q, columns] = self.extents;
        [("batch", batch), ("num_heads", heads), ("n_q", n_q), ("columns", columns)]
    }

    fn check(
        &self, name: &str, len: usize, of: &Dimensions, heads: usize, needed: usize,
    ) -> Result<()> {
        let shape = self.shape();
        for ((of_what, given), right) in shape.iter().zip([of.batch, heads, of.n_q]) {
            if *given != 1 && *given != right {
                let message = format!(
                    "{name} is {}, but {of_what} is {right}; pass {right}, or 1 \
                    if all have the same",
                    spelled(&shape)
                );
                return Err(Error::new(ErrorKind::Shape, message));
            }
        }
        if self.extents[3] < needed {
            let message = format!(
                "{name} is {}, but there are {needed} keys; a row has a column for each",
                spelled(&shape)
            );
            return Err(Error::new(ErrorKind::Shape, message));
        }
        check_exact(name, len, &shape)
    }

    /// From one sequence, head and row to the next; MHA_BROADCAST where all have the same.
    fn strides(&self) -> sys::mha_strides {
        let [batch, heads, n_q, row] = self.extents;
        let head = n_q.saturating_mul(row);
        let or_shared = |extent: usize, stride: usize| {
            if extent == 1 {
                sys::MHA_BROADCAST
            } else {
                int(stride)
            }
        };
        sys::mha_strides {
            batch: or_shared(batch, heads.saturating_mul(head)),
            row: or_shared(n_q, row),
            head: or_shared(heads, head),
        }
    }
}

/// Returns the slopes of ALiBi, `[num_heads]`, for [`ScoreOptions::alibi_slopes`]. Let `n` be the
/// greatest power of two up to `num_heads`: the slopes are `2^(-8 k / n)` for k = 1 .. n, followed
/// by `2^(-4 k / n)` for k = 1, 3, 5, and so on.
///
/// # Errors
///
/// [`ErrorKind::InvalidValue`] if `num_heads` is not 1 .. 2^31 - 1, and [`ErrorKind::OutOfMemory`].
///
/// # Examples
///
/// ```
/// assert_eq!(mha::alibi_slopes(6)?, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
/// # Ok::<(), mha::Error>(())
/// ```
pub fn alibi_slopes(num_heads: usize) -> Result<Vec<f32>> {
    filled(num_heads, "slopes", |slopes, error| {
        // SAFETY: memory for this many floats.
        unsafe { sys::mha_alibi_slopes(int(num_heads), slopes, error) }
    })
}

/// A vector of `len` floats that `fill` writes.
fn filled(
    len: usize, what: &str, fill: impl FnOnce(*mut f32, *mut sys::mha_error) -> sys::mha_status,
) -> Result<Vec<f32>> {
    let mut floats = Vec::new();
    let out_of_memory =
        |_| Error::new(ErrorKind::OutOfMemory, format!("there is no memory for {len} {what}"));
    floats.try_reserve_exact(len).map_err(out_of_memory)?;
    check(|error| fill(floats.as_mut_ptr(), error))?;
    // SAFETY: all of them have been written.
    unsafe { floats.set_len(len) };
    Ok(floats)
}

/// Returns T5's relative bias, `[num_heads, left + 1 + right]`, for
/// [`ScoreOptions::relative_bias`], from its embedding, `[num_buckets, num_heads]`: each distance
/// gets the bucket that Hugging Face's `T5Attention` gives it. Distances of `max_distance` or more
/// share the last bucket; it is 128 in T5, and more than a quarter of the buckets (decoders: half).
/// With `is_bidirectional` false, as in decoders, all keys to the right of a query share the first
/// bucket.
///
/// # Errors
///
/// [`ErrorKind::SliceLength`] if the embedding has no whole rows, [`ErrorKind::InvalidValue`] for
/// a number outside its range, and [`ErrorKind::OutOfMemory`].
///
/// # Examples
///
/// ```
/// let embedding: Vec<f32> = (0..32).map(|bucket| bucket as f32).collect();
/// let expected = [8.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 17.0, 18.0];
/// assert_eq!(mha::t5_relative_bias(&embedding, 1, 128, true, 9, 2)?, expected);
/// # Ok::<(), mha::Error>(())
/// ```
pub fn t5_relative_bias(
    embedding: &[f32], num_heads: usize, max_distance: usize, is_bidirectional: bool, left: usize,
    right: usize,
) -> Result<Vec<f32>> {
    let num_buckets = embedding.len().checked_div(num_heads).unwrap_or(0);
    let (buckets, heads) = (("num_buckets", num_buckets), ("num_heads", num_heads));
    check_given!("embedding": Some(embedding) => [buckets, heads];);
    if num_buckets == 0 || max_distance == 0 {
        let message = "num_buckets and max_distance are at least 1";
        return Err(Error::new(ErrorKind::InvalidValue, message));
    }
    let len = left.saturating_add(right).saturating_add(1).saturating_mul(num_heads);
    let (from, bidirectional) = (embedding.as_ptr(), u32::from(is_bidirectional));
    let [buckets, farthest] = [num_buckets, max_distance].map(int);
    let [heads, left, right] = [num_heads, left, right].map(int);
    filled(len, "biases", |to, error| {
        // SAFETY: an embedding and memory of the lengths that are passed.
        unsafe {
            sys::mha_t5_relative_bias(
                from,
                buckets,
                farthest,
                bidirectional,
                heads,
                left,
                right,
                to,
                error,
            )
        }
    })
}
