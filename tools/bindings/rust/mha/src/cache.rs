use std::fmt;
use std::mem::{size_of, zeroed};
use std::ops::Range;
use std::ptr::{null, null_mut, NonNull};

use mha_sys as sys;

use crate::error::check;
use crate::spans::{check_exact, int, rows_of};
use crate::{AlignedBuffer, Error, ErrorKind, LayerConfig, Result, Type};

/// How a cache keeps the positions of its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CacheKind {
    /// Each sequence has room for `capacity` positions.
    #[default]
    Contiguous,
    /// For sliding windows: the last `capacity` positions of each sequence, which goes on growing.
    Ring,
    /// Blocks of positions from a common pool, by a table for each sequence:
    /// [`KvCache::set_blocks`].
    Paged {
        /// Positions of a block: 16, 32, 64, 128 or a multiple of 256.
        block_positions: usize,
        /// Blocks of the pool, numbered from 0.
        num_blocks: usize,
    },
}

/// What a [`KvCache`] holds.
///
/// ```
/// use mha::{CacheConfig, KvCache, Type};
///
/// let cache = KvCache::new(&CacheConfig::new(4096, 8, 128).num_sequences(4).k_type(Type::F16))?;
/// assert_eq!(cache.length(3)?, 0);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Sequences, numbered from 0.
    pub num_sequences: usize,
    /// Most positions of a sequence. Of a ring: the last positions, which it keeps; a multiple of
    /// 16, more than the left window. Paged: a multiple of `block_positions`.
    pub capacity: usize,
    /// As the layer's.
    pub num_kv_heads: usize,
    /// As the layer's.
    pub head_dim: usize,
    /// As the layer's; 0 = `head_dim`.
    pub head_dim_v: usize,
    /// How keys are kept: f32, f16, bf16 or int8.
    pub k_type: Type,
    /// How values are kept, one of the same types or int4; None = `k_type`. Ignored with
    /// `values_in_keys`.
    pub v_type: Option<Type>,
    /// A value is the first `head_dim_v` elements of its key, and is stored once: calls append keys
    /// alone.
    pub values_in_keys: bool,
    /// How positions are kept.
    pub kind: CacheKind,
}

impl CacheConfig {
    /// One sequence of up to `capacity` positions.
    pub fn new(capacity: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        let (k_type, kind) = Default::default();
        Self {
            num_sequences: 1,
            capacity,
            num_kv_heads,
            head_dim,
            head_dim_v: 0,
            k_type,
            v_type: None,
            values_in_keys: false,
            kind,
        }
    }

    /// One sequence of up to `capacity` positions, for a layer of this shape: the config that it is
    /// made of, or [`Layer::shape`](crate::Layer::shape).
    pub fn for_layer(config: &LayerConfig, capacity: usize) -> Self {
        let shape = config.with_defaults();
        Self::new(capacity, shape.num_kv_heads, shape.head_dim).head_dim_v(shape.head_dim_v)
    }

    with_fields! { num_sequences: usize, head_dim_v: usize, k_type: Type, values_in_keys: bool,
    kind: CacheKind }

    setters! {
        /// Sets [`v_type`](#structfield.v_type).
        v_type(kind: Type) => v_type = Some(kind);
    }

    /// The bytes that a cache needs.
    pub fn bytes(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: a valid struct.
        check(|error| unsafe { sys::mha_kv_cache_size(&self.raw(), &mut bytes, error) })?;
        Ok(bytes)
    }

