use std::fmt;
use std::mem::{size_of, zeroed};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{null_mut, NonNull};

use mha_sys as sys;

use crate::buffer::Owner;
use crate::error::check;
use crate::spans::{int, or};
use crate::{
    AlignedBuffer, Arithmetic, Elements, ElementsMut, Error, ErrorKind, Forward, Gate,
    InstructionSet, Linear, Result, Type, Weights,
};

/// The shape of a layer. `query_dim` and `num_heads` are required, and `head_dim` too unless
/// `num_heads * head_dim` is `query_dim`. 0 stands for the default of each other number;
/// [`Layer::shape`] has all defaults resolved. Query head h uses key and value head `h / (num_heads
/// / num_kv_heads)`.
///
/// # Examples
///
/// ```
/// use mha::{LayerConfig, Type};
///
/// // Llama 3 8B, with weights stored as bf16.
/// let config = LayerConfig::new(4096, 32).num_kv_heads(8).head_dim(128).weight_type(Type::Bf16);
/// assert_eq!(config.num_kv_heads, 8);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct LayerConfig {
    /// The width of a row of query (d_in, embed_dim), at least 1.
    pub query_dim: usize,
    /// The width of a row of key; 0 is `query_dim`.
    pub key_dim: usize,
    /// The width of a row of value; 0 is `key_dim`.
    pub value_dim: usize,
    /// The width of a row of output of a layer with W_O; 0 is `query_dim`. Without W_O, it must be
    /// 0; in [`Layer::shape`], it is the width of the context then.
    pub output_dim: usize,
    /// The number of query heads, at least 1.
    pub num_heads: usize,
    /// The number of key and value heads, a divisor of `num_heads` (grouped-query attention); 0 is
    /// `num_heads`.
    pub num_kv_heads: usize,
    /// The width of a query or key of one head; 0 is `query_dim / num_heads`.
    pub head_dim: usize,
    /// The width of a value of one head; 0 is `head_dim`.
    pub head_dim_v: usize,
    /// The factor of the scores, a finite number; 0 is `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// How the packed layer stores weights; [`Type::F32`] by default.
    pub weight_type: Type,
    /// How many inputs of an output share a scale: 16, 32, 64 or 128; 0 is all of them for
    /// [`Type::Int8`], and 32 for [`Type::Int4`]. [`Type::Int5`] and [`Type::Int6`] need groups.
    pub group_size: usize,
    /// How the packed layer stores scales and offsets of groups: [`Type::F32`], the default,
    /// [`Type::F16`], which must hold those of a quantiser exactly, or, in integer arithmetic,
    /// [`Type::Int8`], which takes integers from -128 to 127 and
    /// [`Matrix::block_scales`](crate::Matrix::block_scales).
    pub scale_type: Type,
    /// The arithmetic of the projections; [`Arithmetic::F32`] by default.
    pub arithmetic: Arithmetic,
    /// The function of a gate, which multiplies the context before W_O; [`Gate::None`] by default.
    pub gate: Gate,
    /// How many numbers the gate of a head has: 1, or `head_dim_v`; 0 is `head_dim_v` with a gate.
    pub gate_dim: usize,
}

impl LayerConfig {
    /// Describes a layer whose rows have `query_dim` elements, with `num_heads` heads.
    /// [`Layer::new`] checks the numbers.
    pub fn new(query_dim: usize, num_heads: usize) -> Self {
        Self { query_dim, num_heads, ..Self::default() }
    }

    /// Describes a linear layer with a matrix `[inputs, outputs]`, for [`Weights::linear`] and
    /// [`Layer::linear`].
    pub fn linear(inputs: usize, outputs: usize) -> Self {
        Self { query_dim: inputs, output_dim: outputs, ..Self::default() }
    }

    with_fields! {
        key_dim: usize, value_dim: usize, output_dim: usize, num_kv_heads: usize, head_dim: usize,
        head_dim_v: usize, scale: f32, weight_type: Type, group_size: usize, scale_type: Type,
        arithmetic: Arithmetic, gate: Gate, gate_dim: usize
    }

