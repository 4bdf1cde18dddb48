#![doc = include_str!("../README.md")]
#![deny(missing_docs)]
#![forbid(unsafe_code)]

/// Setters of fields, each by its own name.
macro_rules! setters {
    ($($(#[$text:meta])* $name:ident: $type:ty;)*) => {
        $($(#[$text])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name.into();
            self
        })*
    };
}

mod attention;
mod cache;
mod layer;
mod linear;
mod rope;
mod tensors;
mod weights;

pub use attention::{flash_attn, sdpa, Attention};
pub use cache::KvCache;
pub use layer::{AttentionConfig, Call, Names, Parts, SelfAttention};
pub use linear::{Linear, LinearConfig};
/// The crate that this one is built on: types of storage, arithmetics, tables of rotation, ALiBi's
/// slopes.
pub use mha;
pub use rope::Rope;