    fn raw(&self) -> sys::mha_kv_cache_config {
        let (kind, block_positions, num_blocks) = match self.kind {
            CacheKind::Contiguous => (sys::MHA_CACHE_KIND_CONTIGUOUS, 0, 0),
            CacheKind::Ring => (sys::MHA_CACHE_KIND_RING, 0, 0),
            CacheKind::Paged { block_positions, num_blocks } => {
                (sys::MHA_CACHE_KIND_PAGED, block_positions, num_blocks)
            }
        };
        sys::mha_kv_cache_config {
            struct_size: size_of::<sys::mha_kv_cache_config>(),
            num_sequences: int(self.num_sequences),
            capacity: int(self.capacity),
            num_kv_heads: int(self.num_kv_heads),
            head_dim: int(self.head_dim),
            head_dim_v: int(self.head_dim_v),
            k_type: self.k_type.raw(),
            v_type: self.v_type.map_or(0, Type::raw), // 0 = k_type
            values: if self.values_in_keys {
                sys::MHA_CACHE_VALUES_IN_KEYS
            } else {
                sys::MHA_CACHE_VALUES_OWN
            },
            kind,
            block_positions: int(block_positions),
            num_blocks: int(num_blocks),
        }
    }

    fn of_raw(raw: &sys::mha_kv_cache_config) -> Option<Self> {
        let size = |value: i64| value as usize; // of a cache that exists, none is negative
        Some(Self {
            num_sequences: size(raw.num_sequences),
            capacity: size(raw.capacity),
            num_kv_heads: size(raw.num_kv_heads),
            head_dim: size(raw.head_dim),
            head_dim_v: size(raw.head_dim_v),
            k_type: Type::of_raw(raw.k_type)?,
            v_type: Some(Type::of_raw(raw.v_type)?),
            values_in_keys: raw.values == sys::MHA_CACHE_VALUES_IN_KEYS,
            kind: match raw.kind {
                sys::MHA_CACHE_KIND_CONTIGUOUS => CacheKind::Contiguous,
                sys::MHA_CACHE_KIND_RING => CacheKind::Ring,
                sys::MHA_CACHE_KIND_PAGED => CacheKind::Paged {
                    block_positions: size(raw.block_positions),
                    num_blocks: size(raw.num_blocks),
                },
                _ => return None,
            },
        })
    }
}

/// Keys and values of earlier calls, so that a token costs one row of projections and one pass over
/// what is stored. It holds several sequences, each with its own length.
///
/// A call appends to a cache that it is given by `.cache(&mut cache)`, and attends to all that is
/// there; one that is given by `.cache_read(&cache)` is only read, by any number of calls at the
/// same time. A call that fails leaves a cache as it was.
///
/// Its bytes ([`as_bytes`](Self::as_bytes)) can be written to a file, and made a cache again
/// ([`copy_of`](Self::copy_of)).
///
/// ```
/// use mha::{CacheConfig, KvCache, Layer, LayerConfig, Weights, Workspace};
///
/// let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 64))?;
/// let mut workspace = Workspace::new();
/// let mut y = [0.0; 12];
/// // A prompt of three rows, and one more.
/// layer.forward(&[1.0; 12], &mut y).causal().cache(&mut cache).run(&mut workspace)?;
/// layer.forward(&[1.0; 4], &mut y[..4]).causal().cache(&mut cache).run(&mut workspace)?;
/// assert_eq!(cache.length(0)?, 4);
/// cache.truncate(0, 3)?; // takes it back
///
/// let saved = cache.as_bytes().to_vec();
/// assert_eq!(KvCache::copy_of(&saved)?.length(0)?, 3);
/// # Ok::<(), mha::Error>(())
/// ```
///
/// ```compile_fail,E0499
/// # use mha::{CacheConfig, KvCache, Layer, LayerConfig, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// # let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 64))?;
/// # let (mut y, mut z) = ([0.0; 4], [0.0; 4]);
/// let first = layer.forward(&[1.0; 4], &mut y).cache(&mut cache);
/// // Does not compile: two calls that append to one cache.
/// let second = layer.forward(&[1.0; 4], &mut z).cache(&mut cache);
/// first.run(&mut Workspace::new())?;
/// second.run(&mut Workspace::new())?;
/// # Ok::<(), mha::Error>(())
/// ```
pub struct KvCache {
    raw: NonNull<sys::mha_kv_cache>,
    buffer: AlignedBuffer,
    shape: CacheConfig,
}

