#![doc = include_str!("../README.md")]
//!
//! # Calls and their settings
//!
//! Each method of a call, a config or weights sets one thing; if it is called twice, the last value
//! counts. Settings that contradict each other, or that do nothing, are an error when the call runs
//! or when the layer or cache is made. A call checks the length of every slice before it writes
//! anything.
//!
//! # From C to Rust
//!
//! | `mha.h` | Here |
//! |---|---|
//! | `mha_layer_create`, `_pack`, `_view`, `_verify`, `_shape` | [`Layer::new`], [`pack`](Layer::pack), [`from_packed`](Layer::from_packed), [`verify`](Layer::verify), [`shape`](Layer::shape) |
//! | `mha_layer_config`, `mha_layer_weights`, `mha_layer_options` | [`LayerConfig`], [`Weights`], [`Layer::with_instruction_set`] |
//! | `mha_forward`, `mha_forward_workspace`, `mha_forward_info` | [`Layer::forward`], then [`Forward::run`], [`workspace_bytes`](Forward::workspace_bytes), [`info`](Forward::info) |
//! | `mha_recurrent_attention`, `mha_causal_conv` and their workspace and info | [`RecurrentAttention::call`], [`CausalConv::call`], and the same methods |
//! | `mha_choose_keys` | [`Attention::choose_keys`] |
//! | `mha_attention`, `mha_linear` and their workspace and info | [`Attention::call`], [`Layer::linear`], and the same methods |
//! | `mha_allocator`, `mha_sgemm` | not here: memory is Rust's, and the projections are the library's own |
//! | `mha_kv_cache` and its functions | [`KvCache`], [`CacheConfig`] |
//! | `mha_kv_pool` | [`KvPool`], [`PoolParts`], [`BlockTables`] |
//! | `mha_rope_tables`, `mha_rope` | [`RopeConfig::tables`] and [`fill`](RopeConfig::fill), [`Rope`] |
//! | `mha_norm` | [`Norm`], [`ContextNorm`] |
//! | `mha_sequences` | methods of a call by the names of the fields, such as [`Forward::cu_seqlens_q`]; `count` is the length of the lists |
//! | `mha_input`, `mha_output`, `mha_strides` | [`Elements`], [`ElementsMut`]; [`Forward::query_strides`], [`Strides`] and others |
//! | `mha_matrix` | [`Matrix`], and methods of [`Weights`] for biases |
//! | `mha_score_options`, `mha_score_arrays`, `mha_alibi_slopes`, `mha_t5_relative_bias` | [`ScoreOptions`], [`alibi_slopes`], [`t5_relative_bias`] |
//! | `mha_partials_merge`, `mha_partials_finish` | [`partials_merge`], [`Attention::finish_partials`] |
//! | `MHA_TYPE_*` | [`Type`] |
//! | `MHA_FUNCTION_*` | [`Gate`] |
//! | `MHA_ARITHMETIC_*` | [`Arithmetic`], [`LayerConfig::arithmetic`], `attention_arithmetic` |
//! | `mha_outputs` | [`Outputs`], [`Forward::lse`], [`Forward::attention_weights`], [`Attention::call_partials`] |
//! | `mha_scheduler` | [`Scheduler`] |
//! | `mha_error`, `mha_status` | [`Error`], [`ErrorKind`] |
//! | `mha_version`, `mha_contract`, `mha_instruction_sets` | [`version`], [`contract`], [`InstructionSet::available`] |
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

#[macro_use]
mod macros;

mod arrays;
mod attention;
mod buffer;
mod cache;
mod call;
mod error;
mod forward;
mod info;
mod layer;
mod linear;
mod norm;
mod options;
mod pool;
mod recurrent;
mod rope;
mod scheduler;
mod score;
mod spans;
mod types;
mod weights;
mod workspace;

pub use attention::{partials_merge, Attention, AttentionCall, Strides};
pub use buffer::AlignedBuffer;
pub use cache::{CacheConfig, CacheKind, KvCache};
pub use error::{Error, ErrorKind, Result};
pub use forward::Forward;
pub use info::CallInfo;
pub use layer::{Layer, LayerConfig};
pub use linear::Linear;
pub use norm::{ContextNorm, Norm};
pub use options::Outputs;
pub use pool::{BlockTables, KvPool, PoolParts};
pub use recurrent::{CausalConv, CausalConvCall, RecurrentAttention, RecurrentCall};
pub use rope::{Rope, RopeConfig, RopeStyle};
#[cfg(feature = "rayon")]
pub use scheduler::Rayon;
pub use scheduler::Scheduler;
pub use score::{alibi_slopes, t5_relative_bias, ScoreColumns, ScoreOptions, Segments};
pub use types::{Arithmetic, Elements, ElementsMut, Gate, InstructionSet, Type};
pub use weights::{Matrix, WeightLayout, Weights};
pub use workspace::Workspace;

/// The arithmetic contract that this version of the crate was written for. Results have the same
/// bits as long as this number is the same.
pub const CONTRACT: u32 = mha_sys::MHA_CONTRACT;

/// Returns the arithmetic contract of the linked library.
pub fn contract() -> u32 {
    // SAFETY: no precondition.
    unsafe { mha_sys::mha_contract() }
}

/// Returns the major, minor and patch version of the linked library, which may be newer than this
/// crate.
pub fn version() -> (u32, u32, u32) {
    // SAFETY: no precondition.
    let version = unsafe { mha_sys::mha_version() };
    (version / 10000, version / 100 % 100, version % 100)
}
