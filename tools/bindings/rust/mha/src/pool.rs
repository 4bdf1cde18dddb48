use std::fmt;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr::null_mut;

use mha_sys as sys;

use crate::spans::{check_exact, check_lengths, int, or};
use crate::{
    AlignedBuffer, CacheConfig, CacheKind, Error, ErrorKind, KvCache, Result, Strides, Type,
};

/// Where the parts of a [`KvPool`] lie in its memory: for each the byte at which block 0 begins,
/// so that its address is a multiple of 64, and the bytes from block to block, a multiple of 16;
/// 0 = contiguous. Parts may share a page, but not overlap.
///
/// In a block lie keys `[num_kv_heads, block_positions / 16, head_dim, 16]`, with values in keys
/// `[num_kv_heads, block_positions, ceil16(head_dim)]`, values `[num_kv_heads, block_positions,
/// ceil16(head_dim_v)]`, of int4 in half a byte each, and scales, `f32 [num_kv_heads,
/// block_positions]`. ceil16 rounds up to a multiple of 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolParts {
    k: Option<(usize, usize)>,
    v: Option<(usize, usize)>,
    k_scales: Option<(usize, usize)>,
    v_scales: Option<(usize, usize)>,
}

impl PoolParts {
    /// Says where the keys lie.
    pub fn keys(offset: usize, stride: usize) -> Self {
        Self { k: Some((offset, stride)), ..Self::default() }
    }

    setters! {
        /// Says where the values lie, unless they are in the keys.
        values(offset: usize, stride: usize) => v = Some((offset, stride));
        /// Says where the scales of int8 keys lie.
        key_scales(offset: usize, stride: usize) => k_scales = Some((offset, stride));
        /// Says where the scales of int8 and int4 values lie.
        value_scales(offset: usize, stride: usize) => v_scales = Some((offset, stride));
    }
}

/// Blocks of keys and values in the caller's memory, of which the caller keeps the lengths and
/// block tables of sequences, as a serving engine does. They come with each call as
/// [`BlockTables`]; the bits are those of a paged [`KvCache`].
///
/// # Examples
///
/// ```
/// use mha::{AlignedBuffer, BlockTables, CacheConfig, CacheKind, KvPool, PoolParts};
/// # use mha::{Layer, LayerConfig, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
///
/// // Pages of 256 bytes of keys and 2048 of values, for two heads of width 2.
/// let mut memory = AlignedBuffer::zeroed(8 * 2304)?;
/// let kind = CacheKind::Pool { block_positions: 16, num_blocks: 8 };
/// let config = CacheConfig::for_layer(layer.shape(), 64).kind(kind);
/// let parts = PoolParts::keys(0, 2304).values(256, 2304);
/// let mut pool = KvPool::new(&config, &mut memory, &parts)?;
/// let (mut y, tables) = ([0.0; 12], BlockTables::new(&[0], &[5, -1], 2));
/// layer.forward(&[1.0; 12], &mut y).causal().pool(&mut pool, tables).run(&mut Workspace::new())?;
/// # Ok::<(), mha::Error>(())
/// ```
pub struct KvPool<'a> {
    cache: KvCache,
    _memory: PhantomData<&'a mut [u8]>,
}

