use std::mem::size_of;
use std::ptr::null;

use mha_sys as sys;

use crate::error::check;
use crate::options::{raw_input, slice_ptr, Dimensions};
use crate::spans::{check_exact, int, spelled, Extent};
use crate::types::Elements;
use crate::{Error, ErrorKind, Result};

/// What changes the scores of a call, and which pairs of queries and keys take part beyond what the
/// call says otherwise. Each is optional, and all combine. Of the query at position p and the key
/// at position j, in this order:
///
/// ```text
/// q = q_scales[sequence, i] * q         once it is rotated
/// s = scale * q k^T
/// s = softcap * tanh(s / softcap)
/// s = s - alibi_slopes[head] * |j - p|
/// s = s + relative_bias[head, j - p]    by distance, or relative_rows[sequence, head, i, j - p]
/// s = s + bias
/// s = -infinity                         where the mask is 0, or the key is out of bounds by
///                                       causal(), a window or a length
/// weight = exp(s) / (sum of exp(s) over the keys + exp(sinks[head]))
/// context = head_scales[head] * (weights times values)
/// ```
///
/// The mask and the bias are arrays, contiguous, each with its extents `[batch, num_heads, n_q,
/// columns]`. As in NumPy, each of the first three may be 1: all sequences, heads or rows have the
/// same then. Rows are those of the query, padding included. There must be a column for each key,
/// which are those of [`ScoreColumns`]; more are allowed and not read, so that one array serves a
/// cache that grows.
///
/// Three drafted tokens after a text in a cache, the second and the third each a guess at what
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
/// let options =
///     ScoreOptions::new().softcap(50.0).mask(&tree, [1, 1, 3, 3]).columns(ScoreColumns::NewKeys);
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
    columns: ScoreColumns,
    relative_bias: Option<(&'a [f32], usize, usize)>,
    relative_rows: Option<(Pairs<&'a [f32]>, usize)>,
    chosen: Option<(Pairs<&'a [i32]>, usize)>,
    q_scales: Option<&'a [f32]>,
    num_columns: usize,
    groups: Option<GroupNumbers<'a>>,
    head_scales: Option<&'a [f32]>,
}

/// What they do, those of the queries, and those of the keys unless they are the queries'.
type GroupNumbers<'a> = (Groups, &'a [i32], Option<&'a [i32]>);

/// What the group numbers of [`ScoreOptions::groups`] do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Groups {
    /// A query attends to the keys of its own number only, of those that causal(), windows and
    /// lengths leave: packed documents, chunks.
    Within,
    /// A query attends to the keys of its own number besides those that causal() and windows leave,
    /// as long as it is not negative: blocks of an image, prefixes.
    Also,
}

/// Which keys the columns of a mask and a bias stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ScoreColumns {
    /// The rows of the key or, with a cache, all positions in it, those that the call appends
    /// included. Not for rings, which have no first position.
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
    /// Nothing that changes scores yet.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Bounds scores to less than `softcap` on either side, a positive number (Gemma 2); 0 =
        /// unbounded.
        softcap: f32;
        /// `[num_heads]`: lowers scores by this much for each position between query and key
        /// (ALiBi; Press et al., arXiv:2108.12409). The usual ones are those of [`alibi_slopes`].
        alibi_slopes: &'a [f32];
    }

    /// `[num_heads, left + 1 + right]`: added to scores by the distance of the key from the query,
    /// from `-left` to `right`; keys that are farther away have the first or the last number. That
    /// of T5 is made by [`t5_relative_bias`].
    pub fn relative_bias(mut self, bias: &'a [f32], left: usize, right: usize) -> Self {
        self.relative_bias = Some((bias, left, right));
        self
    }

    /// As [`relative_bias`](Self::relative_bias), in its place, with numbers of each query, which
    /// are made from it: of the extents `[batch, num_heads, n_q, left + 1 + right]`, each of the
    /// first three is the call's, or 1 where all have the same.
    pub fn relative_rows(mut self, rows: &'a [f32], extents: [usize; 4], left: usize) -> Self {
        self.relative_rows = Some((Pairs { data: rows, extents }, left));
        self
    }

    /// The keys that each query attends to, of those that all else leaves to it: their positions
    /// or, with a `block` of more than 1, the numbers of blocks of `block` keys; in any order, -1
    /// for none. Of the extents `[batch, num_kv_heads, n_q, entries]`, each of the first three is
    /// the call's, or 1 where all have the same.
    pub fn chosen_keys(mut self, lists: &'a [i32], extents: [usize; 4], block: usize) -> Self {
        self.chosen = Some((Pairs { data: lists, extents }, block));
        self
    }

    setters! {
        /// `[batch, n_q]`: a factor of each query, once it is rotated.
        q_scales: &'a [f32];
        /// `[num_heads]`: the score of a key without a value, which takes its share of the weights
        /// of every row: the weights of a row sum to less than 1. It is not scaled.
        sinks: &'a [f32];
    }

    /// Added to scores: a slice of `f32`, or f16 as [`Elements`]. -infinity excludes a key. Of the
    /// extents `[batch, num_heads, n_q, columns]`, each of the first three is the call's, or 1
    /// where all have the same.
    pub fn bias(mut self, bias: impl Into<Elements<'a>>, extents: [usize; 4]) -> Self {
        self.bias = Some(Pairs { data: bias.into(), extents });
        self
    }

    /// 0 where a key takes no part, and anything else where it does. Extents as of
    /// [`bias`](Self::bias).
    pub fn mask(mut self, mask: &'a [u8], extents: [usize; 4]) -> Self {
        self.mask = Some(Pairs { data: mask, extents });
        self
    }

    setters! {
        /// Which keys the columns of mask and bias stand for; all if not set.
        columns: ScoreColumns;
        /// `[num_heads]`, a head mask: factors of the heads' contexts. A head of 0 is not computed,
        /// and its outputs are those of padding.
        head_scales: &'a [f32];
        /// How many columns mask, bias and the group numbers of keys have: keys after these are
        /// masked. As many as there are keys if not set.
        num_columns: usize;
    }

    /// A group number for each row of the query, `[batch, n_q]`, and for each column, `[batch,
    /// columns]`. Without the second, columns have the numbers of the queries, which is for keys
    /// that are rows of the query. Not for rings.
    pub fn groups(
        mut self, groups: Groups, of_queries: &'a [i32], of_keys: Option<&'a [i32]>,
    ) -> Self {
        self.groups = Some((groups, of_queries, of_keys));
        self
    }

    /// That there is a number for each head, query and pair, with as many columns as `needed` says.
    pub(crate) fn check(
        &self, of: &Dimensions, needed: impl Fn(ScoreColumns) -> Result<usize>,
    ) -> Result<()> {
        for (name, numbers) in [
            ("alibi_slopes", self.alibi_slopes),
            ("sinks", self.sinks),
            ("head_scales", self.head_scales),
        ] {
            if let Some(numbers) = numbers {
                check_exact(name, numbers.len(), &[("num_heads", of.num_heads)])?;
            }
        }
        if let Some((bias, left, right)) = self.relative_bias {
            let distances = left.saturating_add(right).saturating_add(1);
            check_exact(
                "relative_bias",
                bias.len(),
                &[("num_heads", of.num_heads), ("left + 1 + right", distances)],
            )?;
        }
        if let Some((rows, left)) = &self.relative_rows {
            if rows.extents[3] <= *left {
                let message = format!(
                    "relative_rows is {}, but left is {left}; a row has left + 1 numbers or more",
                    spelled(&rows.shape())
                );
                return Err(Error::new(ErrorKind::Shape, message));
            }
            rows.check("relative_rows", rows.data.len(), of, 0)?;
        }
        if let Some((lists, _)) = &self.chosen {
            lists.check_heads("chosen_keys", lists.data.len(), of, of.num_kv_heads, 0)?;
        }
        let (batch, n_q) = (("batch", of.batch), ("n_q", of.n_q));
        if let Some(scales) = self.q_scales {
            check_exact("q_scales", scales.len(), &[batch, n_q])?;
        }
        let needed =
            |columns| if self.num_columns != 0 { Ok(self.num_columns) } else { needed(columns) };
        if let Some((_, of_queries, of_keys)) = self.groups {
            check_exact("groups of queries", of_queries.len(), &[batch, n_q])?;
            if let Some(of_keys) = of_keys {
                check_exact(
                    "groups of keys",
                    of_keys.len(),
                    &[batch, ("columns", needed(self.columns)?)],
                )?;
            }
        }
        if let Some(bias) = &self.bias {
            bias.check("bias", bias.data.len(), of, needed(self.columns)?)?;
        }
        if let Some(mask) = &self.mask {
            mask.check("mask", mask.data.len(), of, needed(self.columns)?)?;
        }
        Ok(())
    }

    /// What the library takes for the model.
    pub(crate) fn raw(&self) -> sys::mha_score_options {
        let relative = self.relative_bias.map(|(_, left, right)| (left, right));
        let (left, right) = relative
            .or(self.relative_rows.map(|(rows, left)| (left, rows.extents[3] - 1 - left)))
            .unwrap_or((0, 0));
        sys::mha_score_options {
            struct_size: size_of::<sys::mha_score_options>(),
            softcap: self.softcap,
            reserved: 0,
            alibi_slopes: slice_ptr(self.alibi_slopes),
            sinks: slice_ptr(self.sinks),
            head_scales: slice_ptr(self.head_scales),
            relative_bias: slice_ptr(self.relative_bias.map(|(bias, ..)| bias)),
            relative_left: int(left),
            relative_right: int(right),
        }
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
            mask: self.mask.map_or(null(), |mask| mask.data.as_ptr()),
            mask_strides: self.mask.map_or(none, |mask| mask.strides()),
            columns: match self.columns {
                ScoreColumns::AllKeys => sys::MHA_COLUMNS_ALL_KEYS,
                ScoreColumns::NewKeys => sys::MHA_COLUMNS_NEW_KEYS,
            },
            groups: match self.groups {
                Some((Groups::Also, ..)) => sys::MHA_GROUPS_ALSO,
                _ => sys::MHA_GROUPS_WITHIN,
            },
            num_columns: int(self.num_columns),
            q_groups: self.groups.map_or(null(), |(_, of_queries, _)| of_queries.as_ptr()),
            kv_groups: self
                .groups
                .and_then(|(_, _, of_keys)| of_keys)
                .map_or(null(), <[i32]>::as_ptr),
            q_scales: slice_ptr(self.q_scales),
            relative_rows: slice_ptr(self.relative_rows.map(|(rows, _)| rows.data)),
            relative_rows_strides: self.relative_rows.map_or(none, |(rows, _)| rows.strides()),
            chosen_keys: self.chosen.map_or(null(), |(lists, _)| lists.data.as_ptr()),
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

    fn check(&self, name: &str, len: usize, of: &Dimensions, needed: usize) -> Result<()> {
        self.check_heads(name, len, of, of.num_heads, needed)
    }

    fn check_heads(
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

/// The slopes of ALiBi as its authors choose them, for [`ScoreOptions::alibi_slopes`]: with `n` the
/// largest power of two up to `num_heads`, `2^(-8 k / n)` for k = 1 to n, then `2^(-4 k / n)` for k
/// = 1, 3, 5, ...
///
/// ```
/// assert_eq!(mha::alibi_slopes(6)?, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
/// # Ok::<(), mha::Error>(())
/// ```
pub fn alibi_slopes(num_heads: usize) -> Result<Vec<f32>> {
    let mut slopes = Vec::new();
    let out_of_memory = |_| {
        Error::new(ErrorKind::OutOfMemory, format!("there is no memory for {num_heads} slopes"))
    };
    slopes.try_reserve_exact(num_heads).map_err(out_of_memory)?;
    // SAFETY: memory for this many floats.
    check(|error| unsafe { sys::mha_alibi_slopes(int(num_heads), slopes.as_mut_ptr(), error) })?;
    // SAFETY: all of them have been written.
    unsafe { slopes.set_len(num_heads) };
    Ok(slopes)
}

/// T5's relative bias for [`ScoreOptions::relative_bias`], from its embedding `[num_buckets,
/// num_heads]`: each distance has the bucket that Hugging Face's `T5Attention` gives it.
/// `max_distance` is 128 in T5; what is farther to the left or right of a query changes nothing,
/// nor does, with `is_bidirectional` false, as in decoders, anything to its right.
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
    check_exact(
        "embedding",
        embedding.len(),
        &[("num_buckets", num_buckets), ("num_heads", num_heads)],
    )?;
    if num_buckets == 0 || max_distance == 0 {
        return Err(Error::new(
            ErrorKind::InvalidValue,
            "num_buckets and max_distance are at least 1".to_string(),
        ));
    }
    let len = left.saturating_add(right).saturating_add(1).saturating_mul(num_heads);
    let mut bias = Vec::new();
    let out_of_memory =
        |_| Error::new(ErrorKind::OutOfMemory, format!("there is no memory for {len} biases"));
    bias.try_reserve_exact(len).map_err(out_of_memory)?;
    let from = embedding.as_ptr();
    let (buckets, farthest, heads) = (int(num_buckets), int(max_distance), int(num_heads));
    // SAFETY: an embedding and memory of the lengths that are passed.
    check(|error| unsafe {
        let to = bias.as_mut_ptr();
        sys::mha_t5_relative_bias(
            from,
            buckets,
            farthest,
            u32::from(is_bidirectional),
            heads,
            int(left),
            int(right),
            to,
            error,
        )
    })?;
    // SAFETY: all of them have been written.
    unsafe { bias.set_len(len) };
    Ok(bias)
}
