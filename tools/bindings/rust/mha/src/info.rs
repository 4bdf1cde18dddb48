use mha_sys as sys;

use crate::InstructionSet;

/// How a call would run, and what it would cost.
///
/// # Examples
///
/// ```
/// use mha::{Attention, InstructionSet};
///
/// let (q, k, v, mut output) = ([1.0; 4], [1.0; 3 * 4], [1.0; 3 * 4], [0.0; 4]);
/// let info = Attention::new(1, 4).call(&q, &mut output).key_value(&k, &v).info()?;
/// assert_ne!(info.instruction_set, InstructionSet::AUTO);
/// assert!(info.operations >= 2 * 2 * 3 * 4); // q k^T and the weights times values
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallInfo {
    /// The instruction set of the kernels, never [`InstructionSet::AUTO`].
    pub instruction_set: InstructionSet,
    /// The arithmetic contract of the results, [`CONTRACT`](crate::CONTRACT); 0 if the thread does
    /// not round to nearest and keep subnormals.
    pub contract: u32,
    /// The most tasks at once.
    pub num_threads: usize,
    /// The bytes of workspace that the call needs.
    pub workspace_bytes: usize,
    /// The bytes of the packed layer, scales and biases included; 0 without a layer.
    pub packed_bytes: usize,
    /// Multiplications and additions, without pairs of query and key that the call excludes.
    pub operations: u64,
    /// The bytes of inputs, weights and outputs, and of what is appended to and read from a cache,
    /// each once and as stored.
    pub bytes: u64,
}

impl CallInfo {
    pub(crate) fn of_raw(raw: &sys::mha_call_info) -> Self {
        Self {
            instruction_set: InstructionSet(raw.instruction_set),
            contract: raw.contract,
            num_threads: raw.num_threads as usize,
            workspace_bytes: raw.workspace_bytes,
            packed_bytes: raw.packed_bytes,
            operations: raw.operations,
            bytes: raw.bytes,
        }
    }
}
