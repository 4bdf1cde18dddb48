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
    /// Something that is needed was not given.
    NullPointer,
    /// The library that is linked is older than this crate.
    StructSize,
    /// A value is outside its range, two contradict each other, or a buffer is not aligned to 64
    /// bytes.
    InvalidValue,
    /// Dimensions that do not fit together.
    Shape,
    /// A size overflows, here or in a matrix product of the caller's.
    TooLarge,
    /// A workspace, packed buffer or cache is smaller than its size query says.
    BufferTooSmall,
    /// There is not enough memory.
    OutOfMemory,
    /// An instruction set was asked for that this machine or build does not have.
    InstructionSet,
    /// Bytes that are no packed layer, are truncated, of another version or back end.
    PackedFormat,
    /// The weights are not what was packed.
    PackedChecksum,
    /// A finite weight that f16 cannot hold.
    OutOfRange,
    /// A sequence of a cache has no room, or no block, for more positions.
    CacheFull,
    /// Rows would be appended or copied into a block of a paged cache that several sequences share:
    /// see [`KvCache::set_blocks`](crate::KvCache::set_blocks) and
    /// [`KvCache::unshare`](crate::KvCache::unshare).
    CacheShared,
    /// Bytes that are no cache, are truncated, damaged or of another version.
    CacheFormat,
    /// A slice does not have the length that the shapes and strides ask for. Found before the
    /// library is called.
    SliceLength,
    /// A status of a newer library that this crate does not know.
    Unknown(u32),
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<Box<str>>) -> Self {
        Self { kind, message: message.into() }
    }

    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// One sentence: what was wrong and what would be right. The same as
    /// [`to_string`](ToString::to_string).
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
    Err(Error::new(ErrorKind::of_status(error.status), message.to_string_lossy()))
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