    fn raw(&self) -> sys::mha_layer_config {
        sys::mha_layer_config {
            struct_size: size_of::<sys::mha_layer_config>(),
            query_dim: int(self.query_dim),
            key_dim: int(self.key_dim),
            value_dim: int(self.value_dim),
            output_dim: int(self.output_dim),
            num_heads: int(self.num_heads),
            num_kv_heads: int(self.num_kv_heads),
            head_dim: int(self.head_dim),
            head_dim_v: int(self.head_dim_v),
            scale: self.scale,
            format: sys::mha_weight_format {
                type_: self.weight_type.raw(),
                group_size: self.group_size.try_into().unwrap_or(u32::MAX),
                scale_type: self.scale_type.raw(),
                arithmetic: self.arithmetic.raw(),
            },
            gate: self.gate.raw(),
            gate_dim: int(self.gate_dim),
        }
    }

    /// Whether nothing is set but what a linear layer has.
    fn is_linear(&self) -> bool {
        let linear = Self::linear(self.query_dim, self.output_dim);
        let (weight_type, group_size, scale_type) =
            (self.weight_type, self.group_size, self.scale_type);
        *self == Self { weight_type, group_size, scale_type, arithmetic: self.arithmetic, ..linear }
    }

    /// With the library's defaults in place of 0, wherever the config is a valid one.
    pub(crate) fn with_defaults(mut self) -> Self {
        self.key_dim = or(self.key_dim, self.query_dim);
        self.value_dim = or(self.value_dim, self.key_dim);
        self.output_dim = or(self.output_dim, self.query_dim);
        self.num_kv_heads = or(self.num_kv_heads, self.num_heads);
        self.head_dim = or(self.head_dim, self.query_dim.checked_div(self.num_heads).unwrap_or(0));
        self.head_dim_v = or(self.head_dim_v, self.head_dim);
        self.gate_dim =
            if self.gate == Gate::None { 0 } else { or(self.gate_dim, self.head_dim_v) };
        self
    }
}

/// Calls the function for layers, or its twin for linear ones.
macro_rules! either {
    ($described:expr, $of_layer:ident, $of_linear:ident, $($rest:expr),*) => {
        match $described {
            Described::Layer(config, weights) => sys::$of_layer(config, weights, $($rest),*),
            Described::Linear(weights) => sys::$of_linear(weights, $($rest),*),
        }
    };
}

fn options(instruction_set: InstructionSet) -> sys::mha_layer_options {
    // SAFETY: zero is the default of every other field.
    let rest = unsafe { zeroed() };
    sys::mha_layer_options {
        struct_size: size_of::<sys::mha_layer_options>(),
        instruction_set: instruction_set.0,
        ..rest
    }
}

/// The packed weights of a layer, and their shape. A layer is immutable: any number of threads may
/// use one, each with its own [`Workspace`](crate::Workspace) and [`KvCache`](crate::KvCache).
///
/// # Examples
///
/// ```
/// use mha::{Layer, LayerConfig, Weights, Workspace};
///
/// let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 4 * 12]))?;
/// std::thread::scope(|scope| {
///     for _ in 0..2 {
///         scope.spawn(|| {
///             layer.forward(&[1.0; 8], &mut [0.0; 8]).causal().run(&mut Workspace::new())
///         });
///     }
/// });
/// # Ok::<(), mha::Error>(())
/// ```
///
/// A layer over packed bytes borrows them, or owns what holds them:
///
/// ```
/// # use mha::{AlignedBuffer, Layer, LayerConfig, Weights};
/// let packed: AlignedBuffer = Layer::pack(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let borrowing: Layer<'_> = Layer::from_packed(&packed[..])?;
/// drop(borrowing);
/// // Of an AlignedBuffer, a memmap2::Mmap, ...
/// let owning: Layer<'static> = Layer::from_packed(packed)?;
/// # Ok::<(), mha::Error>(())
/// ```
///
/// ```compile_fail,E0505
/// # use mha::{AlignedBuffer, Layer, LayerConfig, Weights};
/// # let config = LayerConfig::new(4, 2);
/// # let packed: AlignedBuffer = Layer::pack(&config, &Weights::fused(&[0.25; 48]))?;
/// let borrowing = Layer::from_packed(&packed[..])?;
/// drop(packed); // does not compile: the layer still needs the bytes
/// println!("{:?}", borrowing.shape());
/// # Ok::<(), mha::Error>(())
/// ```
pub struct Layer<'a> {
    raw: NonNull<sys::mha_layer>,
    shape: LayerConfig,
    _memory: Memory<'a>,
}

