use mha_sys as sys;

use crate::InstructionSet;

/// How a call would be run, and its cost: nothing slow happens silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallInfo {
    /// The one that the kernels use, never [`InstructionSet::AUTO`].
    pub instruction_set: InstructionSet,
    /// The arithmetic contract of the results: [`CONTRACT`](crate::CONTRACT).
    pub contract: u32,
    /// The most tasks at once.
    pub num_threads: usize,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
    /// Bytes of the packed layer, as it is stored, scales and biases included; 0 for attention
    /// alone.
    pub packed_bytes: usize,
    /// Multiplications and additions, counting only the pairs that attend.
    pub operations: u64,
    /// Inputs, weights, outputs, and what is attended to of a cache; each counted once, as stored.
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
