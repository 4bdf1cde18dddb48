use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::ptr::NonNull;
use std::slice;

use crate::{Error, ErrorKind, Result};

const ALIGNMENT: usize = 64;

/// Bytes aligned to 64 bytes, as packed layers must be.
///
/// # Examples
///
/// ```
/// let mut buffer = mha::AlignedBuffer::zeroed(100)?;
/// buffer[99] = 1;
/// assert_eq!(buffer.as_ptr() as usize % 64, 0);
/// # Ok::<(), mha::Error>(())
/// ```
pub struct AlignedBuffer {
    // len + ALIGNMENT bytes, of any alignment: so large ones come from the system, zeroed without
    // being touched
    block: NonNull<u8>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its bytes.
unsafe impl Send for AlignedBuffer {}
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// Allocates `len` bytes of 0.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`].
    pub fn zeroed(len: usize) -> Result<Self> {
        let out_of_memory =
            || Error::new(ErrorKind::OutOfMemory, format!("there is no memory for {len} bytes"));
        let layout = block_layout(len).ok_or_else(out_of_memory)?;
        // SAFETY: the size is at least ALIGNMENT.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        // SAFETY: align_offset is less than ALIGNMENT, by which the block is larger than len.
        let start = unsafe { block.add(block.as_ptr().align_offset(ALIGNMENT)) };
        Ok(Self { block, start, len })
    }

    /// Copies `bytes`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// let buffer = mha::AlignedBuffer::copy_of(b"packed")?;
    /// assert_eq!(&buffer[..], b"packed");
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn copy_of(bytes: &[u8]) -> Result<Self> {
        let mut buffer = Self::zeroed(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer)
    }

    /// Reads all bytes of a file, such as a packed layer. [`Layer::pack`](crate::Layer::pack) has
    /// an example.
    ///
    /// # Errors
    ///
    /// Those of reading the file, and [`io::ErrorKind::OutOfMemory`].
    pub fn read_file(path: impl AsRef<Path>) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let too_large =
            |_| io::Error::new(io::ErrorKind::OutOfMemory, "the file does not fit into memory");
        let len = usize::try_from(file.metadata()?.len()).map_err(too_large)?;
        let mut buffer =
            Self::zeroed(len).map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
        file.read_exact(&mut buffer)?;
        Ok(buffer)
    }
}

fn block_layout(len: usize) -> Option<Layout> {
    Layout::from_size_align(len.checked_add(ALIGNMENT)?, 1).ok()
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, which was valid then.
        unsafe { dealloc(self.block.as_ptr(), block_layout(self.len).unwrap_unchecked()) }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: len bytes from start on are in the block, and all are initialised.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for AlignedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for AlignedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuffer({} bytes)", self.len)
    }
}

/// Something that owns or borrows bytes, kept where it does not move until it is dropped with this.
pub(crate) struct Owner<'a>(NonNull<dyn Anything + 'a>);

trait Anything {}
impl<T> Anything for T {}

impl<'a> Owner<'a> {
    /// The owner, and what `bytes_of` says to be its bytes.
    pub fn new<T: Send + Sync + 'a, B>(owner: T, bytes_of: impl FnOnce(&mut T) -> B) -> (Self, B) {
        let pointer = Box::into_raw(Box::new(owner));
        // SAFETY: comes from a Box, and nobody else has it.
        let kept = Self(unsafe { NonNull::new_unchecked(pointer as *mut (dyn Anything + 'a)) });
        let bytes = bytes_of(unsafe { &mut *pointer });
        (kept, bytes)
    }
}

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        // SAFETY: comes from a Box.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) })
    }
}

#[cfg(test)]
mod tests {
    use super::AlignedBuffer;

    #[test]
    fn a_buffer_of_any_length_is_aligned_and_zeroed_and_keeps_its_bytes_when_moved() {
        for len in [0, 1, 63, 64, 65, 1000] {
            let mut buffer = AlignedBuffer::zeroed(len).unwrap();
            assert!(
                buffer.as_ptr() as usize % 64 == 0
                    && buffer.len() == len
                    && buffer.iter().all(|&byte| byte == 0)
            );
            buffer.fill(7);
            let moved = std::thread::spawn(move || buffer).join().unwrap();
            assert!(AlignedBuffer::copy_of(&moved).unwrap().iter().all(|&byte| byte == 7));
        }
        assert!(AlignedBuffer::zeroed(usize::MAX).is_err());
    }
}
