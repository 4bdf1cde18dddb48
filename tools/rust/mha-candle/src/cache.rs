use std::fmt;

use candle_core::{Error, Result, Tensor};
use mha::{CacheConfig, Layer, StorageType};

/// The keys and values of earlier calls of a [`SelfAttention`](crate::SelfAttention), one cache for each layer: in place of
/// `candle_nn::kv_cache::KvCache` and of tensors that grow by `cat`. It takes the batch and the shape of the first call, and grows as it has to;
/// keys and values that it holds are not copied by a call, but where it grows.
///
/// ```
/// use mha_candle::{mha::StorageType, KvCache};
///
/// let mut cache = KvCache::new(); // f32, growing
/// let mut halves = KvCache::new().storage(StorageType::F16).capacity(4096); // half the memory, at most 4096 positions
/// assert_eq!(cache.length(), 0);
/// ```
#[derive(Default)]
pub struct KvCache {
    storage: StorageType,
    capacity: Option<usize>,
    pub(crate) held: Held,
}

#[derive(Default)]
pub(crate) enum Held {
    #[default]
    Nothing,
    Packed(mha::KvCache<'static>),
    /// By candle's own operations, `[batch, kv_heads, keys, head_dim]`.
    Tensors(Tensor, Tensor),
}

const FIRST_CAPACITY: usize = 256;

impl KvCache {
    /// An empty cache of `f32`.
    pub fn new() -> Self {
        Self::default()
    }

    /// How keys and values are kept: `F32`, `F16`, `Bf16`, or with a [`capacity`](Self::capacity) `Int8`.
    pub fn storage(mut self, storage: StorageType) -> Self {
        self.storage = storage;
        self
    }

    /// The most positions of a sequence. Memory for all is reserved at once, and the cache does not grow.
    pub fn capacity(mut self, positions: usize) -> Self {
        self.capacity = Some(positions);
        self
    }

    /// The positions of the longest sequence.
    pub fn length(&self) -> usize {
        match &self.held {
            Held::Nothing => 0,
            Held::Packed(cache) => lengths(cache).max().unwrap_or(0),
            Held::Tensors(k, _) => k.dims()[2],
        }
    }

    /// Forgets everything. The next call may have another batch.
    pub fn reset(&mut self) {
        self.held = Held::Nothing;
    }

    /// Forgets the positions from `length` on, of each sequence that has as many.
    pub fn truncate(&mut self, length: usize) -> Result<()> {
        match &mut self.held {
            Held::Nothing => {}
            Held::Packed(cache) => {
                for sequence in 0..cache.shape().num_sequences {
                    if cache.length(sequence).map_err(Error::wrap)? > length {
                        cache.truncate(sequence, length).map_err(Error::wrap)?;
                    }
                }
            }
            Held::Tensors(k, v) if k.dim(2)? > length => (*k, *v) = (k.narrow(2, 0, length)?, v.narrow(2, 0, length)?),
            Held::Tensors(..) => {}
        }
        Ok(())
    }

    /// Makes the next call append at this position, if one is given.
    pub(crate) fn begin_at(&mut self, offset: Option<usize>) -> Result<()> {
        let (Some(offset), length) = (offset, self.length()) else { return Ok(()) };
        if offset > length {
            candle_core::bail!(
                "offset is {offset}, but the cache holds {length} positions; pass as many, or fewer to forget the last ones"
            );
        }
        if offset == 0 {
            // Another batch may begin.
            match &mut self.held {
                Held::Packed(cache) => {
                    (0..cache.shape().num_sequences).try_for_each(|sequence| cache.truncate(sequence, 0)).map_err(Error::wrap)?
                }
                held => *held = Held::Nothing,
            }
        }
        self.truncate(offset)
    }

    /// With room for so many more rows of each sequence.
    pub(crate) fn packed(&mut self, layer: &Layer<'_>, batch: usize, rows: usize) -> Result<&mut mha::KvCache<'static>> {
        let length = self.length();
        let needed = length + rows;
        match &self.held {
            Held::Tensors(..) => candle_core::bail!("the cache holds what candle's own operations computed; reset() it before other calls"),
            Held::Packed(cache) if cache.shape().num_sequences != batch && length != 0 => candle_core::bail!(
                "the cache holds {} sequences, but the call has {batch}; reset() it, or pass as many",
                cache.shape().num_sequences
            ),
            Held::Packed(cache) if cache.shape().num_sequences == batch && cache.shape().capacity >= needed => {}
            // Which says by itself that it is full.
            Held::Packed(cache) if cache.shape().num_sequences == batch && self.capacity.is_some() => {}
            held => {
                let doubled = if let Held::Packed(cache) = held { 2 * cache.shape().capacity } else { FIRST_CAPACITY };
                let capacity = self.capacity.unwrap_or(needed.max(doubled));
                if self.storage == StorageType::Int8 && self.capacity.is_none() {
                    candle_core::bail!("a cache of int8 cannot grow without rounding again; say its capacity()");
                }
                let config = CacheConfig::for_layer(layer.shape(), capacity).sequences(batch).storage(self.storage);
                let mut larger = mha::KvCache::new(&config).map_err(Error::wrap)?;
                if let (Held::Packed(cache), true) = (held, length > 0) {
                    copy(cache, &mut larger).map_err(Error::wrap)?;
                }
                self.held = Held::Packed(larger);
            }
        }
        match &mut self.held {
            Held::Packed(cache) => Ok(cache),
            _ => candle_core::bail!("the cache is empty"),
        }
    }

    /// Appends by candle's own operations, and returns all that it holds.
    pub(crate) fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (k, v) = match &self.held {
            Held::Nothing => (k.clone(), v.clone()),
            Held::Tensors(held_k, held_v) => (Tensor::cat(&[held_k, k], 2)?, Tensor::cat(&[held_v, v], 2)?),
            Held::Packed(_) => candle_core::bail!("the cache holds what mha computed; reset() it before calls by candle's own operations"),
        };
        self.held = Held::Tensors(k.clone(), v.clone());
        Ok((k, v))
    }
}

fn lengths<'a>(cache: &'a mha::KvCache<'_>) -> impl Iterator<Item = usize> + 'a {
    (0..cache.shape().num_sequences).filter_map(|sequence| cache.length(sequence).ok())
}

/// Each number is read as it is stored, and stored as it is read.
fn copy(from: &mha::KvCache<'_>, to: &mut mha::KvCache<'_>) -> mha::Result<()> {
    let shape = *from.shape();
    for (sequence, length) in lengths(from).enumerate() {
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
        let held = match &self.held {
            Held::Nothing => Held::Nothing,
            Held::Packed(cache) => Held::Packed(cache.try_clone().expect("memory for a copy of the cache")),
            Held::Tensors(k, v) => Held::Tensors(k.clone(), v.clone()),
        };
        Self { held, ..*self }
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache").field("storage", &self.storage).field("length", &self.length()).finish_non_exhaustive()
    }
}
