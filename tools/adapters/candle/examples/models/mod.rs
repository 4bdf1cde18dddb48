//! Models of the shapes of candle-transformers', with mha's attention in place of theirs. Each
//! takes the same weights by the same names, and the same config. What differs from an ordinary
//! model of candle's is marked "mha".

pub mod bert;
pub mod llama;
pub mod qwen3;

use std::collections::HashMap;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};

/// Weights for tests and benchmarks: small random numbers, the same ones for the same names.
pub struct RandomWeights {
    tensors: HashMap<String, Tensor>,
    dtype: DType,
}

impl RandomWeights {
    fn new(dtype: DType) -> Self {
        Self { tensors: HashMap::new(), dtype }
    }

    fn add(&mut self, name: &str, shape: &[usize], around: f32, scale: f32) {
        let count = shape.iter().product();
        let seed = name
            .bytes()
            .fold(17, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let numbers: Vec<f32> = random(seed, count).map(|number| around + scale * number).collect();
        let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu)
            .and_then(|tensor| tensor.to_dtype(self.dtype));
        self.tensors.insert(name.to_owned(), tensor.expect("a tensor on the CPU"));
    }

    fn linear(&mut self, name: &str, inputs: usize, outputs: usize, has_bias: bool) {
        self.add(&format!("{name}.weight"), &[outputs, inputs], 0.0, 1.7 / (inputs as f32).sqrt());
        if has_bias {
            self.add(&format!("{name}.bias"), &[outputs], 0.0, 0.1);
        }
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.add(&format!("{name}.weight"), &[width], 1.0, 0.3);
    }

    pub fn var_builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.tensors.clone(), self.dtype, &Device::Cpu)
    }
}

/// Numbers between -1 and 1.
pub fn random(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count).map(move |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

/// The feed-forward block of Llama and Qwen3.
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl GatedMlp {
    fn load(vb: VarBuilder, width: usize, inner: usize) -> Result<Self> {
        Ok(Self {
            gate: candle_nn::linear_no_bias(width, inner, vb.pp("gate_proj"))?,
            up: candle_nn::linear_no_bias(width, inner, vb.pp("up_proj"))?,
            down: candle_nn::linear_no_bias(inner, width, vb.pp("down_proj"))?,
        })
    }
}

impl Module for GatedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&(self.gate.forward(x)?.silu()? * self.up.forward(x)?)?)
    }
}
