use std::fmt;

use candle_core::{Error, Result};
use mha::{CacheConfig, Layer, Type};

/// The keys and values of earlier calls of a [`SelfAttention`](crate::SelfAttention), one cache for
/// each layer: in place of `candle_nn::kv_cache::KvCache` and of tensors that grow by `cat`. It
/// takes the batch and the shape of the first call, and grows as it has to; keys and values that it
/// holds are not copied by a call, but where it grows.
///
/// ```
/// use mha_candle::{mha::Type, KvCache};
///
/// let mut cache = KvCache::new(); // f32, growing
/// // Half the memory, at most 4096 positions.
/// let mut halves = KvCache::new().k_type(Type::F16).capacity(4096);
/// assert_eq!(cache.length(), 0);
/// ```
#[derive(Default)]
pub struct KvCache {
    k_type: Type,
    v_type: Option<Type>,
    capacity: Option<usize>,
    held: Option<mha::KvCache>,
}

const FIRST_CAPACITY: usize = 256;

impl KvCache {
    /// An empty cache of `f32`.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// How keys are kept, and values unless [`v_type`](Self::v_type) is set; not in `Int4`, and
        /// in `Int8` only with a [`capacity`](Self::capacity).
        k_type: Type;
        /// How values are kept; in `Int8` or `Int4` only with a [`capacity`](Self::capacity).
        v_type: Type;
        /// The most positions of a sequence. Memory for all is reserved at once, and the cache does
        /// not grow.
        capacity: usize;
    }

    /// The positions of the longest sequence.
    pub fn length(&self) -> usize {
        self.held.as_ref().map_or(0, |cache| lengths(cache).max().unwrap_or(0))
    }

    /// Forgets everything. The next call may have another batch.
    pub fn reset(&mut self) {
        self.held = None;
    }

    /// Makes the next call append at this position.
    pub(crate) fn begin_at(&mut self, offset: usize) -> Result<()> {
        let length = self.length();
        if offset > length {
            candle_core::bail!(
                "offset is {offset}, but the cache holds {length} positions; pass as many, or \
                    fewer to forget the last ones"
            );
        }
        let Some(cache) = &mut self.held else { return Ok(()) };
        let longer: Vec<usize> = lengths(cache)
            .enumerate()
            .filter(|(_, length)| *length > offset)
            .map(|(sequence, _)| sequence)
            .collect();
        longer
            .into_iter()
            .try_for_each(|sequence| cache.truncate(sequence, offset))
            .map_err(Error::wrap)
    }

    /// With room for this many more rows of each sequence.
    pub(crate) fn with_room(
        &mut self, layer: &Layer<'_>, batch: usize, rows: usize,
    ) -> Result<&mut mha::KvCache> {
        let (length, needed) = (self.length(), self.length() + rows);
        let of_batch = self.held.as_ref().filter(|cache| cache.shape().num_sequences == batch);
        if let (None, Some(other), true) = (of_batch, &self.held, length > 0) {
            let sequences = other.shape().num_sequences;
            candle_core::bail!(
                "the cache holds {sequences} sequences, but the call has {batch}; \
                reset() it, or pass as many"
            );
        }
        // One with a capacity says by itself that it is full.
        if !of_batch
            .is_some_and(|cache| self.capacity.is_some() || cache.shape().capacity >= needed)
        {
            let has_codes = |kind| matches!(kind, Type::Int8 | Type::Int4);
            if (has_codes(self.k_type) || self.v_type.is_some_and(has_codes))
                && self.capacity.is_none()
            {
                candle_core::bail!(
                    "a cache of int8 or int4 cannot grow without rounding again; \
                    say its capacity()"
                );
            }
            let doubled = of_batch.map_or(FIRST_CAPACITY, |cache| 2 * cache.shape().capacity);
            let config =
                CacheConfig::for_layer(layer.shape(), self.capacity.unwrap_or(needed.max(doubled)));
            let config = config
                .num_sequences(batch)
                .k_type(self.k_type)
                .v_type(self.v_type.unwrap_or(self.k_type));
            let mut larger = mha::KvCache::new(&config).map_err(Error::wrap)?;
            if let Some(cache) = of_batch {
                copy(cache, &mut larger).map_err(Error::wrap)?;
            }
            self.held = Some(larger);
        }
        Ok(self.held.as_mut().expect("a cache of this batch"))
    }
}

fn lengths<'a>(cache: &'a mha::KvCache) -> impl Iterator<Item = usize> + 'a {
    (0..cache.shape().num_sequences).filter_map(|sequence| cache.length(sequence).ok())
}

/// Each number is read as it is stored, and stored as it is read.
fn copy(from: &mha::KvCache, to: &mut mha::KvCache) -> mha::Result<()> {
    let shape = *from.shape();
    for (sequence, length) in lengths(from).enumerate().filter(|(_, length)| *length > 0) {
        let mut k = vec![0.0; length * shape.num_kv_heads * shape.head_dim];
        let mut v = vec![0.0; length * shape.num_kv_heads * shape.head_dim_v];
        from.read(sequence, 0..length, Some(&mut k), Some(&mut v))?;
        to.append(sequence, &k, &v)?;
    }
    Ok(())
}

impl Clone for KvCache {
    /// Panics if there is no memory, as a clone of a `Vec` does.
    fn clone(&self) -> Self {
        let held = self
            .held
            .as_ref()
            .map(|cache| cache.try_clone().expect("memory for a copy of the cache"));
        Self { held, ..*self }
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("k_type", &self.k_type)
            .field("v_type", &self.v_type)
            .field("length", &self.length())
            .finish_non_exhaustive()
    }
}
