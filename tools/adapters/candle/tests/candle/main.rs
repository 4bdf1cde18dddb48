//! Beside candle's own operations, layers and models, on random weights.

mod layer;
mod linear;
mod models;
mod operator;
#[path = "../../examples/models/mod.rs"]
mod shapes;
mod support;