// SAFETY: changed by &mut alone.
unsafe impl Send for KvCache {}
unsafe impl Sync for KvCache {}

impl KvCache {
    /// An empty cache.
    pub fn new(config: &CacheConfig) -> Result<Self> {
        Self::made_by(AlignedBuffer::zeroed(config.bytes()?)?, |start, len, cache, error| {
            // SAFETY: a valid struct, and a buffer of this length, which is the cache's alone.
            unsafe { sys::mha_kv_cache_init(&config.raw(), start, len, cache, error) }
        })
    }

    /// A cache from the [bytes](Self::as_bytes) of another one.
    pub fn copy_of(bytes: &[u8]) -> Result<Self> {
        Self::made_by(AlignedBuffer::copy_of(bytes)?, |start, len, cache, error| {
            // SAFETY: a buffer of this length, which is the cache's alone.
            unsafe { sys::mha_kv_cache_view(start, len, cache, error) }
        })
    }

    /// Like [`copy_of`](Self::copy_of) this cache.
    pub fn try_clone(&self) -> Result<Self> {
        Self::copy_of(self.as_bytes())
    }

    fn made_by(
        mut buffer: AlignedBuffer,
        make: impl FnOnce(
            *mut std::ffi::c_void,
            usize,
            *mut *mut sys::mha_kv_cache,
            *mut sys::mha_error,
        ) -> sys::mha_status,
    ) -> Result<Self> {
        let (start, len, mut cache) = (buffer.as_mut_ptr(), buffer.len(), null_mut());
        check(|error| make(start.cast(), len, &mut cache, error))?;
        // SAFETY: not NULL on success.
        let raw = unsafe { NonNull::new_unchecked(cache) };
        // SAFETY: numbers.
        let mut shape: sys::mha_kv_cache_config = unsafe { zeroed() };
        shape.struct_size = size_of_val(&shape);
        // SAFETY: a valid cache.
        check(|error| unsafe { sys::mha_kv_cache_shape(raw.as_ptr(), &mut shape, error) })?;
        let unknown = || {
            Error::new(
                ErrorKind::CacheFormat,
                "the cache is of a kind that this version of the crate does not know",
            )
        };
        Ok(Self { raw, buffer, shape: CacheConfig::of_raw(&shape).ok_or_else(unknown)? })
    }

    /// What the cache was made for, all defaults resolved.
    pub fn shape(&self) -> &CacheConfig {
        &self.shape
    }