enum Memory<'a> {
    /// Of the library.
    Created { _layer: Created },
    /// The object itself, and the packed bytes.
    Viewed { _object: AlignedBuffer, _bytes: Owner<'a> },
}

struct Created(NonNull<sys::mha_layer>);

impl Drop for Created {
    fn drop(&mut self) {
        // SAFETY: made by mha_layer_create, and borrowed by no call any more.
        unsafe { sys::mha_layer_destroy(self.0.as_ptr()) }
    }
}

// SAFETY: immutable, and free of thread-local state; owners of bytes are Send and Sync, and there
// is no other state.
unsafe impl Send for Layer<'_> {}
unsafe impl Sync for Layer<'_> {}
impl UnwindSafe for Layer<'_> {}
impl RefUnwindSafe for Layer<'_> {}

impl<'a> Layer<'a> {
    /// Packs the weights into memory of the layer. They are not needed afterwards.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Shape`], [`ErrorKind::InvalidValue`] and [`ErrorKind::TooLarge`] for a config
    /// or weights that do not fit together, [`ErrorKind::SliceLength`] for a slice that does not
    /// have its shape, [`ErrorKind::OutOfRange`] for a weight that f16 cannot hold, and
    /// [`ErrorKind::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{Layer, LayerConfig, Weights};
    ///
    /// // W_Q, W_K, W_V and W_O of a layer with 2 query heads and one key and value head.
    /// let (w_q, w_k, w_v, w_o) = ([0.5; 8 * 8], [0.5; 8 * 4], [0.5; 8 * 4], [0.5; 8 * 8]);
    /// let weights = Weights::new(&w_q, &w_k, &w_v).output(&w_o);
    /// let layer = Layer::new(&LayerConfig::new(8, 2).num_kv_heads(1), &weights)?;
    /// assert_eq!(layer.shape().head_dim, 4);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn new(config: &LayerConfig, weights: &Weights<'_>) -> Result<Self> {
        Self::with_instruction_set(config, weights, InstructionSet::AUTO)
    }

    /// Does the same as [`new`](Self::new), for calls on the given instruction set.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and [`ErrorKind::InstructionSet`] if this machine lacks the
    /// set.
    pub fn with_instruction_set(
        config: &LayerConfig, weights: &Weights<'_>, instruction_set: InstructionSet,
    ) -> Result<Self> {
        checked(config, weights, instruction_set, |described, options| {
            let mut layer = null_mut();
            // SAFETY: valid structs, whose slices have been checked.
            check(|error| unsafe {
                either!(described, mha_layer_create, mha_linear_create, options, &mut layer, error)
            })?;
            // SAFETY: not NULL on success.
            let raw = unsafe { NonNull::new_unchecked(layer) };
            Self::of(raw, Memory::Created { _layer: Created(raw) })
        })
    }

    /// Packs the weights into bytes for [`from_packed`](Self::from_packed), which can be written to
    /// a file. They are the same on every machine of this byte order, and serve every instruction
    /// set.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{AlignedBuffer, Layer, LayerConfig, Weights};
    ///
    /// let packed = Layer::pack(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 4 * 12]))?;
    /// # let file = std::env::temp_dir().join(format!("mha-doc-{}.mha", std::process::id()));
    /// std::fs::write(&file, &packed)?;
    /// let layer = Layer::from_packed(AlignedBuffer::read_file(&file)?)?;
    /// assert_eq!(layer.shape().num_heads, 2);
    /// # std::fs::remove_file(&file)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pack(config: &LayerConfig, weights: &Weights<'_>) -> Result<AlignedBuffer> {
        checked(config, weights, InstructionSet::AUTO, |described, options| {
            let mut buffer = AlignedBuffer::zeroed(described.pack_size(options)?)?;
            let (start, len) = (buffer.as_mut_ptr().cast(), buffer.len());
            // SAFETY: valid structs, whose slices have been checked; a buffer of this length.
            check(|error| unsafe {
                either!(described, mha_layer_pack, mha_linear_pack, options, start, len, error)
            })?;
            Ok(buffer)
        })
    }

    /// Makes a layer over packed bytes, aligned to 64 bytes, without copying them: a mapped file is
    /// loaded as it is used. The layer borrows the bytes (`&[u8]`), or owns what holds them (an
    /// [`AlignedBuffer`], a `memmap2::Mmap`, an `Arc` of such a thing). Checks header and bounds in
    /// constant time; [`verify`](Self::verify) also checks the weights. [`pack`](Self::pack) has an
    /// example.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::PackedFormat`] for bytes that are not a whole packed layer of this version, and
    /// [`ErrorKind::InvalidValue`] for bytes that are not aligned to 64 bytes.
    pub fn from_packed(bytes: impl AsRef<[u8]> + Send + Sync + 'a) -> Result<Self> {
        Self::from_packed_with_instruction_set(bytes, InstructionSet::AUTO)
    }

    /// Does the same as [`from_packed`](Self::from_packed), for calls on the given instruction set.
    ///
    /// # Errors
    ///
    /// Those of [`from_packed`](Self::from_packed), and [`ErrorKind::InstructionSet`] if this
    /// machine lacks the set.
    pub fn from_packed_with_instruction_set(
        bytes: impl AsRef<[u8]> + Send + Sync + 'a, set: InstructionSet,
    ) -> Result<Self> {
        let (owner, (start, len)) = Owner::new(bytes, |bytes| {
            let bytes: &[u8] = (*bytes).as_ref();
            (bytes.as_ptr(), bytes.len())
        });
        // SAFETY: no precondition.
        let mut object = AlignedBuffer::zeroed(unsafe { sys::mha_layer_view_size() })?;
        let (storage, storage_len) = (object.as_mut_ptr().cast(), object.len());
        let mut layer = std::ptr::null();
        // SAFETY: bytes that stay where they are, unchanged, until the owner is dropped, which is
        // after the layer's last use.
        check(|error| unsafe {
            sys::mha_layer_view(
                start.cast(),
                len,
                &options(set),
                storage,
                storage_len,
                &mut layer,
                error,
            )
        })?;
        // SAFETY: not NULL on success. Nothing changes the layer through the pointer.
        let raw = unsafe { NonNull::new_unchecked(layer.cast_mut()) };
        Self::of(raw, Memory::Viewed { _object: object, _bytes: owner })
    }

    /// Checks packed bytes as [`from_packed`](Self::from_packed) does, and the checksum of all
    /// weights. Reads all bytes.
    ///
    /// # Errors
    ///
    /// Those of [`from_packed`](Self::from_packed), and [`ErrorKind::PackedChecksum`] if the
    /// weights are not what was packed.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{ErrorKind, Layer, LayerConfig, Weights};
    ///
    /// let mut packed = Layer::pack(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 4 * 12]))?;
    /// Layer::verify(&packed)?;
    /// let middle = packed.len() / 2;
    /// packed[middle] ^= 1;
    /// assert_eq!(Layer::verify(&packed).unwrap_err().kind(), ErrorKind::PackedChecksum);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn verify(bytes: &[u8]) -> Result<()> {
        // SAFETY: bytes of this length.
        check(|error| unsafe { sys::mha_layer_verify(bytes.as_ptr().cast(), bytes.len(), error) })
    }

    fn of(raw: NonNull<sys::mha_layer>, memory: Memory<'a>) -> Result<Self> {
        // SAFETY: numbers.
        let mut shape: sys::mha_layer_config = unsafe { zeroed() };
        shape.struct_size = size_of_val(&shape);
        // SAFETY: a valid layer.
        check(|error| unsafe { sys::mha_layer_shape(raw.as_ptr(), &mut shape, error) })?;
        let unknown = || {
            Error::new(
                ErrorKind::PackedFormat,
                "the layer has a weight_type, an arithmetic or a gate that this version of the \
                    crate does not know",
            )
        };
        let size = |value: i64| value as usize; // of the library's own shapes, none is negative
        let shape = LayerConfig {
            query_dim: size(shape.query_dim),
            key_dim: size(shape.key_dim),
            value_dim: size(shape.value_dim),
            output_dim: size(shape.output_dim),
            num_heads: size(shape.num_heads),
            num_kv_heads: size(shape.num_kv_heads),
            head_dim: size(shape.head_dim),
            head_dim_v: size(shape.head_dim_v),
            scale: shape.scale,
            weight_type: Type::of_raw(shape.format.type_).ok_or_else(unknown)?,
            group_size: shape.format.group_size as usize,
            scale_type: Type::of_raw(shape.format.scale_type).ok_or_else(unknown)?,
            arithmetic: Arithmetic::of_raw(shape.format.arithmetic).ok_or_else(unknown)?,
            gate: Gate::of_raw(shape.gate).ok_or_else(unknown)?,
            gate_dim: size(shape.gate_dim),
        };
        Ok(Self { raw, shape, _memory: memory })
    }

    /// Returns the shape of the layer, all defaults resolved. `output_dim` is the width of a row of
    /// output, with or without W_O.
    pub fn shape(&self) -> &LayerConfig {
        &self.shape
    }

    /// Starts a call of the whole layer, from rows of `query`, `[batch, n_q, query_dim]`, to rows
    /// of `output`, `[batch, n_q, output_dim]`. Both are slices, arrays or vectors of `f32`, or
    /// [`Elements`] and [`ElementsMut`] of 16 bits. `n_q` follows from the length of `query`. Keys
    /// and values come from the same rows unless [`Forward::key`] or [`Forward::cache_read`] is
    /// set.
    ///
    /// # Examples
    ///
    /// ```
    /// use mha::{Layer, LayerConfig, Weights, Workspace};
    ///
    /// let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 4 * 12]))?;
    /// let (x, mut y) = ([1.0; 3 * 4], [0.0; 3 * 4]);
    /// layer.forward(&x, &mut y).causal().run(&mut Workspace::new())?;
    /// assert_eq!(y, [1.0; 12]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn forward<'c>(
        &'c self, query: impl Into<Elements<'c>>, output: impl Into<ElementsMut<'c>>,
    ) -> Forward<'c> {
        Forward::new(self, query.into(), output.into())
    }

    /// Starts a call of a linear layer, from rows `x`, `[rows, inputs]`, to rows of `output`,
    /// `[rows, outputs]`. A layer with heads multiplies by its W_O: x is the context, `[rows,
    /// num_heads * head_dim_v]`. [`Linear`] has an example.
    pub fn linear<'c>(
        &'c self, x: impl Into<Elements<'c>>, output: impl Into<ElementsMut<'c>>,
    ) -> Linear<'c> {
        Linear::new(self, x.into(), output.into())
    }

    pub(crate) fn as_ptr(&self) -> *const sys::mha_layer {
        self.raw.as_ptr()
    }
}

