#![doc = include_str!("../README.md")]
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod attention;
#[cfg(feature = "nn")]
mod cache;
#[cfg(feature = "nn")]
mod layer;
#[cfg(feature = "nn")]
mod linear;
#[cfg(feature = "nn")]
mod rope;
mod stock;
mod tensors;

pub use attention::{flash_attn, sdpa, Attention};
#[cfg(feature = "nn")]
pub use cache::KvCache;
#[cfg(feature = "nn")]
pub use layer::{AttentionConfig, Call, Names, Parts, SelfAttention};
#[cfg(feature = "nn")]
pub use linear::{Linear, LinearConfig};
/// The crate that this one is built on: types of storage, arithmetics, tables of rotation, ALiBi's slopes.
pub use mha;
#[cfg(feature = "nn")]
pub use rope::Rope;