    /// The whole cache, to be copied or written to a file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer
    }

    /// How many positions a sequence has, those that a ring has overwritten among them.
    pub fn length(&self, sequence: usize) -> Result<usize> {
        // SAFETY: a valid cache.
        unsafe { length_of(self.raw.as_ptr(), int(sequence)) }
    }

    /// Forgets all positions of a sequence from `length` on, such as rejected tokens; 0 empties it.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        // SAFETY: a valid cache, which nobody else uses.
        check(|error| unsafe {
            sys::mha_kv_cache_truncate(self.raw.as_ptr(), int(sequence), int(length), error)
        })
    }

    /// Paged only: sets the blocks of a sequence in the order of their positions. Blocks that
    /// already hold positions of the sequence must stay in their places. Sequences may share the
    /// blocks of a common prefix; nothing can be appended to a shared block
    /// ([`unshare`](Self::unshare)). The caller keeps track of free blocks.
    ///
    /// To fork: `set_blocks(to, shared)`, then [`copy_prefix(from, to, n)`](Self::copy_prefix),
    /// which sets the length; before appending, [`unshare(to, free)`](Self::unshare), then
    /// `set_blocks` with free blocks after these.
    pub fn set_blocks(&mut self, sequence: usize, blocks: &[i32]) -> Result<()> {
        let (start, count) = (blocks.as_ptr(), int(blocks.len()));
        // SAFETY: as above; an array of this length.
        check(|error| unsafe {
            sys::mha_kv_cache_set_blocks(self.raw.as_ptr(), int(sequence), start, count, error)
        })
    }

    /// Paged only, copy on write: if the last block of a sequence is partly filled and other
    /// sequences share it, copies its positions to `block`, a free block of the pool, puts that in
    /// its place and returns true. Otherwise changes nothing and returns false. `block` may be -1
    /// if no block is free and nothing has to be copied.
    pub fn unshare(&mut self, sequence: usize, block: i32) -> Result<bool> {
        let mut used = 0;
        // SAFETY: as above.
        check(|error| unsafe {
            sys::mha_kv_cache_unshare(self.raw.as_ptr(), int(sequence), block, &mut used, error)
        })?;
        Ok(used != 0)
    }

    /// Replaces the contents of sequence `to` by the first `length` positions of sequence `from`,
    /// which is another one. Paged: `to` must already have blocks for them; a block that both have
    /// is not copied.
    pub fn copy_prefix(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
        // SAFETY: as above.
        check(|error| unsafe {
            sys::mha_kv_cache_copy_prefix(self.raw.as_ptr(), int(from), int(to), int(length), error)
        })
    }

    /// Appends rows to a sequence, without attention: `k` `[count, num_kv_heads, head_dim]`,
    /// rotated already if they are to be, and `v` `[count, num_kv_heads, head_dim_v]`, or empty
    /// where [values are in the keys](CacheConfig::values_in_keys).
    pub fn append(&mut self, sequence: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let count = rows_of("k", k.len(), 1, self.shape.num_kv_heads * self.shape.head_dim)?;
        let has_values = !(self.shape.values_in_keys && v.is_empty());
        self.check_rows(count, Some(k.len()), has_values.then_some(v.len()))?;
        let (cache, count, v) =
            (self.raw.as_ptr(), int(count), if has_values { v.as_ptr() } else { null() });
        // SAFETY: as above; arrays of these lengths.
        check(|error| unsafe {
            sys::mha_kv_cache_append(cache, int(sequence), count, k.as_ptr(), v, error)
        })
    }

    /// Reads positions of a sequence back, as the numbers that they are taken as: `k` `[positions,
    /// num_kv_heads, head_dim]`, `v` `[positions, num_kv_heads, head_dim_v]`; either may be `None`.
    pub fn read(
        &self, sequence: usize, positions: Range<usize>, k: Option<&mut [f32]>,
        v: Option<&mut [f32]>,
    ) -> Result<()> {
        let count = positions.len();
        self.check_rows(count, k.as_deref().map(<[f32]>::len), v.as_deref().map(<[f32]>::len))?;
        let pointer = |slice: Option<&mut [f32]>| slice.map_or(null_mut(), <[f32]>::as_mut_ptr);
        let (k, v, first, count) = (pointer(k), pointer(v), int(positions.start), int(count));
        // SAFETY: a valid cache, and arrays of these lengths or NULL.
        check(|error| unsafe {
            sys::mha_kv_cache_read(self.raw.as_ptr(), int(sequence), first, count, k, v, error)
        })
    }

    fn check_rows(&self, count: usize, k: Option<usize>, v: Option<usize>) -> Result<()> {
        let shape =
            |width| [("positions", count), ("num_kv_heads", self.shape.num_kv_heads), width];
        if let Some(len) = k {
            check_exact("k", len, &shape(("head_dim", self.shape.head_dim)))?;
        }
        if let Some(len) = v {
            check_exact("v", len, &shape(("head_dim_v", self.shape.head_dim_v)))?;
        }
        Ok(())
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::mha_kv_cache {
        self.raw.as_ptr()
    }
}

/// # Safety
/// A valid cache.
pub(crate) unsafe fn length_of(cache: *const sys::mha_kv_cache, sequence: i64) -> Result<usize> {
    let mut length = 0;
    check(|error| unsafe { sys::mha_kv_cache_length(cache, sequence, &mut length, error) })?;
    Ok(length as usize)
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KvCache").field(&self.shape).finish()
    }
}
