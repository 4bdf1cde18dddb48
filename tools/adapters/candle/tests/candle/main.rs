//! Beside candle's own operations and layers, on random weights. Whole models are compared by
//! tests/consumers/engines.

mod layer;
mod linear;
mod operator;
mod support;
