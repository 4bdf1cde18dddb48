//! The promises of the crate, through what users see of it.

mod attention;
mod cache;
mod layer;
mod linear;
mod norm;
mod random;
mod recurrent;
mod score;
mod settings;
mod slices;
mod support;
mod threads;
