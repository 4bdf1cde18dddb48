use mha_sys as sys;

use crate::InstructionSet;

/// What runs the projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackEnd {
    /// The library's own kernels.
    Native,
    /// An [`Sgemm`](crate::Sgemm) of the caller's.
    Sgemm,
    /// One of a newer library, by its number.
    Unknown(u32),
}

/// How a call would be run, and its cost: nothing slow happens silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallInfo {
    /// The one that the kernels use, never [`InstructionSet::AUTO`].
    pub instruction_set: InstructionSet,
    /// What runs the projections.
    pub back_end: BackEnd,
    /// The arithmetic contract of the results: [`CONTRACT`](crate::CONTRACT) on the native back end, else 0.
    pub contract: u32,
    /// The most tasks at once.
    pub num_threads: usize,
    /// Input rows in a register tile of the projections; 0 = no own projection.
    pub project_tile_rows: usize,
    /// Output columns in that tile.
    pub project_tile_columns: usize,
    /// Query rows in a register tile of the attention.
    pub attend_tile_rows: usize,
    /// Query rows in a unit of work.
    pub attend_block_rows: usize,
    /// Keys in a chunk.
    pub attend_chunk_keys: usize,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
    /// Bytes of the packed layer, as it is stored, scales and biases included; 0 for attention alone.
    pub packed_bytes: usize,
    /// Multiplications and additions, counting only the pairs that attend.
    pub operations: u64,
    /// Inputs, weights, outputs, and what is attended to of a cache; each counted once, as stored.
    pub bytes: u64,
}

impl CallInfo {
    pub(crate) fn of_raw(raw: &sys::mha_call_info) -> Self {
        let size = |value: i64| value as usize; // none is negative
        Self {
            instruction_set: InstructionSet(raw.instruction_set),
            back_end: match raw.back_end {
                sys::MHA_BACK_END_NATIVE => BackEnd::Native,
                sys::MHA_BACK_END_SGEMM => BackEnd::Sgemm,
                other => BackEnd::Unknown(other),
            },
            contract: raw.contract,
            num_threads: raw.num_threads as usize,
            project_tile_rows: size(raw.project_tile_rows),
            project_tile_columns: size(raw.project_tile_columns),
            attend_tile_rows: size(raw.attend_tile_rows),
            attend_block_rows: size(raw.attend_block_rows),
            attend_chunk_keys: size(raw.attend_chunk_keys),
            workspace_bytes: raw.workspace_bytes,
            packed_bytes: raw.packed_bytes,
            operations: raw.operations,
            bytes: raw.bytes,
        }
    }
}
