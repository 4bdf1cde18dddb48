use std::fmt;

use crate::{AlignedBuffer, Result};

/// The memory that calls work in. It grows to what the largest call needs and stays that large, so
/// calls of the same or smaller shapes allocate nothing. It serves one call at a time: each thread
/// has its own.
///
/// # Examples
///
/// ```
/// # use mha::{Layer, LayerConfig, Weights, Workspace};
/// # let layer = Layer::new(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]))?;
/// let mut workspace = Workspace::new();
/// let (x, mut y) = ([1.0; 512 * 4], [0.0; 512 * 4]);
/// // No call of up to 512 rows allocates from here on.
/// workspace.reserve(layer.forward(&x, &mut y).causal().workspace_bytes()?)?;
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Default)]
pub struct Workspace(Option<AlignedBuffer>);

impl Workspace {
    /// Makes an empty workspace.
    pub fn new() -> Self {
        Self::default()
    }

    /// Grows the workspace to at least `bytes`; it never shrinks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`](crate::ErrorKind::OutOfMemory). The workspace is empty then.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        if self.len() < bytes {
            self.0 = None; // freed first
            self.0 = Some(AlignedBuffer::zeroed(bytes)?);
        }
        Ok(())
    }

    /// Returns how many bytes the workspace has.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |buffer| buffer.len())
    }

    /// Returns whether the workspace has no bytes yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn at_least(&mut self, bytes: usize) -> Result<&mut [u8]> {
        self.reserve(bytes)?;
        Ok(self.0.as_deref_mut().unwrap_or_default())
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workspace({} bytes)", self.len())
    }
}
