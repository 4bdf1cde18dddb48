use std::error;
use std::ffi::CStr;
use std::fmt;
use std::mem::MaybeUninit;

use mha_sys as sys;

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What was wrong, and in a sentence what would be right. Messages of the library name C functions
/// and fields; the table on the [first page](crate#from-c-to-rust) has their Rust names.
///
/// # Examples
///
/// ```
/// use mha::{ErrorKind, Layer, LayerConfig, Weights};
///
/// let error = Layer::new(&LayerConfig::new(16, 6), &Weights::fused(&[0.0; 768])).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Shape);
/// assert!(error.to_string().starts_with("num_heads is 6"), "{error}");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: Box<str>,
}

/// The kinds of [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An array or a setting that is needed is missing.
    NullPointer,
    /// The library that is linked is older than this crate.
    StructSize,
    /// A value is outside its range, settings contradict each other or do nothing, or a buffer is
    /// not aligned to 64 bytes.
    InvalidValue,
    /// Dimensions do not fit together.
    Shape,
    /// A size overflows.
    TooLarge,
    /// A workspace, packed buffer or cache is smaller than its size query says.
    BufferTooSmall,
    /// There is not enough memory.
    OutOfMemory,
    /// This machine or build does not have the instruction set.
    InstructionSet,
    /// The bytes are not a packed layer, are truncated, or are of another version or back end.
    PackedFormat,
    /// The weights are not what was packed.
    PackedChecksum,
    /// A finite weight is too large for f16.
    OutOfRange,
    /// A sequence of a cache has no room, or no block, for more positions.
    CacheFull,
    /// Several sequences of a paged cache share the block that a call would write to:
    /// [`KvCache::unshare`](crate::KvCache::unshare) replaces it.
    CacheShared,
    /// The bytes are not a cache, are truncated or damaged, or are of another version.
    CacheFormat,
    /// A slice does not have the length that its shape and strides require. The crate finds this
    /// before it calls the library.
    SliceLength,
    /// The linked library is newer, and this crate does not know its status.
    Unknown(u32),
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<Box<str>>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns what was wrong and what would be right, in one sentence, as
    /// [`to_string`](ToString::to_string) does.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl ErrorKind {
    /// The kind of a status (`MHA_ERROR_*`) of the C interface.
    fn of_status(status: sys::mha_status) -> Self {
        match status {
            sys::MHA_ERROR_NULL_POINTER => Self::NullPointer,
            sys::MHA_ERROR_STRUCT_SIZE => Self::StructSize,
            sys::MHA_ERROR_INVALID_VALUE => Self::InvalidValue,
            sys::MHA_ERROR_SHAPE => Self::Shape,
            sys::MHA_ERROR_TOO_LARGE => Self::TooLarge,
            sys::MHA_ERROR_BUFFER_TOO_SMALL => Self::BufferTooSmall,
            sys::MHA_ERROR_OUT_OF_MEMORY => Self::OutOfMemory,
            sys::MHA_ERROR_INSTRUCTION_SET => Self::InstructionSet,
            sys::MHA_ERROR_PACKED_FORMAT => Self::PackedFormat,
            sys::MHA_ERROR_PACKED_CHECKSUM => Self::PackedChecksum,
            sys::MHA_ERROR_OUT_OF_RANGE => Self::OutOfRange,
            sys::MHA_ERROR_CACHE_FULL => Self::CacheFull,
            sys::MHA_ERROR_CACHE_SHARED => Self::CacheShared,
            sys::MHA_ERROR_CACHE_FORMAT => Self::CacheFormat,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl error::Error for Error {}

/// Calls a function of the library, and makes its status and sentence an error.
pub(crate) fn check(call: impl FnOnce(*mut sys::mha_error) -> sys::mha_status) -> Result<()> {
    let mut error = MaybeUninit::uninit();
    if call(error.as_mut_ptr()) == sys::MHA_OK {
        return Ok(());
    }
    // SAFETY: a function that takes a mha_error always writes it, with a message that ends in 0.
    let error = unsafe { error.assume_init() };
    let message = unsafe { CStr::from_ptr(error.message.as_ptr()) };
    // The fields of mha_weight_format are settings of their own.
    let message = message.to_string_lossy().replace("format.type", "weight_type");
    Err(Error::new(ErrorKind::of_status(error.status), message.replace("format.", "")))
}

/// Refuses two settings of which only one can hold: each has its name, and whether it is given.
pub(crate) fn only_one(one: (&str, bool), other: (&str, bool)) -> Result<()> {
    if !(one.1 && other.1) {
        return Ok(());
    }
    let message = format!("{} and {} are both given; give one of them", one.0, other.0);
    Err(Error::new(ErrorKind::InvalidValue, message))
}

/// Refuses a setting that does nothing without another one.
pub(crate) fn needs(setting: (&str, bool), needed: (&str, bool)) -> Result<()> {
    if !setting.1 || needed.1 {
        return Ok(());
    }
    let (name, needed) = (setting.0, needed.0);
    let message = format!("{name} is given without {needed}; leave it out, or give {needed}");
    Err(Error::new(ErrorKind::InvalidValue, message))
}
