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
    /// The last `capacity` positions of each sequence are kept, for sliding windows. A call needs
    /// [`causal`](crate::Forward::causal) and [`window_left`](crate::Forward::window_left).
    Ring,
    /// Each sequence is a list of blocks from a common pool, which [`KvCache::set_blocks`] sets.
    Paged {
        /// Positions of a block, a multiple of 16.
        block_positions: usize,
        /// Blocks of the pool, numbered from 0.
        num_blocks: usize,
    },
    /// The same in the caller's memory, with lengths and tables of each call:
    /// [`KvPool`](crate::KvPool).
    Pool {
        /// Positions of a block, a multiple of 16.
        block_positions: usize,
        /// Blocks of the pool, numbered from 0.
        num_blocks: usize,
    },
}

/// The shape of a [`KvCache`]. Numbers are rounded to nearest, in f16 beyond its range to infinity.
/// int8 and int4 have a scale per position and head.
///
/// # Examples
///
/// ```
/// use mha::{CacheConfig, KvCache, Type};
///
/// let config = CacheConfig::new(4096, 8, 128).num_sequences(4).k_type(Type::F16);
/// let cache = KvCache::new(&config)?;
/// assert_eq!(cache.length(3)?, 0);
/// assert_eq!(cache.shape().v_type, Some(Type::F16));
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// The number of sequences, at least 1, numbered from 0; 1 by default.
    pub num_sequences: usize,
    /// The most positions of a sequence, at least 1. A ring keeps this many: a multiple of 16, and
    /// more than the left window. In a paged cache, it is a multiple of `block_positions`.
    pub capacity: usize,
    /// The layer's key and value heads.
    pub num_kv_heads: usize,
    /// The layer's width of a head's queries and keys.
    pub head_dim: usize,
    /// The layer's width of a head's values; 0, the default, is `head_dim`.
    pub head_dim_v: usize,
    /// The type of stored keys, any but int4; by default f32.
    pub k_type: Type,
    /// The type of stored values; None, the default, is `k_type`.
    /// With `values_in_keys`, another type is refused.
    pub v_type: Option<Type>,
    /// Whether a value is the first `head_dim_v` elements of its key, and is stored only once, as
    /// in absorbed multi-head latent attention (DeepSeek V2). Calls then append keys alone. False
    /// by default.
    pub values_in_keys: bool,
    /// How positions are kept; [`CacheKind::Contiguous`] by default.
    pub kind: CacheKind,
}

impl CacheConfig {
    /// Describes a cache of one sequence of up to `capacity` positions, with `num_kv_heads` heads
    /// whose keys and values have `head_dim` elements. [`KvCache::new`] checks the numbers.
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

    /// Describes a cache of one sequence of up to `capacity` positions for a layer of this shape:
    /// the config that the layer is made of, or [`Layer::shape`](crate::Layer::shape).
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{CacheConfig, LayerConfig};
    ///
    /// let config = CacheConfig::for_layer(&LayerConfig::new(4096, 32).num_kv_heads(8), 2048);
    /// assert_eq!((config.num_kv_heads, config.head_dim), (8, 128));
    /// ```
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

    /// Returns the bytes that a cache of this shape needs.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidValue`] for a number outside its range or settings that contradict each
    /// other, and [`ErrorKind::TooLarge`].
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{CacheConfig, CacheKind};
    ///
    /// let kind = CacheKind::Paged { block_positions: 16, num_blocks: 100 };
    /// assert!(CacheConfig::new(4096, 8, 128).kind(kind).bytes()? > 100 * 16 * 8 * 128 * 2 * 4);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn bytes(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: a valid struct.
        check(|error| unsafe { sys::mha_kv_cache_size(&self.raw(), &mut bytes, error) })?;
        Ok(bytes)
    }

    pub(crate) fn raw(&self) -> sys::mha_kv_cache_config {
        let (kind, block_positions, num_blocks) = match self.kind {
            CacheKind::Contiguous => (sys::MHA_CACHE_KIND_CONTIGUOUS, 0, 0),
            CacheKind::Ring => (sys::MHA_CACHE_KIND_RING, 0, 0),
            CacheKind::Paged { block_positions, num_blocks } => {
                (sys::MHA_CACHE_KIND_PAGED, block_positions, num_blocks)
            }
            CacheKind::Pool { block_positions, num_blocks } => {
                (sys::MHA_CACHE_KIND_POOL, block_positions, num_blocks)
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
            value_place: if self.values_in_keys {
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
            values_in_keys: raw.value_place == sys::MHA_CACHE_VALUES_IN_KEYS,
            kind: match raw.kind {
                sys::MHA_CACHE_KIND_CONTIGUOUS => CacheKind::Contiguous,
                sys::MHA_CACHE_KIND_RING => CacheKind::Ring,
                sys::MHA_CACHE_KIND_PAGED => CacheKind::Paged {
                    block_positions: size(raw.block_positions),
                    num_blocks: size(raw.num_blocks),
                },
                sys::MHA_CACHE_KIND_POOL => CacheKind::Pool {
                    block_positions: size(raw.block_positions),
                    num_blocks: size(raw.num_blocks),
                },
                _ => return None,
            },
        })
    }
}