impl fmt::Debug for Layer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Layer").field(&self.shape).finish()
    }
}

/// A layer as the library takes it, or a linear one.
#[derive(Clone, Copy)]
enum Described<'a> {
    Layer(&'a sys::mha_layer_config, &'a sys::mha_layer_weights),
    Linear(&'a sys::mha_linear_weights),
}

impl Described<'_> {
    fn pack_size(self, options: &sys::mha_layer_options) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: valid structs, of whose arrays none is read.
        check(|error| unsafe {
            either!(self, mha_layer_pack_size, mha_linear_pack_size, options, &mut bytes, error)
        })?;
        Ok(bytes)
    }
}

/// Calls `body` with what the library takes, all checked.
fn checked<R>(
    config: &LayerConfig, weights: &Weights<'_>, instruction_set: InstructionSet,
    body: impl FnOnce(Described<'_>, &sys::mha_layer_options) -> Result<R>,
) -> Result<R> {
    let (raw_config, raw_options) = (config.raw(), options(instruction_set));
    weights.with_raw(|raw_weights| {
        let linear;
        let described = if weights.are_linear() && config.is_linear() {
            linear = sys::mha_linear_weights {
                struct_size: size_of::<sys::mha_linear_weights>(),
                input_dim: raw_config.query_dim,
                output_dim: raw_config.output_dim,
                w: raw_weights.w_o,
                layout: raw_weights.layout,
                type_: raw_weights.type_,
                format: raw_config.format,
            };
            Described::Linear(&linear)
        } else {
            Described::Layer(&raw_config, raw_weights)
        };
        // Which finds the config valid; only then its products, which check_slices makes, cannot
        // overflow.
        described.pack_size(&raw_options)?;
        weights.check_slices(&config.with_defaults())?;
        body(described, &raw_options)
    })
}