impl<'a> KvPool<'a> {
    /// Makes a pool over memory, whose contents may be anything. The config is of
    /// [`CacheKind::Pool`]; its `num_sequences` is the most sequences of a call.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::SliceLength`] if the blocks of a part reach beyond the memory,
    /// [`ErrorKind::NullPointer`] if a part is missing, [`ErrorKind::InvalidValue`] for parts that
    /// overlap, are misaligned or are none of the config's, those of [`CacheConfig::bytes`], and
    /// [`ErrorKind::OutOfMemory`].
    pub fn new(config: &CacheConfig, memory: &'a mut [u8], parts: &PoolParts) -> Result<Self> {
        let bytes = config.bytes()?; // says what is wrong with the numbers
        let CacheKind::Pool { block_positions, num_blocks } = config.kind else {
            let message = "config.kind is not CacheKind::Pool; set it, or call KvCache::new";
            return Err(Error::new(ErrorKind::InvalidValue, message));
        };
        let positions = config.num_kv_heads.saturating_mul(block_positions);
        let rounded = |width: usize| width.div_ceil(16).saturating_mul(16);
        let k_width =
            if config.values_in_keys { rounded(config.head_dim) } else { config.head_dim };
        let v_width = rounded(or(config.head_dim_v, config.head_dim));
        let (k_type, v_type) = (config.k_type, config.v_type.unwrap_or(config.k_type));
        let of_position = [
            ("keys", parts.k, halves(k_type).saturating_mul(k_width)),
            ("values", parts.v, halves(v_type).saturating_mul(v_width)),
            ("key_scales", parts.k_scales, halves(Type::F32)),
            ("value_scales", parts.v_scales, halves(Type::F32)),
        ];
        let mut raw = [(null_mut::<u8>(), 0); 4];
        for ((name, part, halves), raw) in of_position.into_iter().zip(&mut raw) {
            let Some((offset, row)) = part else { continue };
            let within = memory.len().saturating_sub(offset);
            let shape =
                [("num_blocks", num_blocks), ("bytes", positions.saturating_mul(halves) / 2)];
            check_lengths(name, within, Some(Strides { row, ..Strides::default() }), &shape)?;
            *raw = (memory.as_mut_ptr().wrapping_add(offset), int(row));
        }
        let [k, v, k_scales, v_scales] = raw;
        let raw = sys::mha_kv_pool {
            struct_size: size_of::<sys::mha_kv_pool>(),
            k: k.0.cast(),
            v: v.0.cast(),
            k_scales: k_scales.0.cast(),
            v_scales: v_scales.0.cast(),
            k_block_stride: k.1,
            v_block_stride: v.1,
            k_scales_block_stride: k_scales.1,
            v_scales_block_stride: v_scales.1,
        };
        let cache = KvCache::made_by(AlignedBuffer::zeroed(bytes)?, |start, len, cache, error| {
            // SAFETY: valid structs, whose blocks lie in the memory, and a buffer of this length,
            // which is the pool's alone.
            unsafe { sys::mha_kv_pool_init(&config.raw(), &raw, start, len, cache, error) }
        })?;
        Ok(Self { cache, _memory: PhantomData })
    }

    /// Returns the shape of the pool, all defaults resolved.
    pub fn shape(&self) -> &CacheConfig {
        self.cache.shape()
    }

    pub(crate) fn as_cache(&self) -> &KvCache {
        &self.cache
    }
}

impl fmt::Debug for KvPool<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KvPool").field(self.shape()).finish()
    }
}

/// How many half bytes a number has.
fn halves(kind: Type) -> usize {
    match kind {
        Type::F32 => 8,
        Type::F16 | Type::Bf16 => 4,
        Type::Int8 | Type::Int5 | Type::Int6 => 2, // no cache has the last two
        Type::Int4 => 1,
    }
}

/// The lengths and blocks of the sequences of a call with a [`KvPool`], which has an example.
/// Position p of a sequence is in block `p / block_positions` of its table. Entries that no
/// position needs may be anything.
#[derive(Debug, Clone, Copy)]
pub struct BlockTables<'a> {
    pub(crate) lengths: &'a [i64],
    pub(crate) blocks: &'a [i32],
    pub(crate) entries: usize,
    pub(crate) stride: usize,
    pub(crate) starts: Option<&'a [i64]>,
}

impl<'a> BlockTables<'a> {
    /// Gives the positions that each sequence has before the call, `[sequences]`, and tables of
    /// equal length, `[sequences, entries]`.
    pub fn new(lengths: &'a [i64], blocks: &'a [i32], entries: usize) -> Self {
        Self { lengths, blocks, entries, stride: 0, starts: None }
    }

    /// Gives tables of any length one after the other: that of sequence s is the blocks from
    /// `starts[s]` up to `starts[s + 1]`.
    pub fn ragged(lengths: &'a [i64], blocks: &'a [i32], starts: &'a [i64]) -> Self {
        Self { lengths, blocks, entries: blocks.len(), stride: 0, starts: Some(starts) }
    }

    setters! {
        /// Sets the elements from table to table of equal length; 0, the default, is contiguous.
        stride(elements: usize) => stride = elements;
    }

    pub(crate) fn check(&self, sequences: usize) -> Result<()> {
        check_exact("lengths", self.lengths.len(), &[("sequences", sequences)])?;
        if let Some(starts) = self.starts {
            let shape = [("sequences + 1", sequences.saturating_add(1))];
            return check_exact("starts", starts.len(), &shape);
        }
        let strides = Strides { row: self.stride, ..Strides::default() };
        let shape = [("sequences", sequences), ("entries", self.entries)];
        check_lengths("blocks", self.blocks.len(), Some(strides), &shape)
    }
}