/// The keys and values of earlier calls, after norm and rotation, so that a new token costs one row
/// of projections and one pass over the cache. It holds several sequences, each with its own
/// length.
///
/// A call with [`cache`](crate::Forward::cache) appends to a cache, and attends to all that is
/// there. Calls with [`cache_read`](crate::Forward::cache_read) only read it, any number of them
/// concurrently. A call that fails leaves a cache as it was.
///
/// [`as_bytes`](Self::as_bytes) returns bytes that can be written to a file, and
/// [`copy_of`](Self::copy_of) makes them a cache again.
///
/// # Examples
///
/// ```
/// use mha::{CacheConfig, KvCache, Layer, LayerConfig, Weights, Workspace};
///
/// let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 64))?;
/// let mut workspace = Workspace::new();
/// let mut y = [0.0; 12];
/// // A prompt of three rows, then one more row.
/// layer.forward(&[1.0; 12], &mut y).causal().cache(&mut cache).run(&mut workspace)?;
/// layer.forward(&[1.0; 4], &mut y[..4]).causal().cache(&mut cache).run(&mut workspace)?;
/// assert_eq!(cache.length(0)?, 4);
/// cache.truncate(0, 3)?; // drops the last row
///
/// let saved = cache.as_bytes().to_vec();
/// assert_eq!(KvCache::copy_of(&saved)?.length(0)?, 3);
/// # Ok::<(), mha::Error>(())
/// ```
///
/// A cache is borrowed by the call that appends to it:
///
/// ```compile_fail,E0499
/// # use mha::{CacheConfig, KvCache, Layer, LayerConfig, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// # let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 64))?;
/// # let (mut y, mut z) = ([0.0; 4], [0.0; 4]);
/// let first = layer.forward(&[1.0; 4], &mut y).cache(&mut cache);
/// // Does not compile: two calls append to one cache.
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
    /// Makes an empty cache. [`CacheConfig`] has an example.
    ///
    /// # Errors
    ///
    /// Those of [`CacheConfig::bytes`], and [`ErrorKind::OutOfMemory`].
    pub fn new(config: &CacheConfig) -> Result<Self> {
        Self::made_by(AlignedBuffer::zeroed(config.bytes()?)?, |start, len, cache, error| {
            // SAFETY: a valid struct, and a buffer of this length, which is the cache's alone.
            unsafe { sys::mha_kv_cache_init(&config.raw(), start, len, cache, error) }
        })
    }

    /// Makes a cache from the [bytes](Self::as_bytes) of another one, which are copied. They serve
    /// any instruction set. [`KvCache`] has an example.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::CacheFormat`] for bytes that are not a whole cache of this version, and
    /// [`ErrorKind::OutOfMemory`].
    pub fn copy_of(bytes: &[u8]) -> Result<Self> {
        Self::made_by(AlignedBuffer::copy_of(bytes)?, |start, len, cache, error| {
            // SAFETY: a buffer of this length, which is the cache's alone.
            unsafe { sys::mha_kv_cache_view(start, len, cache, error) }
        })
    }

    /// Copies the cache.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`].
    pub fn try_clone(&self) -> Result<Self> {
        Self::copy_of(self.as_bytes())
    }

    pub(crate) fn made_by(
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

    /// Returns the shape of the cache, all defaults resolved.
    pub fn shape(&self) -> &CacheConfig {
        &self.shape
    }

    /// Returns the whole cache as bytes, to be copied or written to a file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer
    }

    /// Returns the positions of a sequence, including those that a ring has overwritten.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidValue`] if the cache has no such sequence.
    pub fn length(&self, sequence: usize) -> Result<usize> {
        // SAFETY: a valid cache.
        unsafe { length_of(self.raw.as_ptr(), int(sequence)) }
    }

    /// Shortens a sequence to its first `length` positions, for example to drop rejected tokens; 0
    /// empties it. Blocks stay in its table until [`set_blocks`](Self::set_blocks) leaves them out.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidValue`] if the cache has no such sequence, or the sequence has fewer
    /// positions.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        // SAFETY: a valid cache, which nobody else uses.
        check(|error| unsafe {
            sys::mha_kv_cache_truncate(self.raw.as_ptr(), int(sequence), int(length), error)
        })
    }

    /// Sets the blocks of a sequence of a paged cache in the order of their positions, at most
    /// `capacity / block_positions` and without duplicates. Blocks that already hold positions of
    /// the sequence must stay in their places. The caller keeps track of free blocks.
    ///
    /// Sequences may share the blocks of a common prefix. To fork one, call `set_blocks(to,
    /// shared)`, then [`copy_prefix(from, to, length)`](Self::copy_prefix), which copies nothing
    /// then. Before the next append to either, call [`unshare`](Self::unshare): a shared block is
    /// never written.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidValue`] if the cache is not paged, or a block or the sequence does not
    /// exist.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{CacheConfig, CacheKind, KvCache};
    ///
    /// let kind = CacheKind::Paged { block_positions: 16, num_blocks: 4 };
    /// let mut cache = KvCache::new(&CacheConfig::new(32, 1, 2).num_sequences(2).kind(kind))?;
    /// cache.set_blocks(0, &[3])?;
    /// cache.append(0, &[1.0; 5 * 2], &[1.0; 5 * 2])?;
    /// // Sequence 1 begins with the same five positions, and gets a block of its own to append to.
    /// cache.set_blocks(1, &[3])?;
    /// cache.copy_prefix(0, 1, 5)?;
    /// assert!(cache.unshare(1, 0)?);
    /// cache.append(1, &[2.0; 2], &[2.0; 2])?;
    /// assert_eq!((cache.length(0)?, cache.length(1)?), (5, 6));
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn set_blocks(&mut self, sequence: usize, blocks: &[i32]) -> Result<()> {
        let (start, count) = (blocks.as_ptr(), int(blocks.len()));
        // SAFETY: as above; an array of this length.
        check(|error| unsafe {
            sys::mha_kv_cache_set_blocks(self.raw.as_ptr(), int(sequence), start, count, error)
        })
    }

    /// Copies on write in a paged cache: if the last block of a sequence is partly filled and other
    /// sequences share it, copies its positions to `block`, a free block of the pool, puts that in
    /// its place and returns true. Otherwise changes nothing and returns false. `block` may be -1
    /// if no block is free. [`set_blocks`](Self::set_blocks) has an example.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::CacheFull`] if a block is needed and `block` is -1, and
    /// [`ErrorKind::InvalidValue`] if the cache is not paged, or the block or the sequence does not
    /// exist.
    pub fn unshare(&mut self, sequence: usize, block: i32) -> Result<bool> {
        let mut used = 0;
        // SAFETY: as above.
        check(|error| unsafe {
            sys::mha_kv_cache_unshare(self.raw.as_ptr(), int(sequence), block, &mut used, error)
        })?;
        Ok(used != 0)
    }

    /// Replaces the contents of sequence `to` by the first `length` positions of sequence `from`,
    /// which is another one. In a paged cache, `to` must already have blocks for them; a block that
    /// both have is not copied.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidValue`] if the cache has no such sequences or positions,
    /// [`ErrorKind::CacheFull`] if `to` lacks blocks, and [`ErrorKind::CacheShared`] if one of them
    /// is shared with another sequence.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{CacheConfig, KvCache};
    ///
    /// let mut cache = KvCache::new(&CacheConfig::new(16, 1, 2).num_sequences(2))?;
    /// cache.append(0, &[1.0; 5 * 2], &[1.0; 5 * 2])?;
    /// cache.copy_prefix(0, 1, 3)?;
    /// assert_eq!(cache.length(1)?, 3);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn copy_prefix(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
        // SAFETY: as above.
        check(|error| unsafe {
            sys::mha_kv_cache_copy_prefix(self.raw.as_ptr(), int(from), int(to), int(length), error)
        })
    }

    /// Appends rows to a sequence on the calling thread, without attention: keys `k`, `[count,
    /// num_kv_heads, head_dim]`, and values `v`, `[count, num_kv_heads, head_dim_v]`, already
    /// normalised and rotated. Values are empty if they [are in the
    /// keys](CacheConfig::values_in_keys).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::SliceLength`] for a slice that does not have its shape,
    /// [`ErrorKind::InvalidValue`] if the cache has no such sequence, and [`ErrorKind::CacheFull`]
    /// and [`ErrorKind::CacheShared`] if it has no room for the rows.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{CacheConfig, KvCache};
    ///
    /// let mut cache = KvCache::new(&CacheConfig::new(16, 1, 2))?;
    /// cache.append(0, &[1.0, 2.0, 3.0, 4.0], &[0.5; 4])?;
    /// let mut k = [0.0; 2];
    /// cache.read(0, 1..2, Some(&mut k), None)?;
    /// assert_eq!(k, [3.0, 4.0]);
    /// # Ok::<(), mha::Error>(())
    /// ```
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

    /// Reads positions of a sequence as the numbers that attention uses: `k` receives `[positions,
    /// num_kv_heads, head_dim]`, and `v` `[positions, num_kv_heads, head_dim_v]`. Either may be
    /// None. [`append`](Self::append) has an example.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::SliceLength`] for a slice that does not have its shape, and
    /// [`ErrorKind::InvalidValue`] for positions that the sequence does not have, or that a ring
    /// has overwritten.
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
        let [heads, width, width_v] = extents!(self.shape => num_kv_heads, head_dim, head_dim_v);
        for (name, len, width) in [("k", k, width), ("v", v, width_v)] {
            let shape = [("positions", count), heads, width];
            len.map_or(Ok(()), |len| check_exact(name, len, &shape))?;
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
